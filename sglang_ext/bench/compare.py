"""Pure comparison of two arms: where outputs differ, how many drafts were accepted, pass or fail."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sglang_ext.bench.generation import Generation, VerifyStats
from sglang_ext.bench.prompts import Prompt

NOT_VERIFIED = (
    "the answer names neither a verification (kv_verifies) nor a reason for the full cache "
    "(kv_fallback): stock would be compared with stock; is sglang-ext installed?"
)
TOKENS_WITHOUT_VERIFY = 2
"""The first token comes from prefill; a last one alone needs no draft."""


@dataclass(frozen=True)
class Setting:
    """What one comparison measured. ``compressor`` is "control" for stock against stock."""

    compressor: str
    budget: float
    concurrency: int

    @property
    def label(self) -> str:
        """Short name for tables and legends."""
        return f"{self.compressor} {self.budget:g}, concurrency {self.concurrency}"


@dataclass(frozen=True)
class PromptResult:
    """One prompt in both arms.

    ``first_difference`` is the index of the first output token that differs (None: identical or
    failed); ``margin`` is stock's top-2 margin there. ``error`` says which arm failed and why.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    identical: bool
    first_difference: int | None = None
    margin: float | None = None
    verify: VerifyStats | None = None
    fallback: str | None = None
    error: str | None = None
    stock_seconds: float = 0.0
    verified_seconds: float = 0.0


@dataclass(frozen=True)
class Acceptance:
    """Verifies summed over requests; position j (1-based) stands at index j - 1.

    ``offered[j-1]`` counts verifies that offered at least j drafts, ``accepted[j-1]`` those that
    accepted at least j.
    """

    verifies: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the verifies with a j-th draft that accepted it; ends where none had one."""
        return tuple(a / o for a, o in zip(self.accepted, self.offered, strict=True) if o)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify: the accepted drafts and the one the full cache adds."""
        return 1 + sum(self.accepted) / self.verifies if self.verifies else None

    @property
    def rate(self) -> float | None:
        """g = accepted drafts / offered drafts."""
        return sum(self.accepted) / sum(self.offered) if sum(self.offered) else None


@dataclass(frozen=True)
class Comparison:
    """All prompts of one setting."""

    setting: Setting
    results: tuple[PromptResult, ...]
    acceptance: Acceptance

    @property
    def identical(self) -> int:
        """Prompts whose outputs agree token by token."""
        return sum(result.identical for result in self.results)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one goes on; None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_prompt(
    prompt: Prompt, stock: Generation, verified: Generation, needs_verify: bool = True
) -> PromptResult:
    """Compare one prompt; ``needs_verify``: an answer that was not verified and says no reason fails."""
    error = _error(stock, verified, needs_verify)
    at = None if error else first_difference(stock.output_ids, verified.output_ids)
    return PromptResult(
        name=prompt.name,
        prompt_tokens=len(prompt.input_ids),
        output_tokens=len(stock.output_ids),
        identical=error is None and at is None,
        first_difference=at,
        margin=_margin(stock, at),
        verify=verified.verify,
        fallback=verified.fallback,
        error=error,
        stock_seconds=stock.seconds,
        verified_seconds=verified.seconds,
    )


def compare(
    setting: Setting,
    prompts: Sequence[Prompt],
    stock: Sequence[Generation],
    verified: Sequence[Generation],
    draft_length: int,
    needs_verify: bool = True,
) -> Comparison:
    """Compare the two arms of one setting, prompt by prompt (sequences of equal length)."""
    rows = zip(prompts, stock, verified, strict=True)
    results = tuple(compare_prompt(*row, needs_verify=needs_verify) for row in rows)
    stats = [result.verify for result in results if result.verify is not None]
    return Comparison(setting, results, add_up(stats, draft_length))


def add_up(stats: Iterable[VerifyStats], draft_length: int) -> Acceptance:
    """Sum the counters of requests."""
    curves = [acceptance(each, draft_length) for each in stats]
    return Acceptance(
        verifies=sum(curve.verifies for curve in curves),
        offered=_sum_columns([curve.offered for curve in curves]),
        accepted=_sum_columns([curve.accepted for curve in curves]),
    )


def acceptance(stats: VerifyStats, draft_length: int) -> Acceptance:
    """Counters by draft position of one request."""
    accepted = at_least(stats.accepted_histogram)
    if stats.offered_histogram is not None:
        offered = at_least(stats.offered_histogram)
    else:
        offered = assumed_offers(stats.verifies, stats.drafts, draft_length)
    pairs = list(zip_longest(offered, accepted, fillvalue=0))
    # The assumption may fall short of what was accepted, which was surely offered.
    return Acceptance(
        stats.verifies, tuple(max(pair) for pair in pairs), tuple(pair[1] for pair in pairs)
    )


def at_least(histogram: Sequence[int]) -> tuple[int, ...]:
    """From counts of exactly 0, 1, 2... to counts of at least 1, 2..."""
    return tuple(sum(histogram[k:]) for k in range(1, len(histogram)))


def assumed_offers(verifies: int, drafts: int, draft_length: int) -> tuple[int, ...]:
    """Verifies that offered at least j drafts, where the server gives only the sum.

    Assumes that as many verifies as possible offered ``draft_length``: only the last ones of a
    request, near the end of its output, offer fewer.
    """
    if not draft_length:
        return ()
    full, rest = divmod(min(drafts, verifies * draft_length), draft_length)
    return tuple(full + (j <= rest) for j in range(1, draft_length + 1))


def is_failure(result: PromptResult, dtype: str, tolerance: float) -> bool:
    """Whether this prompt fails the run.

    An error always does. A difference does in float32, unless stock's top-2 margin there lies
    below ``tolerance``; other dtypes round differently for each batch shape, and only report.
    """
    if result.error is not None:
        return True
    if result.identical or dtype != "float32":
        return False
    return result.margin is None or not result.margin < tolerance


def exit_code(comparisons: Iterable[Comparison], dtype: str, tolerance: float) -> int:
    """1 when any prompt of any comparison fails, else 0."""
    results = (result for each in comparisons for result in each.results)
    return int(any(is_failure(result, dtype, tolerance) for result in results))


def _error(stock: Generation, verified: Generation, needs_verify: bool) -> str | None:
    if stock.error is not None:
        return f"stock: {stock.error}"
    if verified.error is not None:
        return f"verified: {verified.error}"
    if needs_verify and not _was_verified(verified):
        return f"verified: {NOT_VERIFIED}"
    return None


def _was_verified(answer: Generation) -> bool:
    """Whether the answer was verified, names its fallback, or is too short to be."""
    if answer.fallback is not None:
        return True
    if answer.verify is None:
        return False
    return answer.verify.verifies > 0 or len(answer.output_ids) <= TOKENS_WITHOUT_VERIFY


def _margin(stock: Generation, at: int | None) -> float | None:
    if at is None or stock.margins is None or at >= len(stock.margins):
        return None
    return stock.margins[at]


def _sum_columns(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))
