"""Measures what compressed KV costs in quality, and that verified decoding costs nothing.

The command starts one server at a time on the loopback interface. For each compressor and budget it starts a lossy server, and a
verified one for each draft length. Stock SGLang comes last, because it also scores the answers of the others. --parts selects the
measurements:

acceptance   acceptance rate of draft tokens, by draft length
kl           KL divergence of the next-token distribution from the full KV's at the same prefix, by step
divergence   the first token in which an answer differs from the full KV's, greedy and with equal seeds
functional   tasks with right and wrong answers: a fact in a long text, repetition, JSON, Python; and --benchmark
speed        tokens per second from cached prompts, relative to stock in the same run
attention    relative error of attention outputs, by layer, in this process

--suite replaces them: it scores tasks after RULER and GSM8K on lossy servers and on stock. It reports the methods within two points of
the full KV (docs/results/quality.md).

The exit code is 1 if a server could not be measured. It is also 1 if a verified server's KL divergence is above the noise of stock
against itself.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.options import DTYPES, add_start_timeout, check_budgets, check_counts, check_port, names, numbers
from sglang_ext_bench.quality.scorers import BY_NAME
from sglang_ext_bench.quality.suites.options import add_suite_arguments, check_unread

PARTS = ("acceptance", "kl", "divergence", "functional", "speed", "attention")
COMPARED_PARTS = ("kl", "divergence", "functional", "speed")
"""Parts that send the same requests to stock, lossy and verified servers."""
Tail = Literal["exact", "filled", "requantized"]
"""How part attention stores the values after the compressed tokens.

