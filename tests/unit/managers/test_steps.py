"""The steps of a round, and what those hear of it who choose tokens beside them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.spec_decode.draft import StepRunner


class Beside:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def on_round_start(self, forwards, selection_interval):
        self.told.append(("begun", forwards, selection_interval))

    def observe_step(self, compressed_kv, ends, following):
        self.told.append(("steps", following))

    def on_step_end(self, compressed_kv, ends, following):
        self.told.append(("stepped", following))


class OnFullKV(StepRunner):
    """Steps of a model that gives zeros, of requests without copies."""

    def __init__(self, worker):
        self.worker, self.table = worker, worker.compressed_kv.token_table

    def forward(self, batch, inputs, on_full_kv=True):
        return SimpleNamespace(next_token_logits=torch.zeros(len(inputs.tokens), 5))

    def _step_sampler(self, batch, round_):
        return SimpleNamespace(draw=lambda logits, positions: SimpleNamespace(tokens=logits.argmax(-1)))


@pytest.mark.parametrize("lossy", [False, True], ids=["verified", "lossy"])
def test_who_chooses_beside_steps_hears_of_each_round_before_them_with_its_verifications(lossy):
    beside = Beside()
    compressed_kv = SimpleNamespace(token_table=torch.zeros(4, 40, dtype=torch.int32), async_selector=beside, method=None)
    queries = SimpleNamespace(recording=lambda rows, watch: nullcontext(), has_step_queries=False)
    worker = SimpleNamespace(compressed_kv=compressed_kv, queries=queries, lossy=lossy)
    round_ = SimpleNamespace(
        num_steps=3, verify_batches=[] if lossy else [[0, 1]], rows=[1, 2], row_lens=[7, 9], starts=[7, 9], states=[None, None], full_kv_reqs=[], on_full_kv=True,
        num_pending=[0, 0], reads_compressed=lambda i: False, selection_interval=4,
    )  # fmt: skip
    rows = torch.tensor([1, 2])
    batch = SimpleNamespace(req_pool_indices=rows, seq_lens=rows + 6)
    penalized = SimpleNamespace(penalize_step=lambda index, tokens, logits: None)
    launched: list[list[tuple]] = []
    slots = torch.zeros(2, 4, dtype=torch.int64)
    found = OnFullKV(worker).run(batch, round_, rows, slots, rows + 6, penalized, lambda: launched.append([*beside.told]))
    assert len(found) == 3
    left = [None] * 3 if lossy else [2, 1, 0]
    assert beside.told == [("begun", 3 if lossy else 4, 4), *((what, following) for following in left for what in ("steps", "stepped"))]
    assert launched == [beside.told[:3]], "once, after the first step"
