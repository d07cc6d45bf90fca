"""Data types and constants that several modules share. Each field says who sets it.

This module does not import PyTorch: command lines import it to show their help.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang_ext.mem_cache.prefix_cache.segments import Segment

# Default of --kv-budget: the share of tokens that compressed KV keeps.
DEFAULT_BUDGET = 0.25
# Names of ours in SGLang's registries.
SPECULATIVE_ALGORITHM = "KV_VERIFIED"
RADIX_CACHE_BACKEND = "kv_views"
# Minimum context length for compression, in tokens, unless a flag raises it. Below, compression saves too little to draft.
MIN_CONTEXT = 128
# Steps of a round without drafts, which all rounds in mode lossy are. More steps save SGLang's scheduler work, but end requests later.
PLAIN_STEPS = 4
# Reasons why a request is served with full KV. Processes of one server exchange indices into it (managers/spec_decode/request_states.py).
FALLBACK_REASONS: tuple[str, ...] = (
    "none",
    "short-context",
    "no-free-slots",
    "min-p",
    "custom-logit-processor",
    "grammar",
    "hidden-states",
    "slower",
    "no-queries",
    "wrong-scores",
    "no-selection",
)
SHORT_CONTEXT = FALLBACK_REASONS.index("short-context")
NO_FREE_SLOTS = FALLBACK_REASONS.index("no-free-slots")
# Drafting would be slower than decoding on full KV (managers/spec_decode/draft_length.py).
SLOWER = FALLBACK_REASONS.index("slower")
# The request's method scores tokens by the newest queries, and too few are stored. Either all query rings were in use
# (mem_cache/compressed/queries.py), or the steps so far stored none (steps in CUDA graphs).
NO_QUERIES = FALLBACK_REASONS.index("no-queries")
# The scores of the request's method cannot be used (mem_cache/compressors/contracts/compressor.py).
WRONG_SCORES = FALLBACK_REASONS.index("wrong-scores")
# Cache ranks select the request's tokens, and none has done so yet, or none can (managers/cache_rank/).
NO_SELECTION = FALLBACK_REASONS.index("no-selection")
# Fallbacks that may end: when the context is long enough, slots or a query ring are free, drafting pays, or tokens are selected.
# WRONG_SCORES does not end, but its requests can be verified too.
RETRYABLE = (0, SHORT_CONTEXT, NO_FREE_SLOTS, SLOWER, NO_QUERIES, WRONG_SCORES, NO_SELECTION)
# Prior of the first request: accepted and rejected drafts, at a probability of 0.9.
FIRST_PRIOR = (1.8, 0.2)
# Weight of the prior of later requests, at probability 0 and 1. If drafts were rejected before, a few accepted ones change the estimate. If
# they were accepted, one rejection does not.
LATER_PRIOR_WEIGHTS = (0.5, 4.0)
# Weight of earlier observations at each verification, for one request and for all.
DECAY, SLOW_DECAY = 0.9, 0.99


class OptionError(ValueError):
    """A flag that cannot be served. The message says the value, the allowed values and the remedy."""


class HookError(RuntimeError):
    """The installed SGLang is not the one that the hooks were written for."""


class IntegrityError(RuntimeError):
    """A slot has two owners. Output tokens could be wrong."""


@dataclass
class CompressedKV:
    """A request's compressed KV: attention reads it instead of the first ``covered`` tokens.

    Attributes:
        own: int64 [own tokens], slots in SGLang's KV pool that only this request reads, whole pages.
        covered: Tokens of the full KV that it covers, from the start of the context, in whole pages.
        segments: The part shared with other requests, after the sinks. ``own`` covers the rest.
        tail_end: First position after ``covered`` that the draft row does not point to yet. Set by the writers of the row.
        method: Name of the compressor that selected its tokens. Set when it is filled.
        sinks: Slots at the beginning of ``own`` that hold the context's first tokens, before the tokens in blocks.
        own_tokens: Tokens that ``own`` keeps of the rest. Set by the compressed KV cache.
        own_packed: Slots of ``own``, after the sinks, that hold packed blocks (quantized_blocks.py). 0 if it holds tokens.
        back_slots: Back buffer for the next selection: int64, as many slots as ``own``. Empty if the next selection overwrites the
            current one, asynchronously or in steps. None if tokens are selected between steps.
        refresh_after: Length, without the newest tokens that stay exact, at which it is refreshed. 0 if that follows from its size.
    """

    own: "torch.Tensor"
    covered: int
    segments: "list[Segment]" = field(default_factory=list)
    tail_end: int = 0
    method: str = ""
    sinks: int = 0
    own_tokens: int = 0
    own_packed: int = 0
    back_slots: "torch.Tensor | None" = None
    refresh_after: int = 0

    def __post_init__(self) -> None:
        self.tail_end = max(self.tail_end, self.covered)

    @property
    def slots(self) -> "torch.Tensor":
        """Slots of compressed KV that the draft row points to, blocks first: int64 [kept]. Padding slots of blocks' pages are left out."""
        import torch

        sinks, own = self.own[: self.sinks], self.own[self.sinks :]
        shared = [segment.slots[: segment.packed or None] for segment in self.segments]
        return torch.cat([*shared, own[: self.own_packed or None], sinks])

    @property
    def owned_slots(self) -> "torch.Tensor":
        """All slots that the request owns, back slots last: int64."""
        import torch

        return self.own if self.back_slots is None else torch.cat([self.own, self.back_slots])

    def swap_back_slots(self) -> None:
        """Use the back slots, to which the next selection was written, and keep the others as back slots."""
        self.own, self.back_slots = self.back_slots, self.own

    @property
    def shared_len(self) -> int:
        """Tokens of the full KV that the sinks and the segments cover."""
        return self.segments[-1].end if self.segments else self.sinks

    @property
    def has_all_tokens(self) -> bool:
        """Whether it keeps all covered tokens, in blocks except the sinks, so that full KV can be restored from it."""
        kept = self.sinks + sum(segment.tokens for segment in self.segments) + self.own_tokens
        return self.packed > 0 and kept == self.covered

    def detach_blocks(self, tokens: int, packed: int) -> "torch.Tensor":
        """Remove and return its own slots with the blocks of its first ``tokens``, ``packed`` slots.

        Afterwards it reads them as a segment's. The slots are int64, whole pages: those of all its tokens, or of as many blocks as fill
        pages.
        """
        import torch

        end = len(self.own) if tokens == self.own_tokens else self.sinks + packed
        slots, self.own = self.own[self.sinks : end].clone(), torch.cat([self.own[: self.sinks], self.own[end:]])
        self.own_tokens, self.own_packed = self.own_tokens - tokens, self.own_packed - packed
        return slots

    @property
    def kept(self) -> int:
        """Number of slots of compressed KV that the draft row points to."""
        own = self.own_packed + self.sinks if self.own_packed else len(self.own)
        return sum(segment.packed or len(segment.slots) for segment in self.segments) + own

    @property
    def packed(self) -> int:
        """Number of these that hold packed blocks: all but the sinks, or none."""
        return sum(segment.packed for segment in self.segments) + self.own_packed


