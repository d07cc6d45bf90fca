"""Time, bytes and error of one layer's attention, by how KV is kept; no server and no model.

On a GPU *full* is FlashInfer's attention in bfloat16, and *fp8* its attention over KV as stock SGLang has it with
--kv-cache-dtype fp8_e4m3. *Fused* reads KIVI's blocks; *dequantized, then full* makes them whole first, as CacheGen and KVQuant do;
*hack* multiplies codes as integers, on an NVIDIA GPU by a kernel in Gluon where that takes the blocks; *Triton* is the one for all
others: with SE off it adds up codes in each step, with RQE off it quantizes the newest tokens' values in each step. On a CPU *full* is
PyTorch's attention in float32, and arms that exist as kernels alone are left out. A step is of one token of each request, a prefill
of a prompt of which nothing is known. Bytes are those that must be read and written of KV, and *bandwidth* their share of what a copy
moves on the same device. *Error* is that of the computation, against float64 with the numbers that codes mean; *loss* is the error
against full KV in float64. Both are shares of the greatest output, of the first request, or of the prompt's newest tokens. Times are
medians of calls that find nothing in the device's cache.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from sglang_ext.bench import BenchError, report
from sglang_ext.bench.attention import arms, prefill, timing
from sglang_ext.bench.attention.setting import Full, Shape, off_by
from sglang_ext.bench.options import check_counts, numbers
from sglang_ext.mem_cache.compressors import catalogue

# Of a context: copies hold some in blocks.
FEWEST_TOKENS = 256
# By device: contexts, batches, prompts.
DEFAULTS = {"cuda": ("8192,32768", "8,16", "16384"), "cpu": ("1024", "2", "512")}
DIMS = (64, 128)


@dataclass(frozen=True)
class Row:
    """What was measured of one arm.

    Attributes:
        kind: step or prefill.
        batch, context, bits, partition: of what.
        arm: its name.
        seconds: of a call.
        bytes: of KV, read and written.
        bandwidth: share of the device's.
        error, loss: as the module says.
        speed: against full KV.
    """

    kind: str
    batch: int
    context: int
    bits: int
    partition: int
    arm: str
    seconds: float
    bytes: int
    bandwidth: float
    error: float
    loss: float
    speed: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line; the default shape is that of Llama-3.1-8B."""
    add = parser.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contexts, batch, prompts = DEFAULTS[device]
    add("--device", choices=list(DEFAULTS), default=device, help="where (default here: %(default)s)")
    add("--contexts", default=contexts, help="tokens of each request in a step, separated by commas (default here: %(default)s)")
    add("--batch", default=batch, help="requests of a step, separated by commas (default here: %(default)s)")
    add("--prefill", default=prompts, help="tokens of prompts, separated by commas; 0 for none (default here: %(default)s)")
    add("--bits", type=int, default=4, choices=catalogue.allowed_bits(arms.HACK), help="of codes (default: %(default)s)")
    sizes = ", ".join(map(str, catalogue.allowed_partitions(arms.HACK)))
    add("--partition", default="64", help=f"numbers that share a scale in hack: of {sizes}, separated by commas (default: %(default)s)")
    add("--heads", type=int, default=32, help="of queries (default: %(default)s)")
    add("--kv-heads", type=int, default=8, help="of keys and values (default: %(default)s)")
    add("--head-dim", type=int, default=128, choices=DIMS, help="channels of a head (default: %(default)s)")
    add("--json", type=Path, help="write all figures here")


def run(args: argparse.Namespace) -> int:
    """Measure and print a table of each setting; 0 when all could run."""
    shape = shape_of(args)
    counts_of(args)
    bandwidth = timing.bandwidth(shape.device)
    console, rows = report.make_console(), []
    name = torch.cuda.get_device_name() if shape.device.type == "cuda" else "CPU"
    heads = f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.dim} channels"
    console.print(f"{name}: a copy moves {bandwidth / 1e9:.0f} GB/s; {heads}")
    for found in measured(args, shape, bandwidth):
        rows.extend(found)
        console.print(table(found))
    if args.json:
        more = {"device": name, "bandwidth": bandwidth, "results": [asdict(row) for row in rows]}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **more})
    return 0


