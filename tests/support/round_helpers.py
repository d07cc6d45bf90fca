"""Requests, compressed KV and rounds without a model."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.core import MIN_CONTEXT, AcceptanceTracker, RequestState, TPRanks
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.cost_model import RoundCosts
from sglang_ext.managers.spec_decode.decode_loop import DecodeLoop
from sglang_ext.managers.spec_decode.draft import StepRunner, Verifier
from sglang_ext.managers.spec_decode.planner import RoundPlan, RoundPlanner
from sglang_ext.managers.spec_decode.request_states import UnprocessedTokens
from sglang_ext.managers.spec_decode.round_report import RoundReport
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider, RoundSetup
from sglang_ext.managers.spec_decode.round_timer import DraftLength, RoundTimer, SelectionInterval
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV

ROWS = 8


class ToyCompressedKV:
    """In the place of the compressed KV cache: compressed KV has a quarter of the tokens.

    Args:
        full: Rows for which no slots are free.
        lacking: Rows whose queries are not recorded.
    """

    recent, share, each_round, async_selector, row_sender = 0, 0.25, False, None, None
    queries = SimpleNamespace(can_record=lambda row: True)

    def __init__(self, full: Collection[int] = (), lacking: Collection[int] = ()) -> None:
        self.full, self.lacking = full, lacking
        self.tails: list[tuple[int, int]] = []
        self.copies: dict[int, CompressedKV] = {}
        self.headrooms: list[int] = []
        self.token_table = torch.arange(2 * ROWS * 600, dtype=torch.int32).view(2 * ROWS, 600)

    def method(self, row: int) -> SimpleNamespace:
        """The same for all rows."""
        compressor = SimpleNamespace(window=32, each_round=self.each_round, follows_queries=self.each_round, every=0)
        return SimpleNamespace(recent=self.recent, min_context=MIN_CONTEXT + self.recent, unit=1, compressor=compressor)

    def is_refused(self, row: int) -> bool:
        """No request is refused."""
        return False

    def is_usable_without_refresh(self, row: int) -> bool:
        """All are refreshed."""
        return False

    def has_queries(self, row: int) -> bool:
        """Whether queries of the row are recorded."""
        return row not in self.lacking

    def get(self, row: int) -> CompressedKV | None:
        """The compressed KV of a row."""
        return self.copies.get(row)

    def compress(self, row: int, tokens: int, headroom: int, prefix: object = None) -> bool:
        """Create compressed KV, unless there are no slots for it."""
        self.headrooms.append(headroom)
        if row in self.full:
            return False
        self.copies[row] = CompressedKV(torch.arange(tokens // 4), tokens)
        return True

    def release_compressed_kv(self, row: int) -> None:
        """Drop it."""
        self.copies.pop(row, None)

    def write_tail(self, row: int, end: int) -> None:
        """Record the call."""
        self.tails.append((row, end))

    def mark_tail_written(self, row: int, end: int) -> None:
        """Record the call."""
        self.tails.append((row, end))

    def max_covered(self, row: int, tokens: int) -> int:
        """All tokens can be covered."""
        return tokens

    def draft_row(self, row: int) -> int:
        """The row that drafts read."""
        return row + ROWS


def request(missing: int = 40, prompt: int = 0, **more: object) -> SimpleNamespace:
    """SGLang's request that lacks ``missing`` output tokens once it has one more than ``prompt``. KV of the last token is not known."""
    params = SimpleNamespace(
        max_new_tokens=missing, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0
    )
    state = {
        "grammar": None, "return_logprob": False, "custom_logit_processor": None, "return_hidden_states": False, "last_node": None,
        "is_retracted": False, "spec_cap_lens_histogram": [], **more,
    }  # fmt: skip
    return SimpleNamespace(sampling_params=params, output_ids=[], origin_input_ids=range(prompt + 1), finished=lambda: False, **state)


def batch(lengths: Sequence[int], reqs: Sequence[SimpleNamespace] | None = None) -> Any:
    """SGLang's batch of requests with contexts of these lengths, in rows from 1 on."""
    reqs = reqs or [request() for _ in lengths]
    for req, length in zip(reqs, lengths):
        req.origin_input_ids = range(length + 1)
    return SimpleNamespace(
        reqs=reqs, seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths), return_logprob=False,
        req_pool_indices=torch.arange(1, len(lengths) + 1), spec_info=SimpleNamespace(bonus_tokens=torch.full((len(lengths),), 9)),
    )  # fmt: skip


def states(count: int, **fallback: int) -> list[RequestState]:
    """States of the requests in rows 1 to ``count``. ``r2=SLOWER`` is the fallback of the one in row 2."""
    return [RequestState(rid=str(i), row=i, seed=0, fallback=fallback.get(f"r{i}", 0)) for i in range(1, count + 1)]


def plan(
    asked: Any, found: list[RequestState], wanted: int, compressed_kv: ToyCompressedKV | None = None, lossy: bool = False
) -> RoundPlan:
    """The plan of a round of these requests with ``wanted`` draft steps."""
    setup = RoundSetup(RoundPlanner(8, 8, lossy), compressed_kv or ToyCompressedKV(), FullKVProvider())
    return setup.plan(asked, found, asked.seq_lens.tolist(), wanted)


def loop(compressed_kv: ToyCompressedKV | None = None) -> DecodeLoop:
    """A decode loop with four drafts a round, without a model."""
    compressed_kv = compressed_kv or ToyCompressedKV()
    compressed_kv.rows = ROWS
    requests = SimpleNamespace(
        count_verify=RequestState.count_verify, overall_acceptance=AcceptanceTracker(), unprocessed_tokens=UnprocessedTokens()
    )
    worker: Any = SimpleNamespace(
        compressed_kv=compressed_kv, lossy=False, features=(), ranks=TPRanks(), requests=requests,
        model_runner=SimpleNamespace(war_fastpath_read_done_event="earlier", decode_cuda_graph_runner=None),
        queries=SimpleNamespace(drop_rejected=lambda row, length: None),
    )  # fmt: skip
    lengths, steps = DraftLength(4, is_fixed=True), StepRunner(worker)
    report = RoundReport(lengths, RoundCosts(), KVMetrics("model"), worker.requests, SelectionInterval((1,)))
    setup = RoundSetup(RoundPlanner(6, 6), compressed_kv, FullKVProvider())
    timer = RoundTimer(lengths, torch.device("cpu"))
    return DecodeLoop(worker, timer, steps, Verifier(worker, steps, None, None), setup, report)
