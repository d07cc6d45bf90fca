"""Sets up one decode round: takes views of the requests, executes what the planner asks for, and returns the complete plan.

1. The full-KV provider processes completed loads and frees full KV.
2. Compressed KV is created or refreshed for the requests for which ``RoundPlanner`` allows it, in the order of the batch.
3. ``RoundPlanner.draft`` plans the steps. A request whose KV could not be compressed reads its full KV.
4. The provider begins loads, and names the requests whose full KV can be verified. Loaded full KV refreshes the compressed KV.
5. ``RoundPlanner.verify`` completes the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ext.core import FALLBACK_REASONS, RETRYABLE, RequestState
from sglang_ext.managers.spec_decode.planner import DraftPlan, RequestView, RoundPlan, RoundPlanner
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv, tokens_until_refresh
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import EarlyRequests, FreedFullKV
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode

if TYPE_CHECKING:
    from sglang_ext.managers.kv_offload.offload_policy import OffloadPolicy
    from sglang_ext.mem_cache.prefix_cache.residency import Residency

MIN_P = FALLBACK_REASONS.index("min-p")


class FullKVProvider:
    """Says where the full KV of a request is, and when it can be verified: at once, unless a feature has a provider (feature.py).

    Attributes:
        drafts_per_load: Pending drafts of a request before its full KV is loaded; 0 if nothing is loaded.
        residency: Tracks whose full KV is on the device; None if full KV stays there.
        policy: Chooses how much full KV may leave the device, and how many drafts are pending per load; None if that is fixed.
        early: Requests that may draft before all of their full KV has arrived; None if there are none.
        freed_full_kv: Full KV that was freed, because compressed KV or a cache rank holds it; None if full KV stays.
    """

    drafts_per_load: int = 0
    residency: "Residency | None" = None
    policy: "OffloadPolicy | None" = None
    early: EarlyRequests | None = None
    freed_full_kv: FreedFullKV | None = None

    def __init__(self, freed_full_kv: FreedFullKV | None = None) -> None:
        self.freed_full_kv = freed_full_kv

    def deferring_loads(self) -> AbstractContextManager[None]:
        """A context for planning and launching a round, in which loads may be deferred to its end."""
        return nullcontext()

    def on_round_start(self, reqs: list[Req], drafting: dict[int, tuple[TieredNode, int]], iteration_seconds: float | None) -> None:
        """Process completed loads, and free full KV that is no longer needed. ``iteration_seconds``: measured seconds of a round.

        ``drafting``: by row of each request that drafts on compressed KV, the last node of its path, and the number of covered tokens.
        """
        if self.freed_full_kv is not None:
            self.freed_full_kv.free_full_kv(reqs, drafting)

    def is_early(self, row: int) -> bool:
        """Whether a request drafts on the anchor of its full KV (managers/kv_transfer/feature.py)."""
        return False

    def has_arrived(self, row: int) -> bool:
        """Whether the residual of an early request has arrived."""
        return True

    def end_early_decoding(self, row: int) -> None:
        """End early decoding: the request has no unverified draft at the end of this round."""

    def is_offloaded(self, row: int) -> bool:
        """Whether a request's row must not be read, because full KV is missing or stored elsewhere."""
        return False

    def full_kv_start(self, row: int, protected: int) -> int:
        """First position from which a request's row points to full KV. The prefix tree holds ``protected`` of its tokens."""
        return 0 if self.freed_full_kv is None else self.freed_full_kv.full_kv_start(row, protected)

    def is_lost(self, row: int) -> bool:
        """Whether a part of the request's full KV is in no tier."""
        return False

    def pin_while_reading(self, row: int) -> AbstractContextManager[None]:
        """A context that keeps the part of a request's full KV that is on the device."""
        return nullcontext()

    def pin_for_round(self, row: int) -> None:
        """Keep the full KV of the request in ``row`` on the device, because it reads it in this round."""

    def schedule_verifications(self, rounds: dict[int, int], ripe: set[int]) -> set[int]:
        """Begin loads, and select the rows to verify in this round. Arguments as in :class:`DraftPlan`."""
        return ripe

    def restore(self, row: int) -> None:
        """Point a request's row to its full KV."""

    def on_round_launched(self) -> None:
        """Record that the round was launched."""

    def forget(self, row: int) -> None:
        """Drop all state of the request in ``row``."""


