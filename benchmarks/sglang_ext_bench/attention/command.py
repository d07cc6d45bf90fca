"""Runs ``python -m sglang_ext_bench attention``: times each arm in each setting and writes tables and JSON."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.attention import arms, prefill, timing
from sglang_ext_bench.attention.options import DEFAULTS, add_arguments
from sglang_ext_bench.attention.setting import Full, Shape, off_by
from sglang_ext_bench.options import check_counts, numbers

__all__ = ["add_arguments", "run"]

# Of a context: copies hold some in blocks.
FEWEST_TOKENS = 256


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


def run(args: argparse.Namespace) -> int:
    """Measure and print a table of each setting; 0 when all could run."""
    settle(args)
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


def settle(args: argparse.Namespace) -> None:
    """Set the device, and by it contexts, batches and prompts, where the command line left them open.

    Raises:
        CommandError: hack has no such codes.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, default in zip(("contexts", "batch", "prefill"), DEFAULTS[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.bits not in (allowed := catalogue.allowed_bits(arms.HACK)):
        raise CommandError(f"--bits {args.bits}: pass {' or '.join(map(str, allowed))}")


def shape_of(args: argparse.Namespace) -> Shape:
    """Of the options.

    Raises:
        CommandError: there is no such device, or heads do not fit.
    """
    check_counts({"--heads": args.heads, "--kv-heads": args.kv_heads})
    if args.heads % args.kv_heads:
        raise CommandError(f"--heads {args.heads} with --kv-heads {args.kv_heads}: pass a multiple of the KV heads")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: this machine has no GPU that PyTorch finds; pass --device cpu")
    return Shape(args.heads, args.kv_heads, args.head_dim, torch.device(args.device))


def partitions_of(args: argparse.Namespace) -> list[int]:
    """Sizes of partitions.

    Raises:
        CommandError: one is not allowed, or longer than a head.
    """
    found, allowed = numbers(args.partition, "--partition"), catalogue.allowed_partitions(arms.HACK)
    if wrong := [each for each in found if each not in allowed or args.head_dim % each]:
        raise CommandError(
            f"--partition {wrong[0]} with --head-dim {args.head_dim}: pass some of {', '.join(map(str, allowed))} that divide a head"
        )
    return found


def counts_of(args: argparse.Namespace) -> tuple[list[int], list[int], list[int], list[int]]:
    """Contexts, batches, prompts and partitions.

    Raises:
        CommandError: an option is out of range.
    """
    contexts, batches = numbers(args.contexts, "--contexts"), numbers(args.batch, "--batch")
    prompts = [each for each in numbers(args.prefill, "--prefill", zero=True) if each]
    for flag, counts in (("--contexts", contexts), ("--prefill", prompts)):
        if counts and min(counts) < FEWEST_TOKENS:
            raise CommandError(f"{flag} {min(counts)}: pass at least {FEWEST_TOKENS}, of which copies hold some in blocks")
    return contexts, batches, prompts, partitions_of(args)


def measured(args: argparse.Namespace, shape: Shape, bandwidth: float) -> Iterator[list[Row]]:
    """Each setting's rows.

    Raises:
        CommandError: an option is out of range.
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
