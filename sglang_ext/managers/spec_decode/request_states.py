"""The running requests: the draft state of each, from its prefill until it finishes, is aborted or retracted, and its counters.

SGLang carries a few counters of speculative decoding from the scheduler to the frontend. :func:`write_counters` fills them with ours,
and :func:`meta_info_fields` reads them back under their own names.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.config.method_options import OfferedMethod, method_index
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import FALLBACK_REASONS, SLOW_DECAY, AcceptanceTracker, EarlyDrafts, RequestState
from sglang_ext.managers.spec_decode.grammar import can_walk
from sglang_ext.mem_cache.compressors import catalogue

# SGLang's seed, under --enable-deterministic-inference, for requests without one.
STOCK_DEFAULT_SEED = 42
# Numbers before the histograms in the list that :func:`write_counters` writes.
NUM_COUNTERS = 7


def fallback_reason(req: Req) -> int:
    """Why a request can never draft, as an index into ``FALLBACK_REASONS``; 0 if it can.

    Custom logit processors have state of their own, SGLang's seeded sampler has no ``min_p``, and hidden states of drafts are of no use.
    """
    if not can_walk(req.grammar):
        return FALLBACK_REASONS.index("grammar")
    if req.sampling_params.min_p > 0:
        return FALLBACK_REASONS.index("min-p")
    if req.custom_logit_processor is not None:
        return FALLBACK_REASONS.index("custom-logit-processor")
    if req.return_hidden_states:
        return FALLBACK_REASONS.index("hidden-states")
    return 0


def namespace(req: Req) -> str | None:
    """Adapter or salt on which a request's KV also depends (``extra_key`` in SGLang's tree); None if embeddings replace some tokens."""
    return None if req.input_embeds is not None or req.positional_embed_overrides is not None else req.extra_key or ""


def is_token_only(req: Req) -> bool:
    """Whether tokens alone determine a request's KV, so that another server can compute it from them."""
    return req.lora_id is None and req.multimodal_inputs is None and namespace(req) is not None


def output_end(req: Req) -> int:
    """Tokens with KV when the output is as long as requested. The KV of the last output token is never computed."""
    return len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1


@dataclass(frozen=True)
class UnprocessedTokens:
    """Tokens that SGLang has not appended to the outputs when it launches the next forward; none if no request has a grammar."""

    reqs: Sequence[Req] = ()
    result: GenerationBatchResult | None = None

    @classmethod
    def from_result(cls, batch: ScheduleBatch, result: GenerationBatchResult) -> "UnprocessedTokens":
        """The unprocessed tokens of a forward of ``batch``."""
        if all(req.grammar is None for req in batch.reqs):
            return cls()
        places = getattr(result, "positions", None)
        return cls(list(batch.reqs) if places is None else [batch.reqs[i] for i in places], result)

    def tokens_of(self, req: Req, length: int) -> list[int]:
        """Tokens of a request of ``length`` tokens with KV that are not in its output yet. Waits for the forward that produces them."""
        count = length + 1 - len(req.origin_input_ids) - len(req.output_ids)
        if count <= 0:
            return []
        place = next(i for i, each in enumerate(self.reqs) if each is req)
        self.result.copy_done.synchronize()
        # A prefill has one token of each request.
        stride = 1 if self.result.accept_lens is None else self.result.speculative_num_draft_tokens
        return self.result.next_token_ids[place * stride : place * stride + count].tolist()


