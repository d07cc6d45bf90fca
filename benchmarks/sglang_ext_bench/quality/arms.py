"""The servers of a quality run, and the requests that each of them gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import file_name
from sglang_ext_bench.client import generate
from sglang_ext_bench.client import Generation
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.named_method import NamedMethod
from sglang_ext_bench.quality.options import COMPARED_PARTS, QualityConfig
from sglang_ext_bench.quality.server_measurements import compressed_share, run_parallel, token_bytes, tokens_per_second
from sglang_ext_bench.quality.tasks import Task
from sglang_ext_bench.server import BenchServer, RequestClient

MEASURED_TOKENS = 512
"""Least length of the context whose compressed KV is measured. In a shorter one, the tokens that stay exact are a larger share."""


@dataclass(frozen=True)
class QualityArm:
    """The settings of one server.

    Attributes:
        mode: Value of ``--kv-mode``.
        compressor: Method, as in ``--compressor`` (named_method.py).
        budget: Share of the tokens that are kept. 1 for stock.
        draft_length: Draft length. None unless the mode is verified.
        extra: Further flags.
    """

    mode: str
    compressor: str = "none"
    budget: float = 1.0
    draft_length: int | None = None
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        if self.mode == "full":
            return "full"
        drafts = "" if self.draft_length is None else f"-x{self.draft_length}"
        return f"{self.mode}-{self.compressor}-{self.budget:g}{drafts}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Flags of this server beside those of all servers."""
        if self.mode == "full":
            return ("--kv-mode", "full")
        drafts = () if self.draft_length is None else ("--kv-draft-length", str(self.draft_length))
        return (
            *("--kv-mode", self.mode, *NamedMethod.parse(self.compressor).flags, "--kv-budget", f"{self.budget:g}"),
            *drafts,
            *self.extra,
        )


FULL = QualityArm("full")


def build_arms(config: QualityConfig) -> list[QualityArm]:
    """The servers that the parts need. Stock is last, because it scores the answers of the others.

    Raises:
        CommandError: The modes and parts leave no server for a compressor.
    """
    found = []
    lengths = config.draft_lengths if config.has_part("acceptance") else config.draft_lengths[:1]
    for compressor in config.compressors:
        method, before = NamedMethod.parse(compressor), len(found)
        for budget in method.budgets(config.budgets):
            if config.has_part(*COMPARED_PARTS) and method.supports_lossy and "lossy" in config.modes:
                found.append(QualityArm("lossy", compressor, budget, None, config.kv_args))
            if config.has_part("acceptance", *COMPARED_PARTS) and method.supports_verified and "verified" in config.modes:
                found += [QualityArm("verified", compressor, budget, length, config.kv_args) for length in lengths]
        if len(found) == before and config.has_part("acceptance", *COMPARED_PARTS):
            mode, parts = ("lossy", COMPARED_PARTS) if method.supports_lossy else ("verified", ("acceptance", *COMPARED_PARTS))
            raise CommandError(
                f"--compressor '{compressor}', --modes {','.join(config.modes)}, --parts {','.join(config.parts)}: this method runs only in "
                f"mode {mode}, so that nothing would be measured; pass --modes {mode} and some of --parts {','.join(parts)}, or leave it out"
            )
    return [*found, FULL] if config.has_part(*COMPARED_PARTS) else found


@dataclass(frozen=True)
class ArmAnswers:
    """A server's answers, and measurements of it.

    Attributes:
        prompts: Answers to the prompts by temperature, in the order of the prompts. Empty if they were not sent.
        tasks: Answers to the tasks by temperature, in the order of the tasks. Empty if they were not sent.
        bytes_share: Bytes of compressed KV, as a share of the full KV: 1 for stock. None if the server reported none.
        speed: Tokens per second. None if it was not measured.
    """

    prompts: Mapping[float, tuple[Generation, ...]] = field(default_factory=dict)
    tasks: Mapping[float, tuple[Generation, ...]] = field(default_factory=dict)
    bytes_share: float | None = 1.0
    speed: float | None = None


