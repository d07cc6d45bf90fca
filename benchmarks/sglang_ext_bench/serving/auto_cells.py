"""Compares `--kv-draft-length auto` with fixed draft lengths and with stock SGLang, over contexts and batch sizes.

    sglang-ext-bench auto-cells --model MODEL --prompt-file TEXT --json cells.json [--arms stock,auto,3,7,15,31]

Each arm is one server that measures all cells. A cell is a prompt length and a batch size. Every wave of a cell has prompts of its own, which are
put into the prefix cache before it. Arms that `--json` already holds are not measured again, so an interrupted run can be continued.

The table shows ms per token of a request and, for `auto`, the speed relative to stock and to the best fixed length. These ratios are given for
the first wave of a cell, in which the server may have to measure, and for the last one. They leave out each request's first round.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext_bench import report
from sglang_ext_bench.client import SamplingSettings
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.options import DTYPES, numbers
from sglang_ext_bench.speed import decode_wave
from sglang_ext_bench.prompts import Waves, make_prompts
from sglang_ext_bench.client import readings

STOCK, AUTO = "stock", "auto"
# What must be equal for an arm in --json to be used again.
SETTINGS = ("model", "prompt_file", "compressor", "budget", "context_len", "batch", "output_len", "repeats", "dtype", "server_arg")
# Requests that are put into the prefix cache at once.
CACHED_TOGETHER = 4


@dataclass(frozen=True)
class Cell:
    """The waves of one arm at one prompt length and batch size.

    Attributes:
        context: tokens of each prompt.
        batch: requests that decode together.
        token_ms: milliseconds per token of a request, of each wave, from the moment when all requests decode.
        steady_ms: the same without each request's first round.
        accept_length: mean tokens per verification, of each wave; None where nothing was verified.
        fallbacks: requests of each wave whose last round read the full KV.
        gauges: what the server's `sglang_ext:` metrics say after the last wave, by name and labels.
    """

    context: int
    batch: int
    token_ms: list[float]
    steady_ms: list[float]
    accept_length: list[float | None]
    fallbacks: list[int]
    gauges: dict[str, float]


def main() -> None:
    """Measure the arms that --json lacks, and print the table."""
    args = parse()
    contexts, batches = numbers(args.context_len, "--context-len"), numbers(args.batch, "--batch")
    waves = Waves(batches, args.repeats, fresh=True)
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    arms = stored(args.json, settings)
    asked = args.arms.split(",")
    prompts = make_prompts(args, waves.prompts, contexts) if set(asked) - set(arms) else {}
    for arm in asked:
        if arm in arms:
            print(f"{arm}: in {args.json}", flush=True)
            continue
        begun = time.perf_counter()
        arms[arm] = [vars(cell) for cell in measure(args, arm, prompts, waves)]
        print(f"{arm}: {time.perf_counter() - begun:.0f} s", flush=True)
        report.write_json(args.json, {"settings": settings, **report.origin(), "arms": arms})
    report.make_console().print(table({name: arms[name] for name in asked}, contexts, batches))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--prompt-file", type=Path, required=True, help="text that prompts are taken from")
    add("--json", type=Path, required=True, help="results; arms that it holds are not measured again")
    add("--arms", default="stock,auto,3,7,15,31", help="stock, auto or draft lengths, separated by commas")
    add("--compressor", default="snapkv")
    add("--budget", default="0.125", help="share of the KV that is kept; empty for methods that keep all")
    add("--context-len", default="1000,4000,30000", help="tokens of a prompt, separated by commas")
    add("--batch", default="1,4,16", help="requests at once, separated by commas")
    add("--output-len", type=int, default=256, help="output tokens of each request")
    add("--repeats", type=int, default=2, help="waves of each cell")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--logs", type=Path, help="folder for the servers' logs")
    return parser.parse_args()


def stored(path: Path, settings: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The arms that a file of results holds; none where there is no file.

    Raises:
        SystemExit: the file was measured with other settings.
    """
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    other = {name for name in SETTINGS if found["settings"].get(name) != settings[name]}
    if other:
        raise SystemExit(f"--json {path} was measured with other {', '.join(sorted(other))}: pass another file")
    return found["arms"]


