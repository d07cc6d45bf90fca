"""Compares `--kv-draft-length auto` with fixed draft lengths and with stock SGLang, over contexts and batch sizes.

    sglang-ext-bench auto-cells --model MODEL --prompt-file TEXT --json cells.json --arms stock,auto,3,7,15,31

Each arm is one server that measures all cells. A cell is a prompt length and a batch size. Every wave of a cell has its own prompts, which
are put into the prefix cache before it. Arms that --json already has are not measured again, so an interrupted run can be continued.

The table has milliseconds per token of a request in the last wave. For `auto` it has the speed relative to stock and to the best fixed
length, in the first wave of a cell and in the last one. In the first wave the server may have to measure. All these figures leave out each
request's first round. A `-` means that a request had fewer than two bursts of tokens after that: raise --output-len.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.client import SamplingSettings, readings
from sglang_ext_bench.options import DTYPES, check_budgets, check_counts, names, numbers
from sglang_ext_bench.prompts import Waves, make_prompts
from sglang_ext_bench.server import BenchServer

if TYPE_CHECKING:
    from rich.table import Table

STOCK, AUTO, BEST_FIXED = "stock", "auto", "best fixed"
SETTINGS = ("model", "prompt_file", "compressor", "budget", "context_len", "batch", "output_len", "repeats", "dtype", "server_arg")
"""Options that must be equal for an arm in --json to be used again."""
CACHED_AT_ONCE = 4
"""Requests that are sent at once to put their prompts into the prefix cache."""
UNKNOWN = "-"


@dataclass(frozen=True)
class Cell:
    """The waves of one arm at one prompt length and batch size.

    Attributes:
        context: Tokens of each prompt.
        batch: Requests that decode together.
        token_ms: Milliseconds per token of a request, of each wave, from the moment when all requests decode.
        steady_ms: The same without each request's first round. None if a request had fewer than two bursts of tokens.
        accept_length: Mean tokens per verification, of each wave. None if nothing was verified.
        fallbacks: Requests of each wave whose last round read the full KV.
        gauges: The server's `sglang_ext:` metrics after the last wave, by name and labels.
    """

    context: int
    batch: int
    token_ms: list[float]
    steady_ms: list[float | None]
    accept_length: list[float | None]
    fallbacks: list[int]
    gauges: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--prompt-file", type=Path, required=True, help="text that prompts are taken from")
    add("--json", type=Path, required=True, help="results; arms that it has are not measured again")
    add("--arms", default="stock,auto,3,7,15,31", help="stock, auto or draft lengths, separated by commas (default: %(default)s)")
    add("--compressor", default="snapkv", help="as --kv-compressor of a server (default: %(default)s)")
    add("--budget", default="0.125", help="share of the KV to keep; empty for methods that keep all tokens (default: %(default)s)")
    add("--context-len", default="1000,4000,30000", help="tokens of a prompt, separated by commas (default: %(default)s)")
    add("--batch", default="1,4,16", help="requests at once, separated by commas (default: %(default)s)")
    add("--output-len", type=int, default=256, help="output tokens of each request (default: %(default)s)")
    add("--repeats", type=int, default=2, help="waves of each cell (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")


def run(args: argparse.Namespace) -> int:
    """Measure the arms that --json lacks, and print the table. Returns 0."""
    contexts, batches = numbers(args.context_len, "--context-len"), numbers(args.batch, "--batch")
    arms = list(names(args.arms))
    check_options(args, arms)
    waves = Waves(batches, args.repeats, fresh=True)
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    stored = read_stored(args.json, settings)
    missing = [arm for arm in arms if arm not in stored]
    prompts = make_prompts(args, waves.prompts, contexts) if missing else {}
    for arm in arms:
        if arm in stored:
            print(f"{arm}: in {args.json}", flush=True)
            continue
        started = time.perf_counter()
        stored[arm] = [vars(cell) for cell in measure_arm(args, arm, prompts, waves)]
        print(f"{arm}: {time.perf_counter() - started:.0f} s", flush=True)
        report.write_json(args.json, {"settings": settings, **report.origin(), "arms": stored})
    report.make_console().print(make_table({arm: stored[arm] for arm in arms}, contexts, batches))
    return 0


def check_options(args: argparse.Namespace, arms: Sequence[str]) -> None:
    """Check options before a server starts.

    Raises:
        CommandError: With the option, its value and the allowed values.
    """
    check_counts({"--output-len": args.output_len, "--repeats": args.repeats})
    if args.budget:
        check_budgets(numbers(args.budget, "--budget", float))
    for arm in arms:
        if arm not in (STOCK, AUTO) and not (arm.isdigit() and int(arm)):
            raise CommandError(f"--arms {arm!r}: pass {STOCK}, {AUTO} or draft lengths above 0, separated by commas")
    if not arms:
        raise CommandError(f"--arms {args.arms!r}: pass {STOCK}, {AUTO} or draft lengths above 0, separated by commas")


def read_stored(path: Path, settings: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Read the arms of a file of results. Empty if there is no file.

    Raises:
        CommandError: The file cannot be read, or was measured with other settings.
    """
    if not path.exists():
        return {}
    found = report.read_json(path, "--json")
    stored_settings = found.get("settings", {})
    changed = sorted(name for name in SETTINGS if stored_settings.get(name) != settings[name])
    if changed:
        flags = ", ".join(f"--{name}" for name in changed).replace("_", "-")
        raise CommandError(f"--json {path} was measured with other values of {flags}: pass the same values, or another file")
    return found["arms"]