def shape_of(args: argparse.Namespace) -> Shape:
    """Of the options.

    Raises:
        BenchError: there is no such device, or heads do not fit.
    """
    check_counts({"--heads": args.heads, "--kv-heads": args.kv_heads})
    if args.heads % args.kv_heads:
        raise BenchError(f"--heads {args.heads} with --kv-heads {args.kv_heads}: pass a multiple of the KV heads")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: this machine has no GPU that PyTorch finds; pass --device cpu")
    return Shape(args.heads, args.kv_heads, args.head_dim, torch.device(args.device))


def partitions_of(args: argparse.Namespace) -> list[int]:
    """Sizes of partitions.

    Raises:
        BenchError: one is not allowed, or longer than a head.
    """
    found, allowed = numbers(args.partition, "--partition"), catalogue.allowed_partitions(arms.HACK)
    if wrong := [each for each in found if each not in allowed or args.head_dim % each]:
        raise BenchError(
            f"--partition {wrong[0]} with --head-dim {args.head_dim}: pass some of {', '.join(map(str, allowed))} that divide a head"
        )
    return found


def counts_of(args: argparse.Namespace) -> tuple[list[int], list[int], list[int], list[int]]:
    """Contexts, batches, prompts and partitions.

    Raises:
        BenchError: an option is out of range.
    """
    contexts, batches = numbers(args.contexts, "--contexts"), numbers(args.batch, "--batch")
    prompts = [each for each in numbers(args.prefill, "--prefill", zero=True) if each]
    for flag, counts in (("--contexts", contexts), ("--prefill", prompts)):
        if counts and min(counts) < FEWEST_TOKENS:
            raise BenchError(f"{flag} {min(counts)}: pass at least {FEWEST_TOKENS}, of which copies hold some in blocks")
    return contexts, batches, prompts, partitions_of(args)


def measured(args: argparse.Namespace, shape: Shape, bandwidth: float) -> Iterator[list[Row]]:
    """Each setting's rows.

    Raises:
        BenchError: an option is out of range.
    """
    contexts, batches, prompts, partitions = counts_of(args)
    for partition in partitions:
        for context in contexts:
            for batch in batches:
                setting = "step", batch, context, args.bits, partition
                yield list(_rows(arms.steps(Full.of(shape, batch, context), args.bits, partition), setting, bandwidth, newest=False))
        for tokens in prompts:
            setting = "prefill", 1, tokens, args.bits, partition
            yield list(_rows(prefill.prefills(Full.of(shape, 1, tokens), args.bits, partition), setting, bandwidth, newest=True))


def _rows(found: Iterable[arms.Arm], setting: tuple[str, int, int, int, int], bandwidth: float, newest: bool) -> Iterator[Row]:
    """``newest``: outputs of the last tokens are compared, not those of the first request."""
    full, whole = 0.0, None
    for arm in found:
        outputs, expected = arm.run(), arm.expected().double()
        outputs = outputs[-len(expected) :] if newest else outputs[: len(expected)]
        whole = expected if whole is None else whole
        error, loss = off_by(outputs, expected), off_by(outputs, whole[-len(expected) :])
        del outputs, expected
        seconds = timing.seconds(arm.run, whole.device)
        full = full or seconds
        share = arm.bytes / seconds / bandwidth
        yield Row(*setting, arm.name, seconds, arm.bytes, share, error, loss, full / seconds)


def table(rows: list[Row]) -> Table:
    """Of one setting."""
    row = rows[0]
    what = f"{row.batch} requests of {row.context} tokens" if row.kind == "step" else f"a prompt of {row.context} tokens"
    made = Table(title=f"{row.kind.capitalize()}: {what}, {row.bits} bits, partitions of {row.partition}")
    made.add_column("arm")
    for column in ("ms", "MB", "bandwidth", "error", "loss", "speed"):
        made.add_column(column, justify="right")
    for row in rows:
        figures = f"{row.seconds * 1e3:.3f}", f"{row.bytes / 1e6:.1f}", f"{row.bandwidth:.0%}", f"{row.error:.1e}", f"{row.loss:.1e}"
        made.add_row(row.arm, *figures, f"{row.speed:.2f}")
    return made