def measure(args: argparse.Namespace, arm: str, prompts: Mapping[int, Sequence[tuple[int, ...]]], waves: Waves) -> Iterator[Cell]:
    """Start the server of an arm and measure its cells."""
    largest = max(waves.batches)
    flags = ["--dtype", args.dtype, "--enable-metrics", "--max-running-requests", str(largest), "--cuda-graph-max-bs", str(largest)]
    if arm != STOCK:
        flags += ["--kv-mode", "verified", "--kv-compressor", args.compressor, "--kv-draft-length", arm]
        flags += ["--kv-budget", args.budget] if args.budget else []
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with ServerProcess(str(args.model), (*flags, *words(args.server_arg)), logs / f"{arm}.log") as server:
            for context, of_length in prompts.items():
                for batch in waves.batches:
                    cell = measure_cell(server, context, batch, [of_length[where] for where in waves.of(batch)], args.output_len)
                    print(f"{arm:>6} {context:6} x {batch:2}: {line(cell)}", flush=True)
                    yield cell


def measure_cell(server: ServerProcess, context: int, batch: int, prompts: Sequence[Sequence[tuple[int, ...]]], output_len: int) -> Cell:
    """Decode each wave's prompts, which are put into the prefix cache first."""
    sampling, measured = SamplingSettings(), []
    for of_wave in prompts:
        for first in range(0, len(of_wave), CACHED_TOGETHER):
            decode_wave.run(server, of_wave[first : first + CACHED_TOGETHER], sampling, 1)
        measured.append(decode_wave.measure(decode_wave.run(server, of_wave, sampling, output_len)))
    page = server.request("metrics")
    names = {row.partition("{")[0] for row in page.splitlines() if row.startswith("sglang_ext:")}
    names = {name for name in names if not name.endswith(("_bucket", "_created"))}
    return Cell(
        context=context,
        batch=batch,
        token_ms=[wave.token_ms for wave in measured],
        steady_ms=[1000 * wave.running / wave.steady if wave.steady else wave.token_ms for wave in measured],
        accept_length=[wave.accept_length for wave in measured],
        fallbacks=[wave.fallbacks for wave in measured],
        gauges={f"{name}{{{labels}}}": value for name in sorted(names) for labels, value in readings(page, name)},
    )


def line(cell: Cell) -> str:
    """A cell as one line of text."""
    lengths = " ".join("-" if each is None else f"{each:.2f}" for each in cell.accept_length)
    parts = f"{' '.join(f'{ms:.2f}' for ms in cell.token_ms)} ms/token, steady {' '.join(f'{ms:.2f}' for ms in cell.steady_ms)}"
    return f"{parts}, accept length {lengths}, {sum(cell.fallbacks)} requests ended on full KV"


def table(arms: Mapping[str, Sequence[Mapping[str, Any]]], contexts: Sequence[int], batches: Sequence[int]) -> Table:
    """Milliseconds per token of the last wave by cell and arm, and the ratios of `auto`."""
    fixed = [arm for arm in arms if arm not in (STOCK, AUTO)]
    ratios = [arm for arm in (STOCK, "best fixed") if AUTO in arms and (arm in arms or (fixed and arm == "best fixed"))]
    found = Table(title="ms per token, last wave; speed of auto relative to others, first and last wave")
    for name in ("context", "batch", *arms, *(f"auto / {name}" for name in ratios)):
        found.add_column(name, justify="right")
    for at, (context, batch) in enumerate((context, batch) for context in contexts for batch in batches):
        ms = {arm: cells[at]["steady_ms"] for arm, cells in arms.items()}
        row = [str(context), str(batch), *(f"{values[-1]:.2f}" for values in ms.values())]
        for other in ratios:
            base = [ms[STOCK]] if other == STOCK else [ms[arm] for arm in fixed]
            # A fixed length has nothing to find out: all its waves tell the same.
            best = min(sum(values) / len(values) for values in base)
            row.append(f"{best / ms[AUTO][0]:.2f} {best / ms[AUTO][-1]:.2f}")
        found.add_row(*row)
    return found


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        raise SystemExit(f"error: {error}") from error