class RequestStates:
    """Draft states of the running requests, by their rows in the token table, and the acceptance of all requests together."""

    def __init__(self, args: KVServerArgs, offered_methods: Sequence[OfferedMethod]):
        self.args = args
        self.offered_methods = offered_methods
        self.overall_acceptance = AcceptanceTracker(decay=SLOW_DECAY)
        self.unprocessed_tokens = UnprocessedTokens()
        # Acceptance of the requests of each method. A new request starts with it.
        self._by_method = [AcceptanceTracker(decay=SLOW_DECAY) for _ in offered_methods] or [self.overall_acceptance]
        self._states: dict[int, RequestState] = {}
        self._admitted = 0
        # Drafts that requests made while they waited, by id, until they are admitted (early_drafts.py).
        self.early_drafts: dict[str, EarlyDrafts] = {}

    def states_of(self, batch: ScheduleBatch) -> list[RequestState]:
        """States of a batch's requests. Those that another server prefilled are admitted in their first round."""
        return [self._states.get(req.req_pool_idx) or self.admit(req, 0) for req in batch.reqs]

    def admit(self, req: Req, matched: int) -> RequestState:
        """Admit a request whose prompt, or a chunk of it, will be computed after ``matched`` cached tokens. Returns its state."""
        row = req.req_pool_idx
        if row in self._states:
            return self._states[row]  # an earlier chunk of the same prompt
        early = self.early_drafts.pop(req.rid, None)
        seed = self.new_seed(req) if early is None else early.seed
        method = self.method_of(req)
        state = self._states[row] = RequestState(
            rid=req.rid,
            row=row,
            seed=seed,
            cached_prompt_len=matched,
            prompt=req.origin_input_ids,
            namespace=namespace(req),
            method=method,
            fallback=fallback_reason(req),
            acceptance=AcceptanceTracker.from_probability(self._by_method[method].probability),
            early_drafts=early,
        )
        restore_counters(req, state)
        return state

    def new_seed(self, req: Req) -> int:
        """The noise seed of a request that is admitted, or drafts before that."""
        self._admitted += 1
        return noise_seed(req, self.args, self._admitted)

    def count_verify(self, state: RequestState, offered: int, accepted: int) -> None:
        """Count a verification of the request with this state."""
        state.count_verify(offered, accepted)
        self.overall_acceptance.observe(offered, accepted)
        self._by_method[state.method].observe(offered, accepted)

    def record_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Record the result of the newest forward."""
        self.unprocessed_tokens = UnprocessedTokens.from_result(batch, result)

    def method_of(self, req: Req) -> int:
        """Index of the method that a request asks for. The frontend refuses unknown names."""
        return method_index(self.offered_methods, req.sampling_params.custom_params) or 0

    def get(self, row: int) -> RequestState | None:
        """State of the request in ``row``; None if the row has no running request."""
        return self._states.get(row)

    def forget(self, row: int) -> None:
        """Drop the state of the request in ``row``, if there is one."""
        self._states.pop(row, None)

    def clear(self) -> None:
        """Drop the states of all requests."""
        self._states.clear()
        self.early_drafts.clear()


def noise_seed(req: Req, args: KVServerArgs, admitted: int) -> int:
    """The request's sampling seed if SGLang honours it, in deterministic mode; otherwise a generated one, equal on all ranks."""
    if args.enable_deterministic_inference:
        asked = req.sampling_params.sampling_seed
        return STOCK_DEFAULT_SEED if asked is None else asked
    # Samples of one request (n) have the same sampling_seed, but must differ.
    name = f"{args.random_seed}/{admitted}/{req.rid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def write_counters(req: Req, state: RequestState) -> None:
    """Write a request's totals to one of SGLang's per-request lists of integers, as :func:`meta_info_fields` reads them."""
    counters = state.verifies, state.offered, state.accepted, state.fallback, state.compressor, state.method, len(state.accept_histogram)
    req.spec_cap_lens_histogram = [*counters, *state.accept_histogram, *state.offer_histogram]


def restore_counters(req: Req, state: RequestState) -> None:
    """Restore the totals of a retracted request from the list that :func:`write_counters` wrote."""
    record = req.spec_cap_lens_histogram
    if record:
        state.verifies, state.offered, state.accepted = record[:3]
        end = NUM_COUNTERS + record[NUM_COUNTERS - 1]
        state.accept_histogram, state.offer_histogram = record[NUM_COUNTERS:end], record[end:]


def meta_info_fields(record: list[int], suffixes: Sequence[str] = ("",)) -> dict[str, Any]:
    """The ``meta_info`` fields, from the list of :func:`write_counters`; it is empty for one token. ``suffixes``: of the server's methods."""
    verifies, offered, accepted, fallback, compressor, method, split = record[:NUM_COUNTERS] or (0,) * NUM_COUNTERS
    return {
        "kv_verifies": verifies,
        "kv_drafts": offered,
        "kv_accepted": accepted,
        "kv_accept_length": (accepted + verifies) / verifies if verifies else 0.0,
        "kv_accept_histogram": list(record[NUM_COUNTERS : NUM_COUNTERS + split]),
        "kv_offer_histogram": list(record[NUM_COUNTERS + split :]),
        "kv_fallback": FALLBACK_REASONS[fallback] if fallback else None,
        "kv_compressor": catalogue.method_name(compressor) + suffixes[method] if compressor else None,
    }