@dataclass(frozen=True)
class RoundSetup:
    """Sets up the rounds of one worker."""

    planner: RoundPlanner
    compressed_kv: CompressedKVCache
    provider: FullKVProvider

    def plan(
        self,
        batch: ScheduleBatch,
        states: list[RequestState],
        lengths: list[int],
        wanted: int,
        iteration_seconds: float | None = None,
        selection_interval: int = 1,
    ) -> RoundPlan:
        """Set up a round of ``wanted`` draft steps or fewer, or of plain steps if it is 0. ``lengths``: as in :class:`RoundPlan`."""
        pairs = ((req, self.compressed_kv.get(state.row), state) for req, state in zip(batch.reqs, states) if state.fallback in RETRYABLE)
        drafting = {state.row: (req.last_node, compressed.covered) for req, compressed, state in pairs if compressed is not None}
        self.provider.on_round_start(batch.reqs, drafting, iteration_seconds)
        headroom = self.planner.headroom(wanted, len(states))
        may_compress = self.planner.may_compress(states, wanted)
        compressed = self._compress(zip(batch.reqs, states, lengths), may_compress, headroom)
        # Compression changes what requests have, and when the next refresh is due.
        views = [self._view(*each) for each in zip(batch.reqs, states, lengths)]
        drafts = self.planner.draft(views, wanted, compressed)
        ready, failed = self._load(batch.reqs, drafts, headroom)
        return self.planner.verify(drafts, ready, failed, self._draft_rows(drafts, failed), selection_interval)

    def _view(self, req: Req, state: RequestState, length: int) -> RequestView:
        row, provider = state.row, self.provider
        is_early = state.is_early or provider.is_early(row)
        return RequestView(
            state=state,
            length=length,
            remaining=max(0, output_end(req) - length),
            is_checked_token_by_token=_is_checked_token_by_token(req, state),
            is_short=self.compressed_kv.get(row) is None and length < self.compressed_kv.method(row).min_context,
            has_compressed=self.compressed_kv.get(row) is not None,
            can_get_queries=self.compressed_kv.queries.can_record(row),
            is_early=is_early,
            has_arrived=state.is_early or not is_early or provider.has_arrived(row),
            is_offloaded=provider.is_offloaded(row),
            is_lost=provider.is_lost(row),
            tokens_until_refresh=tokens_until_refresh(self.compressed_kv, state, length) if self.planner.lossy else 0,
        )

    def _compress(self, requests: Iterable[tuple[Req, RequestState, int]], may_compress: bool, headroom: int) -> dict[int, int]:
        """Create or refresh compressed KV. Pins the full KV of requests that read it. Returns ``compressed`` of the planner."""
        found = {}
        for i, (req, state, length) in enumerate(requests):
            # The compression of earlier requests may have moved this one's full KV to the host.
            view = self._view(req, state, length)
            if view.is_early and not view.stays_early:
                self.provider.end_early_decoding(view.row)
            if state.is_early:
                self.provider.pin_for_round(view.row)
            if not view.is_open:
                continue
            # The last token of an output needs no draft.
            if may_compress and (view.remaining > 1 or self.planner.lossy):
                found[i] = self._ensure_compressed(req, view, headroom)
            if found.get(i, 1):
                self.provider.pin_for_round(view.row)
        return found

    def _ensure_compressed(self, req: Req, view: RequestView, headroom: int) -> int:
        with self.provider.pin_while_reading(view.row):
            return ensure_compressed_kv(self.compressed_kv, req, view.state, view.length, headroom)

    def _load(self, reqs: Sequence[Req], drafts: DraftPlan, headroom: int) -> tuple[set[int], dict[int, int]]:
        """Begin loads for later rounds, and refresh the compressed KV of requests whose full KV is here: ``ready`` and ``failed`` of the planner."""
        arrived = drafts.arrived
        for row in arrived:
            self.provider.end_early_decoding(row)
        scheduled = self.provider.schedule_verifications(drafts.rounds_until_load(self.provider.drafts_per_load), drafts.ripe)
        ready, failed = arrived | scheduled, {}
        for i, view in enumerate(drafts.views):
            if view.row in ready and self.provider.is_offloaded(view.row):
                self.provider.restore(view.row)
                if reason := self._ensure_compressed(reqs[i], view, headroom):
                    failed[i] = reason
        return ready, failed

    def _draft_rows(self, drafts: DraftPlan, failed: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Write the slots of the newest tokens to the draft rows of requests that read compressed KV. Returns ``rows`` of the planner."""
        found, compressed_kv = {}, self.compressed_kv
        for i, (view, plan) in enumerate(zip(drafts.views, drafts.requests)):
            if plan.reads_compressed and i not in failed:
                compressed_kv.write_tail(view.row, view.length + drafts.num_pending[i])
                compressed = compressed_kv.get(view.row)
                found[view.row] = compressed_kv.draft_row(view.row), compressed.num_slots - compressed.covered
        return found


def _is_checked_token_by_token(req: Req, state: RequestState) -> bool:
    """Whether SGLang keeps state of a request from token to token: a grammar, a logit processor, or hidden states."""
    # A fallback names the first of several reasons. min-p does not exclude the others.
    asks = req.grammar is not None or req.custom_logit_processor is not None or bool(req.return_hidden_states)
    return asks or state.fallback not in (*RETRYABLE, MIN_P)