def server_flags(config: QualityConfig, arm: QualityArm) -> tuple[str, ...]:
    """All flags of an arm's server."""
    return (*config.common_server_arguments, *arm.arguments)


def arm_server(config: QualityConfig, arm: QualityArm, logs: Path) -> BenchServer:
    """The server of an arm, not started yet. Its log is a file in the folder ``logs``."""
    return BenchServer(
        config.model,
        server_flags(config, arm),
        logs / f"{file_name(arm.name)}.log",
        config.port,
        config.start_timeout,
        request_timeout=config.request_timeout,
    )


def collect_answers(
    config: QualityConfig, arm: QualityArm, client: RequestClient, prompts: Sequence[Prompt], tasks: Sequence[Task]
) -> ArmAnswers:
    """Send all requests that the parts need to an arm's server.

    Raises:
        CommandError: A request failed.
    """
    is_compared = arm.draft_length in (None, config.draft_lengths[0])
    needs_acceptance = config.has_part("acceptance") and arm.mode == "verified"
    needs_prompts = needs_acceptance or (config.has_part("kl", "divergence") and is_compared)
    needs_tasks = config.has_part("functional") and is_compared
    needs_speed = config.has_part("speed") and is_compared
    return ArmAnswers(
        bytes_share=_bytes_share(config, arm, client, [each.input_ids for each in (*prompts, *tasks)]),
        prompts=_answer_prompts(config, client, prompts, is_compared) if needs_prompts else {},
        tasks=_answer_tasks(config, client, tasks) if needs_tasks else {},
        speed=tokens_per_second(client, prompts, config.output_len, config.concurrency) if needs_speed else None,
    )


def _bytes_share(
    config: QualityConfig, arm: QualityArm, client: RequestClient, contexts: Sequence[tuple[int, ...]]
) -> float | None:
    """Measure the shortest context of at least MEASURED_TOKENS tokens, else the longest one, over at least two rounds."""
    if arm == FULL:
        return 1.0
    ordered = sorted(contexts, key=len)
    context = next((each for each in ordered if len(each) >= MEASURED_TOKENS), ordered[-1])
    return compressed_share(client, context, 8 + 2 * (arm.draft_length or 0), token_bytes(config.model, config.dtype))


def _answer_prompts(
    config: QualityConfig, client: RequestClient, prompts: Sequence[Prompt], is_compared: bool
) -> dict[float, tuple[Generation, ...]]:
    def answer(temperature: float, index: int) -> Generation:
        needs_top = config.has_part("kl") and is_compared and temperature == 0
        sampling = config.sampling(temperature, index, ignore_eos=True)
        return generate(client, prompts[index].input_ids, sampling, config.output_len, config.top if needs_top else 0)

    return _by_temperature(config, client, len(prompts), answer)


def _answer_tasks(
    config: QualityConfig, client: RequestClient, tasks: Sequence[Task]
) -> dict[float, tuple[Generation, ...]]:
    def answer(temperature: float, index: int) -> Generation:
        sampling = config.sampling(temperature, index, ignore_eos=False)
        return generate(client, tasks[index].input_ids, sampling, tasks[index].new_tokens)

    return _by_temperature(config, client, len(tasks), answer)


def _by_temperature(
    config: QualityConfig, client: RequestClient, count: int, answer: Callable[[float, int], Generation]
) -> dict[float, tuple[Generation, ...]]:
    found = {}
    for place, temperature in enumerate(config.temperatures):
        if place == 0 or not config.keep_cache:
            client.flush_cache()
        answers = run_parallel(config.concurrency, range(count), lambda index: answer(temperature, index))
        failed = [f"request {index}: {each.error}" for index, each in enumerate(answers) if each.error]
        if failed:
            raise CommandError(f"at temperature {temperature:g} {len(failed)} of {count} requests failed; {failed[0]}")
        found[temperature] = answers
    return found
