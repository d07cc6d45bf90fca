"""Types, constants and helpers that cross modules. The description of a field names the code that sets it.

Nothing here loads PyTorch: command lines import this module to show their help.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator

# Default of --kv-budget: the share of tokens that compressed KV keeps.
DEFAULT_BUDGET = 0.25
# Names under which the flags select this plugin in SGLang's registries.
SPECULATIVE_ALGORITHM = "KV_VERIFIED"
RADIX_CACHE_BACKEND = "kv_views"
# Prefix of link settings about prompts that are transferred quantized.
CODES_PREFIX = "codes."
# Shortest context, in tokens, that is compressed by default. Below it, compressed KV saves too little to pay for drafting.
MIN_CONTEXT = 128
# Steps of a round without drafts, such as any round in lossy mode. More steps spare the scheduler work, but let requests finish later.
PLAIN_STEPS = 4
# Values of --kv-score-bits: bits of the keys by which tokens are selected. The first is for unchanged keys.
SCORE_BITS = (16, 8, 4)
# Why a request is served with full KV, in words for the log.
FALLBACK_WORDS = {
    "none": "requests draft",
    "short-context": "contexts are too short to compress",
    "no-free-slots": "the KV pool has no room for compressed KV",
    "min-p": "requests use min_p",
    "custom-logit-processor": "requests use a custom logit processor",
    "grammar": "the grammar backend cannot take drafts back",
    "hidden-states": "requests ask for hidden states",
    "slower": "drafting would be slower",
    "no-queries": "too few queries are kept to compress",
    "wrong-scores": "the compressor's scores cannot be used",
    "no-selection": "no cache rank can select tokens",
}
# Processes of one server exchange indices into this tuple (managers/spec_decode/request_states.py).
FALLBACK_REASONS = tuple(FALLBACK_WORDS)
SHORT_CONTEXT = FALLBACK_REASONS.index("short-context")
NO_FREE_SLOTS = FALLBACK_REASONS.index("no-free-slots")
# Drafting would not be faster than full KV (managers/spec_decode/round_timer.py).
SLOWER = FALLBACK_REASONS.index("slower")
# The method scores keys by the newest queries, and too few of them are recorded: all query rings were taken
# (mem_cache/compressed/queries.py), or the forwards so far recorded none (steps in graphs).
NO_QUERIES = FALLBACK_REASONS.index("no-queries")
# The scores of the request's method cannot be used (mem_cache/compressors/compressor.py).
WRONG_SCORES = FALLBACK_REASONS.index("wrong-scores")
# Cache ranks select the request's tokens, and no rank has selected any yet, or none can (managers/cache_rank/).
NO_SELECTION = FALLBACK_REASONS.index("no-selection")
# Fallbacks that may end: when the context is long enough, slots are free, drafting pays, a query ring is free, or tokens are selected.
# WRONG_SCORES does not end, but its requests can be verified, too.
RETRYABLE = (0, SHORT_CONTEXT, NO_FREE_SLOTS, SLOWER, NO_QUERIES, WRONG_SCORES, NO_SELECTION)
# Prior of the first request: accepted and rejected drafts, at a probability of 0.9.
FIRST_PRIOR = (1.8, 0.2)
# Weight of the prior of later requests, at acceptance probability 0 and 1. After useless drafts, a few accepted ones change the estimate;
# after good drafts, one rejection does not.
LATER_PRIOR_WEIGHTS = (0.5, 4.0)
# Weight of earlier observations at each verification: of one request, and of all requests.
DECAY, SLOW_DECAY = 0.9, 0.99


class OptionError(ValueError):
    """A flag with a value that cannot be served. The message has the value, the allowed values, and the remedy."""


class HookError(RuntimeError):
    """The installed SGLang differs from the version that the hooks were written for."""


class IntegrityError(RuntimeError):
    """A slot has two owners, so an output could be wrong."""


@dataclass
class AcceptanceTracker:
    """Estimates the probability that a draft token is accepted if the ones before it were, from decayed counts with a prior.

    ``decay`` is the weight of earlier observations at each verification.
    """

    accepted: float = FIRST_PRIOR[0]
    rejected: float = FIRST_PRIOR[1]
    decay: float = DECAY

    @classmethod
    def from_probability(cls, probability: float) -> "AcceptanceTracker":
        """The tracker of a new request, which starts with the acceptance of earlier requests."""
        weight = LATER_PRIOR_WEIGHTS[0] + (LATER_PRIOR_WEIGHTS[1] - LATER_PRIOR_WEIGHTS[0]) * probability**2
        return cls(weight * probability, weight * (1 - probability))

    def observe(self, offered: int, accepted: int) -> None:
        """Count a verification. Drafts after the first rejected one carry no information."""
        self.accepted = self.decay * self.accepted + accepted
        self.rejected = self.decay * self.rejected + (accepted < offered)

    @property
    def probability(self) -> float:
        """Probability that the next draft token is accepted, in (0, 1)."""
        return self.accepted / (self.accepted + self.rejected)


EARLY_ROWS = 4
"""Requests that may draft at once while they wait for a prefix store."""


@dataclass(frozen=True)
class EarlyDrafts:
    """Drafts that a request made on anchors from a prefix store, before it was admitted.

    Attributes:
        seed: Seed of their noise.
        tokens: int64 [drafts], on the device. The first one is a draft of the token that the prefill samples.
        kv: Keys of all layers, then values, for all drafts but the last: [drafts - 1, kv_heads, head_dim] each.
    """

    seed: int
    tokens: "torch.Tensor"
    kv: "Sequence[torch.Tensor]"


@dataclass
class RequestState:
    """Draft state of one running request; the worker creates and updates it.

    Attributes:
        rid: SGLang's request id, for logs and traces.
        row: The request's row in the token table.
        seed: Seed of the noise that draft and verification share, in [0, 2**63).
        cached_prompt_len: Tokens of the prompt that the prefix tree had when the request arrived.
        prompt: Token ids of the prompt.
        namespace: Adapter or salt on which its KV also depends, as ``extra_key`` in SGLang's prefix tree. None if embeddings replace some
            tokens, so that token ids and namespace do not determine the KV.
        method: Index, among the server's methods, of the requested one (method_options.py).
        compressor: Catalogue number of the method that created or refreshed its compressed KV last; 0 before that.
        fallback: Index into :data:`FALLBACK_REASONS`; 0 while the request drafts.
        num_pending: Draft tokens since the last verification; the loop sets it. The tokens are stored on the device.
        early_drafts: Drafts that were made before it was admitted, until its first round.
        is_early: Its pending drafts are early drafts.
        verifies, offered, accepted: Totals over the request's life.
        accept_histogram, offer_histogram: Element ``k`` counts the verifications that accepted, or were offered, ``k`` drafts.
        acceptance: Estimates how often its drafts are accepted.
    """

    rid: str
    row: int
    seed: int
    cached_prompt_len: int = 0
    prompt: Sequence[int] = ()
    namespace: str | None = ""
    method: int = 0
    compressor: int = 0
    fallback: int = 0
    num_pending: int = 0
    early_drafts: EarlyDrafts | None = None
    is_early: bool = False
    verifies: int = 0
    offered: int = 0
    accepted: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    offer_histogram: list[int] = field(default_factory=list)
    acceptance: AcceptanceTracker = field(default_factory=AcceptanceTracker)

    def count_verify(self, offered: int, accepted: int) -> None:
        """Add one verification to the totals."""
        self.verifies += 1
        self.offered += offered
        self.accepted += accepted
        _count(self.accept_histogram, accepted)
        _count(self.offer_histogram, offered)
        self.acceptance.observe(offered, accepted)


def _count(histogram: list[int], value: int) -> None:
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1


class RankError(RuntimeError):
    """Ranks made different decisions, so their collectives would mix up requests."""


@dataclass(frozen=True)
class TPRanks:
    """The position of this process in SGLang's ``group`` of tensor-parallel ranks, None for a single rank. Each rank holds some heads.

    All ranks must make the same decisions. Compressed KV, rounds and accepted tokens depend on token ids and lengths, which all ranks have.
    Decisions that depend on measured times could differ, so rank 0 makes them for all ranks.
    """

    group: "GroupCoordinator | None" = None

    @classmethod
    def from_group(cls, group: "GroupCoordinator") -> "TPRanks":
        """The ranks of SGLang's tensor-parallel ``group``."""
        return cls(group if group.world_size > 1 else None)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reports counts for all ranks."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Index of this process among the ranks."""
        return 0 if self.group is None else self.group.rank_in_group

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Waits for them on the host."""
        return value if self.group is None else self.group.broadcast_object(value, src=0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Waits for them on the host."""
        return [value] if self.group is None else self.group.all_gather_object(value)

    def check_equal(self, what: str, value: Any) -> None:
        """Raise :class:`RankError`, with the name of the value and the values by rank, unless all ranks have this value."""
        values = self.gather(value)
        if any(other != value for other in values):
            raise RankError(f"{what} differs between tensor-parallel ranks: {values}")


@contextmanager
def run_periodically(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``look`` in a background thread every ``seconds``, for the first time after one interval. On exit, wait for a running call."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
