"""Compares the outputs of two arms: the first token that differs, and the largest difference of log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.client import Generation, VerifyStats
from sglang_ext_bench.comparing.acceptance import Acceptance, add_up
from sglang_ext_bench.prompts import Prompt

NOT_VERIFIED = (
    "the response has neither a verification (kv_verifies) nor a fallback to the full KV "
    "(kv_fallback), so stock would be compared with stock: check that sglang-ext is installed"
)
TOKENS_WITHOUT_VERIFY = 2
"""Output tokens that need no verification: the first one comes from prefill, and a single remaining token is not drafted."""

CONTROL = "control"
"""Name in place of a compressor's for a comparison of stock with stock."""


@dataclass(frozen=True)
class ComparisonSetting:
    """The settings of one comparison with stock SGLang.

    Attributes:
        compressor: Name of the method, or ``CONTROL``.
        budget: Share of the KV that the method keeps.
        concurrency: Requests at once.
        control_arguments: Flags of a control's server that the reference server does not have.
    """

    compressor: str
    budget: float
    concurrency: int
    control_arguments: str = ""

    @property
    def is_control(self) -> bool:
        """Whether this compares stock with stock."""
        return self.compressor == CONTROL

    @property
    def label(self) -> str:
        """Short name for tables and legends."""
        name = f"{self.budget:g}" if not self.is_control else self.control_arguments or "same arguments"
        return f"{self.compressor} {name}, concurrency {self.concurrency}"


@dataclass(frozen=True)
class LogprobDifference:
    """The largest absolute difference of a log-probability between two arms.

    Attributes:
        value: The difference.
        index: Index of the output token.
        token: Id of the token whose log-probability differs.
    """

    value: float
    index: int
    token: int


@dataclass(frozen=True)
class PromptResult:
    """The comparison of one prompt's outputs.

    Attributes:
        name: Name of the prompt.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens of stock's output.
        identical: Both outputs have the same tokens.
        first_difference: Index of the first output token that differs. None if the outputs are identical or a request failed.
        margin: Stock's top-2 margin at the first difference. None if it is unknown.
        max_logprob_difference: None unless both arms returned log-probabilities.
        verify: Counters of verified decoding.
        fallback: Reason why the full KV served the request.
        error: The arm that failed, and its error.
        stock_seconds: Time of stock's request.
        verified_seconds: Time of the other arm's request.
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
    """The results of all prompts of one setting, and their summed acceptance."""

    setting: ComparisonSetting
    results: tuple[PromptResult, ...]
    acceptance: Acceptance

    @property
    def identical(self) -> int:
        """Prompts whose outputs are identical."""
        return sum(result.identical for result in self.results)

    @property
    def max_logprob_difference(self) -> tuple[str, LogprobDifference] | None:
        """The largest difference of all prompts, with the prompt's name. None without log-probabilities."""
        found = [
            (result.name, result.max_logprob_difference)
            for result in self.results
            if result.max_logprob_difference is not None
        ]
        return max(found, key=lambda pair: pair[1].value, default=None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs. If one sequence continues the other, the shorter length. None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def largest_logprob_difference(left: Generation, right: Generation) -> LogprobDifference | None:
    """Return the largest difference of a log-probability. None if no position has a token to compare.

    Positions after the first different token are not compared, because their contexts differ. At each position, the tokens that are in
    both lists of best tokens are compared.
    """
    first = first_difference(left.output_ids, right.output_ids)
    end = None if first is None else first + 1
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
    """Compare the outputs of one prompt.

    Args:
        prompt: The prompt.
        stock: Stock's response.
        verified: The response of the other arm.
        needs_verify: A response without a verification and without a fallback is an error.
    """
    error = _error(stock, verified, needs_verify)
    index = None if error else first_difference(stock.output_ids, verified.output_ids)
    return PromptResult(
        name=prompt.name,
        prompt_tokens=len(prompt.input_ids),
        output_tokens=len(stock.output_ids),
        identical=error is None and index is None,
        first_difference=index,
        margin=None if index is None else stock.margin(index),
        max_logprob_difference=None if error else largest_logprob_difference(stock, verified),
        verify=verified.verify,
        fallback=verified.fallback,
        error=error,
        stock_seconds=stock.seconds,
        verified_seconds=verified.seconds,
    )


def compare(
    setting: ComparisonSetting,
    prompts: Sequence[Prompt],
    stock: Sequence[Generation],
    verified: Sequence[Generation],
    draft_length: int,
) -> Comparison:
    """Compare the two arms of one setting, prompt by prompt. All sequences have the same length."""
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


def _was_verified(response: Generation) -> bool:
    """Whether the response was verified, has a fallback, or is too short for a verification."""
    if response.fallback is not None:
        return True
    if response.verify is None:
        return False
    return response.verify.verifies > 0 or len(response.output_ids) <= TOKENS_WITHOUT_VERIFY
