"""The nouns that cross modules; each field says who sets it.

Nothing here loads PyTorch: command lines import this module to show their help.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sglang_ext.mem_cache.prefix_cache.segments import Segment

# Default of --kv-budget: the share of tokens that compressed KV keeps.
DEFAULT_BUDGET = 0.25
# What the flags choose of SGLang's registries.
SPECULATIVE_ALGORITHM = "KV_VERIFIED"
RADIX_CACHE_BACKEND = "kv_views"
# Tokens of a context from which on it is compressed, if that is not asked for later; below, a copy saves nothing worth drafting for.
MIN_CONTEXT = 128
# Steps of a round without drafts, as all are in mode lossy: more spare SGLang's scheduler work, and let requests end later.
PLAIN_STEPS = 4
# Why a request is served with full KV. Processes of one server tell each other places in it (managers/spec_decode/request_states.py).
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
# Drafting would not be faster than full KV (managers/spec_decode/draft_length.py).
SLOWER = FALLBACK_REASONS.index("slower")
# The method of the request scores by the newest queries, of which too few are kept: all rings were taken
# (mem_cache/compressed/queries.py), or what came so far left none (steps in graphs).
NO_QUERIES = FALLBACK_REASONS.index("no-queries")
# The scores of the request's method cannot be used (mem_cache/compressors/contracts/compressor.py).
WRONG_SCORES = FALLBACK_REASONS.index("wrong-scores")
# Cache ranks choose its tokens, and none has chosen any yet, or none can (managers/cache_rank/).
NO_SELECTION = FALLBACK_REASONS.index("no-selection")
# Fallbacks that end once the context is long enough, slots are free, drafting pays, a ring is left, tokens are chosen; and one that does
# not, but whose requests can be verified too.
RETRYABLE = (0, SHORT_CONTEXT, NO_FREE_SLOTS, SLOWER, NO_QUERIES, WRONG_SCORES, NO_SELECTION)
# Evidence that the first request begins with: drafts accepted and rejected, at a probability of 0.9.
FIRST_PRIOR = (1.8, 0.2)
# Weight of what is expected of a later one, at probability 0 and 1: where drafts were of no use, a few that are accepted
# shall tell; where they were good, one rejection shall not.
LATER_PRIOR_WEIGHTS = (0.5, 4.0)
# Weight of what was seen before, at each verification: of one request, and of all.
DECAY, SLOW_DECAY = 0.9, 0.99


class OptionError(ValueError):
    """A flag that cannot be served: says the value, what is allowed, and the remedy."""


class HookError(RuntimeError):
    """This SGLang is not the one that the hooks were written for."""


class IntegrityError(RuntimeError):
    """A slot has two owners: an answer could be wrong."""


@dataclass
class CompressedKV:
    """A request's compressed copy: what attention reads instead of the first ``covered`` tokens.

    Attributes:
        own: int64 [own tokens], slots of what the request alone reads, in SGLang's KV pool, in whole pages.
        covered: tokens of the full KV, from the start of the context, that the copy stands for; whole pages.
        segments: what it shares with others, from the sinks on; ``own`` stands for the rest.
        tail_end: first position after ``covered`` that the draft row does not lead to yet; its writers set it.
        method: what it is called, after the compressor that chose what it keeps; set when it is filled.
        sinks: slots at the beginning of ``own`` that hold the context's first tokens, before those that blocks stand for.
        own_tokens: tokens that ``own`` keeps of the rest; the compressed views set it.
        own_packed: slots of ``own``, after the sinks, that hold packed blocks (quantized_blocks.py); 0 where it holds tokens.
        back_slots: int64, as many slots of its own, which the draft row does not lead to: what it shall keep next is written there; empty where
            that is written over what it keeps, beside steps or in them, and None where it is chosen between them.
        refresh_after: tokens before the newest that copies leave as they are at which it is made anew; 0 where that follows from its size.
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
        """What the draft row leads to of the copy, blocks first: int64 [kept]. What fills up pages of blocks is left out."""
        import torch

        sinks, own = self.own[: self.sinks], self.own[self.sinks :]
        shared = [segment.slots[: segment.packed or None] for segment in self.segments]
        return torch.cat([*shared, own[: self.own_packed or None], sinks])

    @property
    def owned_slots(self) -> "torch.Tensor":
        """All slots that are its own, the spare ones last: int64."""
        import torch

        return self.own if self.back_slots is None else torch.cat([self.own, self.back_slots])

    def swap_back_slots(self) -> None:
        """What was written to the spare slots is what it keeps; the others are spare from now on."""
        self.own, self.back_slots = self.back_slots, self.own

    @property
    def shared_len(self) -> int:
        """Tokens of the full KV that its sinks and its segments stand for."""
        return self.segments[-1].end if self.segments else self.sinks

    @property
    def has_all_tokens(self) -> bool:
        """Whether it keeps all tokens that it covers, in blocks but for the sinks: full KV could be made of it."""
        kept = self.sinks + sum(segment.tokens for segment in self.segments) + self.own_tokens
        return self.packed > 0 and kept == self.covered

    def detach_blocks(self, tokens: int, packed: int) -> "torch.Tensor":
        """Its own slots that hold the blocks of its first ``tokens``, ``packed`` slots, which it reads as a segment's from now on.

        They are int64, and whole pages: those of all its tokens, or of as many blocks as fill pages.
        """
        import torch

        end = len(self.own) if tokens == self.own_tokens else self.sinks + packed
        slots, self.own = self.own[self.sinks : end].clone(), torch.cat([self.own[: self.sinks], self.own[end:]])
        self.own_tokens, self.own_packed = self.own_tokens - tokens, self.own_packed - packed
        return slots

    @property
    def kept(self) -> int:
        """Slots that the draft row leads to of the copy."""
        own = self.own_packed + self.sinks if self.own_packed else len(self.own)
        return sum(segment.packed or len(segment.slots) for segment in self.segments) + own

    @property
    def packed(self) -> int:
        """Of these, those that hold packed blocks: all but the sinks, or none."""
        return sum(segment.packed for segment in self.segments) + self.own_packed


