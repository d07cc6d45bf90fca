"""Helpers of the benchmarks' tests."""

import argparse
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sglang_ext_bench.comparing import identity
from sglang_ext_bench.comparing.acceptance import add_up
from sglang_ext_bench.comparing.compare import CONTROL, Comparison, LogprobDifference, PromptResult, ComparisonSetting
from sglang_ext_bench.client import TopLogprobs, VerifyStats
from sglang_ext_bench.comparing.identity_config import IdentityConfig
from sglang_ext_bench.prompts import Prompt

SETTING = ComparisonSetting("quant", 0.5, 1)
CONTROL_SETTING = ComparisonSetting(CONTROL, 1.0, 1, "--chunked-prefill-size 512")
PROMPT = Prompt("p", (1, 2, 3))
STATS = VerifyStats(4, 7, 4, 2.0, (1, 2, 1))


def tops(*margins: float) -> tuple[TopLogprobs, ...]:
    """Log-probabilities of tokens 7 and 8 with these margins."""
    return tuple(((7, -0.5), (8, -0.5 - margin)) for margin in margins)


def result(
    name: str = "p",
    margin: float | None = None,
    differs: bool = True,
    logprob: float | None = None,
    error: str | None = None,
) -> PromptResult:
    """A result whose outputs differ at token 2, or are identical."""
    differs = differs and error is None
    found = None if logprob is None else LogprobDifference(logprob, 1, 7)
    at = 2 if differs else None
    return PromptResult(name, 3, 4, not differs and error is None, at, margin, found, error=error)


def comparison(*results: PromptResult, setting: ComparisonSetting = SETTING) -> Comparison:
    """A comparison with these results."""
    return Comparison(setting, results, add_up([], 1))


class Here:
    """A fake pool of processes that runs its work in this process, because another process would load SGLang again."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., Any], *given: object) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given))
        except Exception as error:  # as a pool does
            done.set_exception(error)
        return done


class CharTokenizer:
    """A tokenizer with one token per character. "<" is the begin token."""

    bos_token = "<"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in ("<" if add_special_tokens else "") + text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return "<" + "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"


def make_config(**changes: object) -> IdentityConfig:
    values: dict[str, object] = {"model": "m", "prompts": Path("p"), "output_len": 4}
    values |= {"compressors": ("quant",), "budgets": (0.5,)}
    return IdentityConfig(**(values | changes))  # type: ignore[arg-type]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    identity.add_arguments(parser)
    return parser.parse_args(["--model", "m", "--prompts", "p", "--output-len", "4", *words])
