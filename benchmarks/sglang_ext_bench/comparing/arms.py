"""The servers of an identity run, and the requests that each gets."""

import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import ServerProcess, file_name
from sglang_ext_bench.client import generate
from sglang_ext_bench.comparing.compare import CONTROL, Setting
from sglang_ext_bench.comparing.generation import Generation
from sglang_ext_bench.comparing.identity_config import IdentityConfig
from sglang_ext_bench.prompts import Prompt

TOP_LOGPROBS = 3
"""One more than a margin needs, so that two arms share tokens even where their best ones differ."""

TOLD_SECONDS = 10.0
"""Between two lines that say how far an arm is."""


@dataclass(frozen=True)
class Arm:
    """One server: its name, its arguments beyond the common ones, and whether to ask for log-probabilities.

    ``compressor`` and ``budget`` name it in the report.
    """

    name: str
    compressor: str
    budget: float
    arguments: tuple[str, ...]
    with_logprobs: bool = True

    def setting(self, concurrency: int) -> Setting:
        """What a comparison of this arm with stock measures."""
        extra = shlex.join(self.arguments) if self.compressor == CONTROL else ""
        return Setting(self.compressor, self.budget, concurrency, extra)


def stock_arm(config: IdentityConfig) -> Arm:
    """The reference: the full KV cache, one token per step."""
    return Arm("stock", "none", 1.0, () if config.control else ("--kv-mode", "full"))


def control_arms(config: IdentityConfig) -> list[Arm]:
    """Further stock servers, which show stock's own noise; for ``--control`` at least one."""
    arguments = config.control_arms or (((),) if config.control else ())
    return [Arm(f"{CONTROL}-{i}", CONTROL, 1.0, each) for i, each in enumerate(arguments, start=1)]


def verified_arms(config: IdentityConfig) -> list[Arm]:
    """The arms under test; none for ``--control``."""
    if config.control:
        return []
    return [
        Arm(
            f"verified-{compressor}-{budget:g}",
            compressor,
            budget,
            (
                *("--kv-mode", "verified", "--kv-compressor", compressor),
                *("--kv-budget", f"{budget:g}", "--kv-draft-length", str(config.draft_length)),
                *config.kv_args,
            ),
            config.logprobs,
        )
        for compressor in config.compressors
        for budget in config.budgets_of(compressor)
    ]


def flags_of(config: IdentityConfig, arm: Arm) -> tuple[str, ...]:
    """All flags of an arm's server."""
    return (*config.common_server_arguments, *arm.arguments)


ArmOutputs = dict[int, list[Generation]]
"""Answers in the order of the prompts, by concurrency."""


def run_wave(
    server: ServerProcess, prompts: tuple[Prompt, ...], config: IdentityConfig, top_logprobs: int
) -> Iterator[Generation]:
    """Send a batch of prompts at once, with an empty cache or one that holds these prompts only; answers in their order."""

    def ask(prompt: Prompt) -> Generation:
        return generate(server, prompt.input_ids, config.sampling, config.output_len, top_logprobs)

    def warm(prompt: Prompt) -> Generation:
        return generate(server, prompt.input_ids, config.sampling, new_tokens=1)

    server.flush_cache()
    with ThreadPoolExecutor(len(prompts)) as pool:
        if config.cache == "warm":
            list(pool.map(warm, prompts))
        yield from pool.map(ask, prompts)


def run_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Start the arm's server and send it all prompts at each concurrency.

    Raises:
        CommandError: the server did not start, or ended.
    """
    console.print(f"{arm.name}: starting", markup=False)
    outputs: ArmOutputs = {}
    with ServerProcess(
        config.model,
        flags_of(config, arm),
        logs / f"{file_name(arm.name)}.log",
        config.port,
        config.start_timeout,
        config.request_timeout,
    ) as server:
        for width in config.concurrency:
            answers: list[Generation] = []
            told = time.monotonic()
            for start in range(0, len(prompts), width):
                wave = prompts[start : start + width]
                for answer in run_wave(server, wave, config, TOP_LOGPROBS if arm.with_logprobs else 0):
                    answers.append(answer)
                    if len(answers) < len(prompts) and time.monotonic() - told >= TOLD_SECONDS:
                        told = time.monotonic()
                        console.print(f"{arm.name}: {len(answers)} of {len(prompts)} answers", markup=False)
            outputs[width] = answers
            seconds = sum(answer.seconds for answer in answers)
            console.print(f"{arm.name}: {len(answers)} answers, {seconds:.1f} request seconds", markup=False)
    return outputs


def try_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Like :func:`run_arm`; a server that fails becomes an error of each prompt, so others still run."""
    try:
        return run_arm(config, arm, prompts, logs, console)
    except CommandError as error:
        console.print(f"{arm.name}: {error}", markup=False)
        failed = [Generation(error=str(error).split("\n")[0])] * len(prompts)
        return {width: failed for width in config.concurrency}