@dataclass
class AcceptanceTracker:
    """Tracks how often a request's drafts are accepted if all previous drafts were.

    Attributes:
        accepted, rejected: Decayed counts, including the prior.
        decay: Weight of earlier observations at each verification.
    """

    accepted: float = FIRST_PRIOR[0]
    rejected: float = FIRST_PRIOR[1]
    decay: float = DECAY

    @classmethod
    def from_probability(cls, probability: float) -> "AcceptanceTracker":
        """Create the tracker of a request that is expected to behave like earlier ones."""
        weight = LATER_PRIOR_WEIGHTS[0] + (LATER_PRIOR_WEIGHTS[1] - LATER_PRIOR_WEIGHTS[0]) * probability**2
        return cls(weight * probability, weight * (1 - probability))

    def observe(self, offered: int, accepted: int) -> None:
        """Count a verification. Drafts after the first rejected one do not count."""
        self.accepted = self.decay * self.accepted + accepted
        self.rejected = self.decay * self.rejected + (accepted < offered)

    @property
    def probability(self) -> float:
        """Probability that the next draft is accepted, in (0, 1)."""
        return self.accepted / (self.accepted + self.rejected)


@dataclass
class RequestState:
    """Draft state of one running request. The worker creates and updates it.

    Attributes:
        rid: SGLang's request id, for logs and traces.
        row: The request's row in the token table.
        seed: Seed of the noise shared by draft and verification, in [0, 2**63).
        cached_prompt_len: Prompt tokens that were in the prefix tree when the request arrived.
        prompt: Token ids of the prompt.
        namespace: What else its KV depends on, as in SGLang's prefix tree (``extra_key``: an adapter, a salt). None if token ids do not
            determine the KV, because embeddings replace some of them.
        method: Index, among the server's methods, of the requested one (method_options.py).
        compressor: Number in the catalogue of the method that last created or refreshed its compressed KV. 0 before.
        fallback: Index into :data:`FALLBACK_REASONS`. 0 while the request drafts.
        num_pending: Tokens drafted since the last verification, stored on the device. The loop sets it.
        verifies, offered, accepted: Totals over the request's life.
        accept_histogram, offer_histogram: Element ``k`` counts the verifications that accepted, or were offered, ``k`` drafts.
        acceptance: Recent acceptance of drafts.
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
