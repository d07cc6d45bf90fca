"""What a compressed KV cache costs in quality, and that verified decoding costs nothing.

Starts one server at a time on the loopback interface: for each compressor and budget a lossy one and a verified one for
each draft length, and stock SGLang last, which also scores what the others answered. --parts chooses what is measured:

acceptance   drafts that full KV accepts over those it was offered, by draft length
kl           KL divergence of the next-token distribution from full KV's at the same prefix, by step
divergence   the first token in which answers differ from full KV's, greedy and with equal seeds
functional   tasks with right and wrong answers: a fact in a long text, repetition, JSON, Python; and --benchmark
speed        tokens per second from cached prompts, over stock's in the same run
attention    relative error of attention outputs, by layer, in this process

--suite scores tasks of RULER's kind and GSM8K in their place, on lossy servers against stock, and reports the methods within two
points of full KV (docs/results/quality.md).

Ends with code 1 if a server could not be measured, or if a verified server's KL divergence is above the noise of stock
against itself.
"""

import argparse
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext.tools.options import seconds
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.options import DTYPES, names, numbers
from sglang_ext_bench.quality.config import (
    MODES,
    PARTS,
    TAILS,
    BenchmarkFile,
    QualityConfig,
)
from sglang_ext_bench.quality.scorers import BY_NAME
from sglang_ext_bench.quality.suites.options import add_suite_arguments, check_read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``quality``."""
    add = parser.add_argument
    add("--model", required=True, help="model folder or name")
    add("--prompts", type=Path, help="folder of .txt files, or JSON lines (text / messages)")
    add("--parts", default=",".join(PARTS), help="what to measure, separated by commas (default: %(default)s)")
    add(
        "--compressor",
        default="snapkv",
        help="names, separated by commas; kivi:2 is kivi with 2 bits; flags may follow: 'hack:2 --kv-partition 32'",
    )
    add("--modes", default=",".join(MODES), help="of servers beside stock's, separated by commas (default: %(default)s)")
    add(
        "--tail",
        default=TAILS[0],
        help="values that fill no partition, in part attention, separated by commas: exact, as served between two packs; filled, codes "
        "where they fill one; requantized, all in codes, each step anew (default: %(default)s)",
    )
    add("--budget", default="0.5,0.25,0.125", help="shares of the KV cache kept, separated by commas")
    add(
        "--draft-length",
        default="4,8,16,32",
        help="of verified servers, separated by commas; parts other than acceptance use the first (default: %(default)s)",
    )
    add("--temperature", default="0,0.7", help="separated by commas; 0 is greedy (default: %(default)s)")
    add("--seed", type=int, default=1, help="sampling seed of the first request; others count up")
    add("--output-len", type=int, default=64, help="tokens to generate for each prompt")
    add("--top-logprobs", type=int, default=64, help="best tokens at each step that a KL divergence tells apart")
    add("--tasks", type=int, default=4, help="functional tasks of each kind; 0 for --benchmark alone")
    add("--task-tokens", type=int, default=1024, help="tokens of real text in each functional task")
    _add_benchmark(parser)
    add_suite_arguments(parser)
    add("--concurrency", type=int, default=4, help="requests in flight")
    add(
        "--keep-cache",
        action="store_true",
        help="leave prefix caches as they are from one temperature to the next: faster, and alike in all arms",
    )
    add("--dtype", default="float32", choices=DTYPES)
    add("--server-arg", action="append", default=[], metavar="'--name value'", help="for all servers, repeatable")
    add(
        "--kv-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='for lossy and verified servers, repeatable: --kv-arg="--kv-head-budgets equal"',
    )
    add("--limit", type=int, help="use the first prompts, and the benchmark's first lines, only")
    add("--port", type=int, default=0, help="default: any free one")
    add("--start-timeout", type=seconds, default=300.0, metavar="SECONDS")
    add("--request-timeout", type=float, default=1800.0, metavar="SECONDS")
    add("--logs", type=Path, help="folder that keeps the servers' logs")
    add("--json", type=Path, help="write the report")
    add("--plot", type=Path, help="write a PNG of quality against bytes, and against speed")


def _add_benchmark(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--benchmark", type=Path, help="JSON lines with prompts and expected answers, scored beside the functional tasks")
    add("--prompt-field", default="question", help="of the benchmark; a.b is field b of field a (default: %(default)s)")
    add("--answer-field", default="answer", help="of the benchmark, likewise (default: %(default)s)")
    add("--scored-by", choices=tuple(BY_NAME), default="contains", help="how its answers are scored (default: %(default)s)")
    add("--benchmark-tokens", type=int, default=512, help="longest answer to it, in tokens")
    add("--raw-prompt", action="store_true", help="send its prompts as they are, without the model's chat template")


def defaults() -> argparse.Namespace:
    """The values of options that were not given; None of required ones."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(["--model", ""])


def run(args: argparse.Namespace) -> int:
    """Run the parts, or with ``--suite`` its tasks. Their modules load PyTorch and SGLang."""
    check_read(args, defaults())
    if args.suite is None:
        from sglang_ext_bench.quality.command import run
    else:
        from sglang_ext_bench.quality.suites.command import run_suites as run
    return run(args)


def config_from(args: argparse.Namespace) -> QualityConfig:
    """Check parsed options.

    Raises:
        CommandError: an option's value is out of range.
    """
    return QualityConfig(
        model=args.model,
        parts=tuple(part for part in PARTS if part in names(args.parts)) + _unknown(args.parts),
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
        tails=names(args.tail),  # type: ignore[arg-type]  # checked there
        keep_cache=args.keep_cache,
        dtype=args.dtype,
        server_args=words(args.server_arg),
        kv_args=words(args.kv_arg),
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


def _unknown(parts: str) -> tuple[str, ...]:
    return tuple(part for part in names(parts) if part not in PARTS)
