"""Pure comparison of two arms: where outputs differ, and by how much their log-probabilities do."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.comparing.acceptance import Acceptance, add_up
from sglang_ext_bench.comparing.generation import Generation, VerifyStats
from sglang_ext_bench.prompts import Prompt

NOT_VERIFIED = (
    "the answer names neither a verification (kv_verifies) nor a reason for the full cache "
    "(kv_fallback): stock would be compared with stock; is sglang-ext installed?"
)
TOKENS_WITHOUT_VERIFY = 2
"""The first token comes from prefill; a last one alone needs no draft."""

CONTROL = "control"
"""In place of a compressor's name: stock against stock."""


@dataclass(frozen=True)
class Setting:
    """What one comparison measured.

    ``control_arguments`` are those that a control's stock server has beside the reference's.
    """

    compressor: str
    budget: float
    concurrency: int
    control_arguments: str = ""

    @property
    def is_control(self) -> bool:
        """Whether stock was compared with stock."""
        return self.compressor == CONTROL

    @property
    def label(self) -> str:
        """Short name for tables and legends."""
        name = f"{self.budget:g}" if not self.is_control else self.control_arguments or "same arguments"
        return f"{self.compressor} {name}, concurrency {self.concurrency}"


@dataclass(frozen=True)
class LogprobDifference:
    """The largest absolute difference of a log-probability between two arms, and where.

    ``index`` counts output tokens, ``token`` is the id of the token whose probability differs.
    """

    value: float
    index: int
    token: int


@dataclass(frozen=True)
class PromptResult:
    """One prompt in both arms.

    ``first_difference`` is the index of the first output token that differs (None: identical or
    failed); ``margin`` is stock's top-2 margin there. ``max_logprob_difference`` is None where
    not both arms gave log-probabilities. ``error`` says which arm failed and why.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    identical: bool
    first_difference: int | None = None
    margin: float | None = None
    max_logprob_difference: LogprobDifference | None = None
    verify: VerifyStats | None = None
    fallback: str | None = None
    error: str | None = None
    stock_seconds: float = 0.0
    verified_seconds: float = 0.0


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

    @property
    def max_logprob_difference(self) -> tuple[str, LogprobDifference] | None:
        """The largest of all prompts, with the prompt's name."""
        found = [
            (result.name, result.max_logprob_difference)
            for result in self.results
            if result.max_logprob_difference is not None
        ]
        return max(found, key=lambda pair: pair[1].value, default=None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one goes on; None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def largest_logprob_difference(left: Generation, right: Generation) -> LogprobDifference | None:
    """Compare positions up to and with the first token that differs: until there both arms saw the same.

    At each position the tokens that stand in both lists of best ones are compared. None where no
    position has any, for want of log-probabilities.
    """
    at = first_difference(left.output_ids, right.output_ids)
    end = None if at is None else at + 1
    rows = zip((left.top_logprobs or ())[:end], (right.top_logprobs or ())[:end], strict=False)
    found = (
        LogprobDifference(abs(a - b), index, token)
        for index, (one, other) in enumerate(rows)
        for token, a in one
        for same, b in other
        if token == same
    )
    return max(found, key=lambda each: each.value, default=None)


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
        margin=None if at is None else stock.margin(at),
        max_logprob_difference=None if error else largest_logprob_difference(stock, verified),
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
) -> Comparison:
    """Compare the two arms of one setting, prompt by prompt (sequences of equal length)."""
    rows = zip(prompts, stock, verified, strict=True)
    results = tuple(compare_prompt(*row, needs_verify=not setting.is_control) for row in rows)
    stats = [result.verify for result in results if result.verify is not None]
    return Comparison(setting, results, add_up(stats, draft_length))


def _error(stock: Generation, verified: Generation, needs_verify: bool) -> str | None:
    if stock.error is not None:
        return f"stock: {stock.error}"
    if verified.error is not None:
        return f"{'verified' if needs_verify else CONTROL}: {verified.error}"
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
