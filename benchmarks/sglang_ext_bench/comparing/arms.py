"""The servers of an identity run, and the requests that are sent to each one."""

import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import file_name
from sglang_ext_bench.client import Generation, generate
from sglang_ext_bench.comparing.compare import CONTROL, ComparisonSetting
from sglang_ext_bench.comparing.identity_config import IdentityConfig
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.server import BenchServer

TOP_LOGPROBS = 3
"""Log-probabilities of each token. A margin needs two, and a third one gives arms with different best tokens a common token."""

PROGRESS_SECONDS = 10.0
"""Seconds between two progress lines."""


@dataclass(frozen=True)
class Arm:
    """One server of an identity run.

    Attributes:
        name: Name in logs and printed lines.
        compressor: Name of the method in the report. ``none`` for stock, ``CONTROL`` for a control.
        budget: Share of the KV in the report.
        arguments: Flags in addition to the common ones.
        with_logprobs: Its requests ask for log-probabilities.
    """

    name: str
    compressor: str
    budget: float
    arguments: tuple[str, ...]
    with_logprobs: bool = True

    def setting(self, concurrency: int) -> ComparisonSetting:
        """The setting of a comparison of this arm with stock."""
        extra = shlex.join(self.arguments) if self.compressor == CONTROL else ""
        return ComparisonSetting(self.compressor, self.budget, concurrency, extra)


def stock_arm(config: IdentityConfig) -> Arm:
    """The reference: stock SGLang."""
    return Arm("stock", "none", 1.0, () if config.control else ("--kv-mode", "full"))


def control_arms(config: IdentityConfig) -> list[Arm]:
    """Further stock servers, which measure how much stock's outputs vary. With ``--control`` there is at least one."""
    arguments = config.control_arms or (((),) if config.control else ())
    return [Arm(f"{CONTROL}-{i}", CONTROL, 1.0, each) for i, each in enumerate(arguments, start=1)]


def verified_arms(config: IdentityConfig) -> list[Arm]:
    """The verified servers. There are none with ``--control``."""
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


def server_flags(config: IdentityConfig, arm: Arm) -> tuple[str, ...]:
    """All flags of an arm's server."""
    return (*config.common_server_arguments, *arm.arguments)


ArmOutputs = dict[int, list[Generation]]
"""Responses in the order of the prompts, by concurrency."""


def run_wave(
    server: BenchServer, prompts: tuple[Prompt, ...], config: IdentityConfig, top_logprobs: int
) -> Iterator[Generation]:
    """Send a batch of prompts at once, and yield the responses in the order of the prompts.

    The prefix cache is empty before, or with ``--cache warm`` contains only these prompts.
    """

    def send(prompt: Prompt) -> Generation:
        return generate(server, prompt.input_ids, config.sampling, config.output_len, top_logprobs)

    def fill_cache(prompt: Prompt) -> Generation:
        return generate(server, prompt.input_ids, config.sampling, new_tokens=1)

    server.flush_cache()
    with ThreadPoolExecutor(len(prompts)) as pool:
        if config.cache == "warm":
            list(pool.map(fill_cache, prompts))
        yield from pool.map(send, prompts)


def run_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Start the arm's server, and send all prompts at each concurrency.

    Raises:
        CommandError: The server did not start, or ended.
    """
    console.print(f"{arm.name}: starting", markup=False)
    outputs: ArmOutputs = {}
    with BenchServer(
        config.model,
        server_flags(config, arm),
        logs / f"{file_name(arm.name)}.log",
        config.port,
        config.start_timeout,
        request_timeout=config.request_timeout,
    ) as server:
        for width in config.concurrency:
            responses: list[Generation] = []
            printed = time.monotonic()
            for start in range(0, len(prompts), width):
                wave = prompts[start : start + width]
                for response in run_wave(server, wave, config, TOP_LOGPROBS if arm.with_logprobs else 0):
                    responses.append(response)
                    if len(responses) < len(prompts) and time.monotonic() - printed >= PROGRESS_SECONDS:
                        printed = time.monotonic()
                        console.print(f"{arm.name}: {len(responses)} of {len(prompts)} responses", markup=False)
            outputs[width] = responses
            seconds = sum(response.seconds for response in responses)
            console.print(f"{arm.name}: {len(responses)} responses, {seconds:.1f} request seconds", markup=False)
    return outputs


def try_arm(
    config: IdentityConfig, arm: Arm, prompts: tuple[Prompt, ...], logs: Path, console: Console
) -> ArmOutputs:
    """Run an arm as :func:`run_arm`. If its server fails, each prompt gets the error, and the other arms still run."""
    try:
        return run_arm(config, arm, prompts, logs, console)
    except CommandError as error:
        console.print(f"{arm.name}: {error}", markup=False)
        failed = [Generation(error=str(error).split("\n")[0])] * len(prompts)
        return {width: failed for width in config.concurrency}
