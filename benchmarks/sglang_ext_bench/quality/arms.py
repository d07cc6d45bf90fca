"""The servers of a quality run, and what each is asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient
from sglang_ext.tools.server_process import ServerProcess, file_name
from sglang_ext_bench.client import generate

from sglang_ext_bench.client import Generation
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.config import COMPARED, QualityConfig
from sglang_ext_bench.quality.copy_bytes import copy_share, token_bytes
from sglang_ext_bench.quality.named import Named
from sglang_ext_bench.quality.reporting.speed import tokens_per_second
from sglang_ext_bench.quality.tasks import Task
from sglang_ext_bench.quality.together import together

MEASURED_TOKENS = 512
"""Tokens of a context whose copy's bytes stand for others'; in shorter ones what is kept exact weighs more."""


@dataclass(frozen=True)
class QualityArm:
    """One server.

    Attributes:
        mode: as ``--kv-mode``.
        compressor: as ``--compressor`` names it (named.py).
        budget: 1 of stock (``full``).
        draft_length: None unless ``verified``.
        extra: further flags.
    """

    mode: str
    compressor: str = "none"
    budget: float = 1.0
    draft_length: int | None = None
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables and logs."""
        if self.mode == "full":
            return "full"
        drafts = "" if self.draft_length is None else f"-x{self.draft_length}"
        return f"{self.mode}-{self.compressor}-{self.budget:g}{drafts}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Flags beside those of all servers."""
        if self.mode == "full":
            return ("--kv-mode", "full")
        drafts = () if self.draft_length is None else ("--kv-draft-length", str(self.draft_length))
        return (
            *("--kv-mode", self.mode, *Named.of(self.compressor).flags, "--kv-budget", f"{self.budget:g}"),
            *drafts,
            *self.extra,
        )


FULL = QualityArm("full")


def arms_of(config: QualityConfig) -> list[QualityArm]:
    """The servers that the wanted parts need; stock comes last, for it scores what the others answered.

    Raises:
        CommandError: a compressor is served in none of the modes in which these parts are measured.
    """
    found = []
    lengths = config.draft_lengths if config.asks("acceptance") else config.draft_lengths[:1]
    for compressor in config.compressors:
        named, before = Named.of(compressor), len(found)
        for budget in named.budgets(config.budgets):
            if config.asks(*COMPARED) and named.serves_lossy and "lossy" in config.modes:
                found.append(QualityArm("lossy", compressor, budget, None, config.kv_args))
            if config.asks("acceptance", *COMPARED) and named.serves_verified and "verified" in config.modes:
                found += [QualityArm("verified", compressor, budget, length, config.kv_args) for length in lengths]
        if len(found) == before and config.asks("acceptance", *COMPARED):
            mode, parts = ("lossy", COMPARED) if named.serves_lossy else ("verified", ("acceptance", *COMPARED))
            raise CommandError(
                f"--compressor '{compressor}', --modes {','.join(config.modes)}, --parts {','.join(config.parts)}: nothing would be measured "
                f"of it, which is served in {mode} alone; pass --modes {mode} and some of --parts {','.join(parts)}, or leave it out"
            )
    return [*found, FULL] if config.asks(*COMPARED) else found


@dataclass(frozen=True)
class Answers:
    """What a server answered, by temperature, in the order of prompts and tasks; empty where it was not asked.

    ``bytes_share`` is that of its compressed copies in full KV's bytes, 1 of stock; None where it reported none. ``speed`` is in
    tokens per second; None where it was not asked for.
    """

    prompts: Mapping[float, tuple[Generation, ...]] = field(default_factory=dict)
    tasks: Mapping[float, tuple[Generation, ...]] = field(default_factory=dict)
    bytes_share: float | None = 1.0
    speed: float | None = None


def flags_of(config: QualityConfig, arm: QualityArm) -> tuple[str, ...]:
    """All flags of an arm's server."""
    return (*config.common_server_arguments, *arm.arguments)


def server(config: QualityConfig, arm: QualityArm, logs: Path) -> ServerProcess:
    """An arm's server, to be entered; its log lies in ``logs``."""
    return ServerProcess(
        config.model,
        flags_of(config, arm),
        logs / f"{file_name(arm.name)}.log",
        config.port,
        config.start_timeout,
        config.request_timeout,
    )


def ask(
    config: QualityConfig, arm: QualityArm, client: ServerClient, prompts: Sequence[Prompt], tasks: Sequence[Task]
) -> Answers:
    """Ask a server for all that the wanted parts need of it.

    Raises:
        CommandError: a request failed.
    """
    compared = arm.draft_length in (None, config.draft_lengths[0])
    drafts = config.asks("acceptance") and arm.mode == "verified"
    wants_prompts = drafts or (config.asks("kl", "divergence") and compared)
    wants_tasks = config.asks("functional") and compared
    return Answers(
        bytes_share=_bytes_share(config, arm, client, [each.input_ids for each in (*prompts, *tasks)]),
        prompts=_ask_prompts(config, client, prompts, compared) if wants_prompts else {},
        tasks=_ask_tasks(config, client, tasks) if wants_tasks else {},
        speed=_speed(config, client, prompts) if config.asks("speed") and compared else None,
    )


def _speed(config: QualityConfig, client: ServerClient, prompts: Sequence[Prompt]) -> float | None:
    return tokens_per_second(client, prompts, config.output_len, config.concurrency)


def _bytes_share(
    config: QualityConfig, arm: QualityArm, client: ServerClient, contexts: Sequence[tuple[int, ...]]
) -> float | None:
    """Measured on the shortest context that is long enough, else on the longest, over two rounds at least."""
    if arm == FULL:
        return 1.0
    ordered = sorted(contexts, key=len)
    context = next((each for each in ordered if len(each) >= MEASURED_TOKENS), ordered[-1])
    return copy_share(client, context, 8 + 2 * (arm.draft_length or 0), token_bytes(config.model, config.dtype))


def _ask_prompts(
    config: QualityConfig, client: ServerClient, prompts: Sequence[Prompt], compared: bool
) -> dict[float, tuple[Generation, ...]]:
    def answer(temperature: float, index: int) -> Generation:
        wants_top = config.asks("kl") and compared and temperature == 0
        sampling = config.sampling(temperature, index, ignore_eos=True)
        return generate(client, prompts[index].input_ids, sampling, config.output_len, config.top if wants_top else 0)

    return _by_temperature(config, client, len(prompts), answer)


def _ask_tasks(
    config: QualityConfig, client: ServerClient, tasks: Sequence[Task]
) -> dict[float, tuple[Generation, ...]]:
    def answer(temperature: float, index: int) -> Generation:
        sampling = config.sampling(temperature, index, ignore_eos=False)
        return generate(client, tasks[index].input_ids, sampling, tasks[index].new_tokens)

    return _by_temperature(config, client, len(tasks), answer)


def _by_temperature(
    config: QualityConfig, client: ServerClient, count: int, answer: Callable[[float, int], Generation]
) -> dict[float, tuple[Generation, ...]]:
    found = {}
    for turn, temperature in enumerate(config.temperatures):
        if not (turn and config.keep_cache):
            client.flush_cache()
        answers = together(config.concurrency, range(count), lambda index: answer(temperature, index))
        failed = [f"request {index}: {each.error}" for index, each in enumerate(answers) if each.error]
        if failed:
            raise CommandError(f"at temperature {temperature:g} {len(failed)} of {count} requests failed; {failed[0]}")
        found[temperature] = answers
    return found
