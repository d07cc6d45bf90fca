"""The steps of a round, and what those hear of it who choose tokens beside them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.spec_decode.steps import Steps


class Beside:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def begun(self, forwards, every):
        self.told.append(("begun", forwards, every))

    def stepped(self, views, ends, following):
        self.told.append(("stepped", following))


class OnFullKV(Steps):
    """Steps of a model that gives zeros, of requests without copies."""

    def __init__(self, worker):
        self.worker, self.table = worker, worker.views.token_table

    def forward(self, batch, inputs, on_full_kv=True):
        return SimpleNamespace(next_token_logits=torch.zeros(len(inputs.tokens), 5))

    def _stepping(self, batch, round_):
        return SimpleNamespace(draw=lambda logits, positions: SimpleNamespace(tokens=logits.argmax(-1)))


@pytest.mark.parametrize("lossy", [False, True], ids=["verified", "lossy"])
def test_who_chooses_beside_steps_hears_of_each_round_before_them_with_its_verifications(lossy):
    beside = Beside()
    views = SimpleNamespace(token_table=torch.zeros(4, 40, dtype=torch.int32), beside=beside, elsewhere=None, method=None)
    queries = SimpleNamespace(recording=lambda rows, watch: nullcontext(), left_by_steps=False)
    worker = SimpleNamespace(views=views, queries=queries, lossy=lossy)
    round_ = SimpleNamespace(
        steps=3, parts=[] if lossy else [[0, 1]], rows=[1, 2], viewed=[7, 9], starts=[7, 9], states=[None, None], answering=[], on_full_kv=True,
        gathered=[0, 0], on_copy=lambda i: False, every=4,
    )  # fmt: skip
    rows = torch.tensor([1, 2])
    batch = SimpleNamespace(req_pool_indices=rows, seq_lens=rows + 6)
    penalized = SimpleNamespace(step=lambda index, tokens, logits: None)
    found = OnFullKV(worker).run(batch, round_, rows, torch.zeros(2, 4, dtype=torch.int64), rows + 6, penalized)
    assert len(found) == 3
    left = [None] * 3 if lossy else [2, 1, 0]
    assert beside.told == [("begun", 3 if lossy else 4, 4), *(("stepped", following) for following in left)]