def measure_arm(args: argparse.Namespace, arm: str, prompts: Mapping[int, Sequence[tuple[int, ...]]], waves: Waves) -> Iterator[Cell]:
    """Start the server of an arm and measure its cells. Prints a line for each.

    Args:
        args: The options.
        arm: Stock, auto or a draft length.
        prompts: Token ids of the prompts of all waves, by length.
        waves: Assigns prompts to waves.
    """
    from sglang_ext_bench.speed.settings import log_folder

    largest = str(max(waves.batches))
    flags = ["--dtype", args.dtype, "--enable-metrics", "--max-running-requests", largest, "--cuda-graph-max-bs", largest]
    if arm != STOCK:
        flags += ["--kv-mode", "verified", "--kv-compressor", args.compressor, "--kv-draft-length", arm]
        flags += ["--kv-budget", args.budget] if args.budget else []
    with log_folder(args) as logs, BenchServer(str(args.model), (*flags, *split_flags(args.server_arg)), logs / f"{arm}.log") as server:
        for context, same_length in prompts.items():
            for batch in waves.batches:
                cell = measure_cell(server, context, [same_length[part] for part in waves.of(batch)], args.output_len)
                print(f"{arm:>6} {context:6} x {batch:2}: {describe(cell)}", flush=True)
                yield cell


def measure_cell(server: BenchServer, context: int, waves: Sequence[Sequence[tuple[int, ...]]], output_len: int) -> Cell:
    """Decode the prompts of each wave, which are put into the prefix cache first."""
    from sglang_ext_bench.speed import decode_wave

    sampling, measured = SamplingSettings(), []
    for wave in waves:
        for first in range(0, len(wave), CACHED_AT_ONCE):
            decode_wave.run(server, wave[first : first + CACHED_AT_ONCE], sampling, 1)
        measured.append(decode_wave.measure(decode_wave.run(server, wave, sampling, output_len)))
    return Cell(
        context=context,
        batch=len(waves[0]),
        token_ms=[wave.token_ms for wave in measured],
        steady_ms=[wave.steady_ms for wave in measured],
        accept_length=[wave.accept_length for wave in measured],
        fallbacks=[wave.fallbacks for wave in measured],
        gauges=read_gauges(server.request("metrics")),
    )


def read_gauges(page: str) -> dict[str, float]:
    """The plugin's metrics on a metrics page, by name and labels."""
    all_names = {row.partition("{")[0] for row in page.splitlines() if row.startswith("sglang_ext:")}
    shown = sorted(name for name in all_names if not name.endswith(("_bucket", "_created")))
    return {f"{name}{{{labels}}}": value for name in shown for labels, value in readings(page, name)}


def describe(cell: Cell) -> str:
    """A cell as one line of text."""
    times, steady, lengths = (
        " ".join(shown(value) for value in values) for values in (cell.token_ms, cell.steady_ms, cell.accept_length)
    )
    return f"{times} ms/token, steady {steady}, accept length {lengths}, {sum(cell.fallbacks)} requests ended on full KV"


def shown(value: float | None) -> str:
    """A figure with two decimals, or a mark if it is unknown."""
    return UNKNOWN if value is None else f"{value:.2f}"


def make_table(arms: Mapping[str, Sequence[Mapping[str, Any]]], contexts: Sequence[int], batches: Sequence[int]) -> "Table":
    """Milliseconds per token of the last wave by cell and arm, and the speed of `auto` relative to others.

    Args:
        arms: Fields of :class:`Cell` of each cell, by arm.
        contexts: Prompt lengths, in the order of the cells.
        batches: Batch sizes, in the order of the cells of a prompt length.
    """
    from rich.table import Table

    fixed = [arm for arm in arms if arm not in (STOCK, AUTO)]
    compared = [name for name, others in ((STOCK, [STOCK] if STOCK in arms else []), (BEST_FIXED, fixed)) if AUTO in arms and others]
    table = Table(title="ms per token, last wave; speed of auto relative to others, first and last wave")
    for name in ("context", "batch", *arms, *(f"{AUTO} / {name}" for name in compared)):
        table.add_column(name, justify="right")
    for index, (context, batch) in enumerate((context, batch) for context in contexts for batch in batches):
        ms = {arm: cells[index]["steady_ms"] for arm, cells in arms.items()}
        ratios = (relative_speeds(ms[AUTO], [ms[STOCK]] if name == STOCK else [ms[arm] for arm in fixed]) for name in compared)
        table.add_row(str(context), str(batch), *(shown(values[-1]) for values in ms.values()), *ratios)
    return table


def relative_speeds(auto_ms: Sequence[float | None], others_ms: Sequence[Sequence[float | None]]) -> str:
    """Speed of the first and of the last wave of `auto` over the fastest of the other arms in the same wave.

    Args:
        auto_ms: Milliseconds per token of each wave of `auto`.
        others_ms: The same of each other arm. The prompts of a wave are the same for all arms.
    """
    fastest = [UNKNOWN if None in times else min(times) for times in zip(*others_ms)]
    pairs = ((auto_ms[wave], fastest[wave]) for wave in (0, -1))
    return " ".join(UNKNOWN if ms is None or best == UNKNOWN else f"{best / ms:.2f}" for ms, best in pairs)