@dataclass
class AcceptanceTracker:
    """How often a request's drafts are accepted when those before them were.

    Attributes:
        accepted, rejected: decayed counts, with the prior.
        decay: weight of what was seen before, at each verification.
    """

    accepted: float = FIRST_PRIOR[0]
    rejected: float = FIRST_PRIOR[1]
    decay: float = DECAY

    @classmethod
    def from_probability(cls, probability: float) -> "AcceptanceTracker":
        """Of a request that is expected to be like those before it."""
        weight = LATER_PRIOR_WEIGHTS[0] + (LATER_PRIOR_WEIGHTS[1] - LATER_PRIOR_WEIGHTS[0]) * probability**2
        return cls(weight * probability, weight * (1 - probability))

    def observe(self, offered: int, accepted: int) -> None:
        """Count a verification; drafts after the first that was rejected say nothing."""
        self.accepted = self.decay * self.accepted + accepted
        self.rejected = self.decay * self.rejected + (accepted < offered)

    @property
    def probability(self) -> float:
        """That the next draft is accepted, in (0, 1)."""
        return self.accepted / (self.accepted + self.rejected)


@dataclass
class RequestState:
    """Draft state of one running request; the worker creates and updates it.

    Attributes:
        rid: SGLang's request id, for logs and traces.
        row: the request's row in the token table.
        seed: noise shared by draft and verify, in [0, 2**63).
        cached_prompt_len: tokens of the prompt that the prefix tree had when the request came.
        prompt: token ids of the prompt.
        namespace: what its KV depends on beside these, as SGLang's prefix tree has it (``extra_key``: an adapter, a salt); None where
            these do not tell, as embeddings take the place of some.
        method: place among the server's methods of the one that it asked for (method_options.py).
        compressor: number in the catalogue of the method that made or renewed its copy last; 0 before that.
        fallback: index into :data:`FALLBACK_REASONS`; 0 while the request drafts.
        num_pending: tokens drafted since the last verification; the loop sets it. They lie on the device.
        verifies, offered, accepted: totals over the request's life.
        accept_histogram, offer_histogram: element ``k`` counts the verifications that accepted, or were offered, ``k`` drafts.
        acceptance: how often drafts are accepted, of late.
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