- exact: as a server stores them between two compressions.
- filled: quantized once they fill a partition (requantization elimination, RQE).
- requantized: all quantized, in each step again (without RQE).
"""
TAILS: tuple[Tail, ...] = get_args(Tail)
MODES = ("lossy", "verified")
"""Modes of the servers that are compared with stock."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``quality``."""
    add = parser.add_argument
    add("--model", required=True, help="model folder or name")
    add("--prompts", type=Path, help="folder of .txt files, or JSON lines (text / messages)")
    add("--parts", default=",".join(PARTS), help="what to measure, separated by commas (default: %(default)s)")
    add(
        "--compressor",
        default="snapkv",
        help="methods, separated by commas; kivi:2 is kivi with 2 bits; flags may follow: 'hack:2 --kv-partition 32' (default: %(default)s)",
    )
    add("--modes", default=",".join(MODES), help="modes of the servers beside stock, separated by commas (default: %(default)s)")
    add(
        "--tail",
        default=TAILS[0],
        help="how part attention stores values that fill no partition, separated by commas. exact: as served between two compressions; "
        "filled: quantized once they fill a partition; requantized: all quantized, in each step again (default: %(default)s)",
    )
    add("--budget", default="0.5,0.25,0.125", help="shares of the tokens to keep, separated by commas (default: %(default)s)")
    add(
        "--draft-length",
        default="4,8,16,32",
        help="draft lengths of verified servers, separated by commas; parts other than acceptance use the first (default: %(default)s)",
    )
    add("--temperature", default="0,0.7", help="temperatures, separated by commas; 0 is greedy (default: %(default)s)")
    add("--seed", type=int, default=1, help="sampling seed of the first request; each next request has the next seed (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens to generate for each prompt (default: %(default)s)")
    add("--top-logprobs", type=int, default=64, help="most probable tokens of each step that a KL divergence uses (default: %(default)s)")
    add("--tasks", type=int, default=4, help="functional tasks of each kind; 0: only --benchmark (default: %(default)s)")
    add("--task-tokens", type=int, default=1024, help="tokens of real text in each functional task (default: %(default)s)")
    _add_benchmark(parser)
    add_suite_arguments(parser)
    add("--concurrency", type=int, default=4, help="requests in flight (default: %(default)s)")
    add(
        "--keep-cache",
        action="store_true",
        help="do not empty prefix caches between two temperatures; this is faster, and the same for all servers",
    )
    add("--dtype", default="float32", choices=DTYPES, help="of weights and KV (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="'--name value'", help="flag of all servers, repeatable")
    add(
        "--kv-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='flag of lossy and verified servers, repeatable: --kv-arg="--kv-head-budgets equal"',
    )
    add("--limit", type=int, help="use only the first prompts, and the first lines of the benchmark")
    add("--port", type=int, default=0, help="port of the servers (default: any free one)")
    add_start_timeout(parser, 300.0)
    add("--request-timeout", type=float, default=1800.0, metavar="SECONDS", help="for one request (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs")
    add("--json", type=Path, help="write the report to this file")
    add("--plot", type=Path, help="write a PNG of quality against bytes and against speed")


def _add_benchmark(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--benchmark", type=Path, help="JSON lines with prompts and expected answers, scored beside the functional tasks")
    add("--prompt-field", default="question", help="field of the prompt; a.b is field b of field a (default: %(default)s)")
    add("--answer-field", default="answer", help="field of the expected answer (default: %(default)s)")
    add("--scored-by", choices=tuple(BY_NAME), default="contains", help="how its answers are scored (default: %(default)s)")
    add("--benchmark-tokens", type=int, default=512, help="most tokens of an answer to it (default: %(default)s)")
    add("--raw-prompt", action="store_true", help="send its prompts without the model's chat template")


def _defaults() -> argparse.Namespace:
    """The defaults of all options. Required options are empty."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(["--model", ""])


def run(args: argparse.Namespace) -> int:
    """Run the parts, or with ``--suite`` its tasks. Their modules load PyTorch and SGLang."""
    check_unread(args, _defaults())
    if args.suite is None:
        from sglang_ext_bench.quality.command import run
    else:
        from sglang_ext_bench.quality.suites.command import run_suites as run
    return run(args)


@dataclass(frozen=True)
class BenchmarkFile:
    """A user's benchmark.

    Attributes:
        path: File of JSON lines.
        prompt_field: Field of the prompt.
        answer_field: Field of the expected answer.
        scored_by: Name of the scorer, a key of :data:`~sglang_ext_bench.quality.scorers.BY_NAME`.
        new_tokens: Most tokens of an answer.
        chat: Prompts are formatted with the model's chat template.
    """

    path: Path
    prompt_field: str
    answer_field: str
    scored_by: str
    new_tokens: int
    chat: bool


@dataclass(frozen=True)
class QualityConfig:
    """The checked command line of ``quality``. Fields without a description have the meaning of the option of the same name.

    Attributes:
        prompts: None if no part needs prompts.
        draft_lengths: Draft lengths of verified servers. Parts other than acceptance use the first.
        top: Most probable tokens of each step, for KL divergences.
        tasks: Functional tasks of each kind. 0: only the benchmark.
        task_tokens: Tokens of real text in each functional task.
        benchmark: The user's tasks.
        modes: Modes of the servers that are compared with stock.
        tails: How part attention stores values that fill no partition.
        keep_cache: Prefix caches are not emptied between two temperatures.
    """

    model: str
    parts: tuple[str, ...]
    prompts: Path | None
    compressors: tuple[str, ...]
    budgets: tuple[float, ...]
    draft_lengths: tuple[int, ...] = (4, 8, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 1
    output_len: int = 64
    top: int = 64
    tasks: int = 4
    task_tokens: int = 1024
    benchmark: BenchmarkFile | None = None
    concurrency: int = 4
    modes: tuple[str, ...] = MODES
    tails: tuple[Tail, ...] = ("exact",)
    keep_cache: bool = False
    dtype: str = "float32"
    server_args: tuple[str, ...] = ()
    kv_args: tuple[str, ...] = ()
    limit: int | None = None
    port: int = 0
    start_timeout: float = 300.0
    request_timeout: float = 1800.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            CommandError: An option has an invalid value. The message has the option, its value and the allowed values.
        """
        from sglang_ext_bench.quality.named_method import NamedMethod

        for option, given, allowed in (("--parts", self.parts, PARTS), ("--modes", self.modes, MODES), ("--tail", self.tails, TAILS)):
            for each in given:
                if each not in allowed:
                    raise CommandError(f"{option} {each!r}: pass some of {', '.join(allowed)}, separated by commas")
        given_names = {"--parts": self.parts, "--compressor": self.compressors, "--modes": self.modes, "--tail": self.tails}
        for option, given in given_names.items():
            if not given:
                raise CommandError(f"{option} is empty; pass at least one name, separated by commas")
        for compressor in self.compressors:
            NamedMethod.parse(compressor)
        if "verified" not in self.modes and "acceptance" in self.parts:
            raise CommandError(f"--modes {','.join(self.modes)}: --parts acceptance needs verified servers; add verified, or leave it out")
        self._check_ranges()
        self._check_attention_flags()
        if self.prompts is None and self.parts != ("functional",):
            raise CommandError(f"--parts {','.join(self.parts)} needs --prompts; only functional does not")
        if "kl" in self.parts and 0 not in self.temperatures:
            raise CommandError("--parts kl compares distributions along greedy answers: add 0 to --temperature")

    def _check_ranges(self) -> None:
        counts = {"--output-len": self.output_len, "--top-logprobs": self.top}
        counts |= {"--task-tokens": self.task_tokens, "--concurrency": self.concurrency}
        counts |= {"--draft-length": min(self.draft_lengths), "--limit": 1 if self.limit is None else self.limit}
        check_counts(counts)
        check_budgets(self.budgets)
        check_port(self.port)
        if self.tasks < 1 and "functional" in self.parts and self.benchmark is None:
            raise CommandError(f"--tasks {self.tasks}: --parts functional needs at least 1, or a --benchmark")
        if min(self.temperatures) < 0:
            raise CommandError(f"--temperature {min(self.temperatures):g}: must be 0 (greedy) or above")

    def _check_attention_flags(self) -> None:
        given = {word.partition("=")[0] for word in (*self.server_args, *self.kv_args)}
        if "attention" in self.parts and (unread := given & {"--kv-bits", "--kv-partition"}):
            raise CommandError(
                f"{min(unread)} is a flag of servers, and --parts attention starts none: write it after the method, as in --compressor "
                "'hack:2 --kv-partition 32'"
            )

    def has_part(self, *parts: str) -> bool:
        """Whether at least one of ``parts`` is measured."""
        return any(part in self.parts for part in parts)

    @property
    def common_server_arguments(self) -> tuple[str, ...]:
        """Flags of all servers. SGLang supports seeds only in deterministic inference. Metrics report the bytes of compressed KV."""
        seeded = ("--enable-deterministic-inference",) if max(self.temperatures) > 0 else ()
        return ("--dtype", self.dtype, "--enable-metrics", *seeded, *self.server_args)

    def sampling(self, temperature: float, index: int, ignore_eos: bool) -> SamplingSettings:
        """Sampling settings of the ``index``-th request, the same for all servers."""
        return SamplingSettings(temperature, self.seed + index if temperature > 0 else None, ignore_eos)


def config_from(args: argparse.Namespace) -> QualityConfig:
    """Check the parsed options of the parts.

    Raises:
        CommandError: An option has an invalid value.
    """
    return QualityConfig(
        model=args.model,
        parts=tuple(part for part in PARTS if part in names(args.parts)) + _unknown_parts(args.parts),
        prompts=args.prompts,
        compressors=names(args.compressor),
        budgets=tuple(numbers(args.budget, "--budget", float)),
        draft_lengths=tuple(numbers(args.draft_length, "--draft-length")),
        temperatures=tuple(numbers(args.temperature, "--temperature", float, zero=True)),
        seed=args.seed,
        output_len=args.output_len,
        top=args.top_logprobs,
        tasks=args.tasks,
        task_tokens=args.task_tokens,
        benchmark=_benchmark(args),
        concurrency=args.concurrency,
        modes=names(args.modes),
        tails=names(args.tail),  # type: ignore[arg-type]  # QualityConfig checks the values
        keep_cache=args.keep_cache,
        dtype=args.dtype,
        server_args=split_flags(args.server_arg),
        kv_args=split_flags(args.kv_arg),
        limit=args.limit,
        port=args.port,
        start_timeout=args.start_timeout,
        request_timeout=args.request_timeout,
    )


def _benchmark(args: argparse.Namespace) -> BenchmarkFile | None:
    if args.benchmark is None:
        return None
    if args.benchmark_tokens < 1:
        raise CommandError(f"--benchmark-tokens {args.benchmark_tokens}: must be at least 1")
    fields = (args.prompt_field, args.answer_field, args.scored_by, args.benchmark_tokens)
    return BenchmarkFile(args.benchmark, *fields, chat=not args.raw_prompt)


def _unknown_parts(parts: str) -> tuple[str, ...]:
    return tuple(part for part in names(parts) if part not in PARTS)
