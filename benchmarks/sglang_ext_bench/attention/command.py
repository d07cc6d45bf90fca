"""Runs ``sglang-ext-bench attention``: measures each variant in each setting, and writes tables and JSON."""

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
from sglang_ext_bench.attention.setting import AttentionShape, FullKV, relative_error
from sglang_ext_bench.options import check_counts, numbers

__all__ = ["add_arguments", "run"]

MIN_TOKENS = 256
"""Shortest context or prompt. Shorter ones have no tokens in blocks."""


@dataclass(frozen=True)
class AttentionRow:
    """The measurement of one variant in one setting.

    Attributes:
        kind: ``step`` or ``prefill``.
        batch: Requests.
        context: Tokens of each request.
        bits: Bits of codes.
        partition: Numbers with a common scale in HACK.
        arm: Name of the variant.
        seconds: Time of a call.
        bytes: Bytes of KV that a call reads and writes.
        bandwidth: Their share of the device's bandwidth.
        error: Error against float64 with the same numbers, as a share of the largest output.
        loss: Error against full KV in float64, as a share of the largest output.
        speed: Time of full KV over the time of this variant.
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
    """Measure all settings, and print a table of each one. Returns 0."""
    set_defaults(args)
    shape = attention_shape(args)
    read_counts(args)
    bandwidth = timing.bandwidth(shape.device)
    console, rows = report.make_console(), []
    name = torch.cuda.get_device_name() if shape.device.type == "cuda" else "CPU"
    heads = f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.dim} channels"
    console.print(f"{name}: a copy reads and writes {bandwidth / 1e9:.0f} GB/s; {heads}")
    for found in measured(args, shape, bandwidth):
        rows.extend(found)
        console.print(table(found))
    if args.json:
        more = {"device": name, "bandwidth": bandwidth, "results": [asdict(row) for row in rows]}
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), **more})
    return 0


def set_defaults(args: argparse.Namespace) -> None:
    """Set the device, contexts, batches and prompts that the command line does not set, and check the bits.

    Raises:
        CommandError: HACK has no codes with these bits.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, default in zip(("contexts", "batch", "prefill"), DEFAULTS[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.bits not in (allowed := catalogue.QUANTIZERS[arms.HACK].bits):
        raise CommandError(f"--bits {args.bits}: pass {' or '.join(map(str, allowed))}")


def attention_shape(args: argparse.Namespace) -> AttentionShape:
    """The shape that the options describe.

    Raises:
        CommandError: The device does not exist, or the number of heads is not a multiple of the KV heads.
    """
    check_counts({"--heads": args.heads, "--kv-heads": args.kv_heads})
    if args.heads % args.kv_heads:
        raise CommandError(f"--heads {args.heads} with --kv-heads {args.kv_heads}: pass a multiple of the KV heads")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: this machine has no GPU that PyTorch finds; pass --device cpu")
    return AttentionShape(args.heads, args.kv_heads, args.head_dim, torch.device(args.device))


def read_partitions(args: argparse.Namespace) -> list[int]:
    """Parse --partition.

    Raises:
        CommandError: A partition is not allowed, or does not divide a head.
    """
    found, allowed = numbers(args.partition, "--partition"), catalogue.QUANTIZERS[arms.HACK].partitions
    if wrong := [each for each in found if each not in allowed or args.head_dim % each]:
        raise CommandError(
            f"--partition {wrong[0]} with --head-dim {args.head_dim}: pass some of {', '.join(map(str, allowed))} that divide a head"
        )
    return found


def read_counts(args: argparse.Namespace) -> tuple[list[int], list[int], list[int], list[int]]:
    """Parse contexts, batches, prompts and partitions.

    Raises:
        CommandError: A value is out of range.
    """
    contexts, batches = numbers(args.contexts, "--contexts"), numbers(args.batch, "--batch")
    prompts = [each for each in numbers(args.prefill, "--prefill", zero=True) if each]
    for flag, counts in (("--contexts", contexts), ("--prefill", prompts)):
        if counts and min(counts) < MIN_TOKENS:
            raise CommandError(f"{flag} {min(counts)}: pass at least {MIN_TOKENS}, because shorter contexts have no tokens in blocks")
    return contexts, batches, prompts, read_partitions(args)


def measured(args: argparse.Namespace, shape: AttentionShape, bandwidth: float) -> Iterator[list[AttentionRow]]:
    """Measure all variants. Yields the rows of each setting.

    Args:
        args: The options.
        shape: Shape of the layer.
        bandwidth: Bandwidth of the device in bytes per second.

    Raises:
        CommandError: A value is out of range.
    """
    contexts, batches, prompts, partitions = read_counts(args)
    for partition in partitions:
        for context in contexts:
            for batch in batches:
                setting = "step", batch, context, args.bits, partition
                yield list(_rows(arms.steps(FullKV.of(shape, batch, context), args.bits, partition), setting, bandwidth, newest=False))
        for tokens in prompts:
            setting = "prefill", 1, tokens, args.bits, partition
            yield list(_rows(prefill.prefills(FullKV.of(shape, 1, tokens), args.bits, partition), setting, bandwidth, newest=True))


def _rows(
    variants: Iterable[arms.AttentionVariant], setting: tuple[str, int, int, int, int], bandwidth: float, newest: bool
) -> Iterator[AttentionRow]:
    """Measure the variants of one setting.

    Args:
        variants: The variants. The first one is full KV.
        setting: Kind, batch, context, bits and partition of the rows.
        bandwidth: Bandwidth of the device in bytes per second.
        newest: Compare the outputs of the newest tokens. Otherwise those of the first request are compared.
    """
    full_seconds, full_outputs = 0.0, None
    for variant in variants:
        outputs, expected = variant.run(), variant.expected().double()
        outputs = outputs[-len(expected) :] if newest else outputs[: len(expected)]
        full_outputs = expected if full_outputs is None else full_outputs
        error, loss = relative_error(outputs, expected), relative_error(outputs, full_outputs[-len(expected) :])
        del outputs, expected
        seconds = timing.seconds(variant.run, full_outputs.device)
        full_seconds = full_seconds or seconds
        share = variant.bytes / seconds / bandwidth
        yield AttentionRow(*setting, variant.name, seconds, variant.bytes, share, error, loss, full_seconds / seconds)


def table(rows: list[AttentionRow]) -> Table:
    """Format the rows of one setting as a table."""
    first = rows[0]
    size = f"{first.batch} requests of {first.context} tokens" if first.kind == "step" else f"a prompt of {first.context} tokens"
    title = f"{first.kind.capitalize()}: {size}, {first.bits} bits, partitions of {first.partition}"
    cells = [
        (
            row.arm,
            f"{row.seconds * 1e3:.3f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.bandwidth:.0%}",
            f"{row.error:.1e}",
            f"{row.loss:.1e}",
            f"{row.speed:.2f}",
        )
        for row in rows
    ]
    return report.make_table(title, ("arm", "ms", "MB", "bandwidth", "error", "loss", "speed"), cells)
