"""Time the Lynx codec of KV pages on a CPU or a GPU, beside a plain copy of a page.

    sglang-ext-bench codec-speed --device cuda --layers 36 --tokens 64 1024 8192

A page holds the keys and values of all layers: 8 heads of 128 channels, normally distributed, bfloat16. The codec encodes a page as an
anchor and a residual. The command prints one row per page size and reference:

    tokens                                   tokens of a page
    reference                                what the residual restores: int8 (8-bit codes) or exact (the bits of the pool)
    encode, decode anchor, decode both, copy GB/s while kernels run; in parentheses, GB/s of the whole call
    ms                                       milliseconds of a whole call

Rates count the bytes read and written. Encoding for an exact residual reads the page twice. The copy is within the device.
"""

import argparse
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from sglang_ext.layers.kernels.lynx.codec import decode_page, encode_page
from sglang_ext.layers.kernels.lynx.layout import PageLayout
from sglang_ext_bench.kernels.options import (
    add_list,
    add_sizes,
    check_device,
    check_sizes,
)
from sglang_ext_bench.kernels.timing import wall_seconds
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.report import markdown_header, markdown_row

CHANNELS, SINKS, DTYPE, REPEATS = 1024, 4, torch.bfloat16, 7
# Tokens that are encoded in one measurement, so that small pages are not timed alone.
MEASURED_TOKENS = 512
SIZES = {"layers": (36, "layers of a page")}
CALLS = ("encode", "decode anchor", "decode both", "copy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add_sizes(parser, SIZES)
    add_list(parser, "--tokens", (64, 1024, 8192), "tokens of a page", type=int)


def run(args: argparse.Namespace) -> int:
    """Measure each page size and print its rows.

    Raises:
        CommandError: An option is out of range.
    """
    check_sizes(args, SIZES)
    check_counts({"--tokens": min(args.tokens)})
    check_device(args.device)
    print(markdown_header(["tokens", "reference", *(f"{call}, GB/s" for call in CALLS), *(f"{call}, ms" for call in CALLS)]))
    for tokens in args.tokens:
        pools = [torch.randn(tokens, CHANNELS, device=args.device).to(DTYPE) for _ in range(2 * args.layers)]
        for reference in ("int8", "exact"):
            layout = PageLayout(tokens, CHANNELS, DTYPE, sinks=min(SINKS, tokens), reference=reference)
            print(markdown_row([str(tokens), reference, *measure(pools, layout, args.device)]), flush=True)
    return 0


def measure(pools: list[torch.Tensor], layout: PageLayout, device: str) -> list[str]:
    """Return the rates and the milliseconds of :data:`CALLS`, as cells of a row.

    Args:
        pools: Keys and values of each layer, [tokens, channels].
        layout: Layout of the page.
        device: ``cpu`` or ``cuda``.
    """
    slots = torch.randperm(layout.tokens, device=device)
    streams = encode_page(pools, layout, slots)
    anchors, residuals = [each.anchor for each in streams], [each.residual for each in streams]
    anchor_bytes, residual_bytes = (sum(each.nbytes for each in part) for part in (anchors, residuals))
    page_bytes = sum(pool.nbytes for pool in pools)
    outputs = [torch.empty_like(pool) for pool in pools]
    source = torch.empty(page_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    encoded_bytes = page_bytes * (2 if layout.reference == "exact" else 1)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "encode": (encoded_bytes + anchor_bytes + residual_bytes, lambda: encode_page(pools, layout, slots)),
        "decode anchor": (page_bytes + anchor_bytes, lambda: decode_page(anchors, None, layout, outputs, slots)),
        "decode both": (page_bytes + anchor_bytes + residual_bytes, lambda: decode_page(anchors, residuals, layout, outputs, slots)),
        "copy": (2 * page_bytes, lambda: target.copy_(source)),
    }
    rates, times = [], []
    for name in CALLS:
        moved, call = work[name]
        seconds = call_seconds(call, device, max(1, MEASURED_TOKENS // layout.tokens))
        in_kernels = kernel_seconds(call, max(1, MEASURED_TOKENS // layout.tokens)) if device == "cuda" and name != "copy" else seconds
        rates.append(f"{moved / in_kernels / 1e9:.1f} ({moved / seconds / 1e9:.1f})" if name != "copy" else f"{moved / seconds / 1e9:.1f}")
        times.append(f"{1e3 * seconds:.3f}")
    work["decode both"][1]()
    for pool, output in zip(pools, outputs):
        assert layout.reference == "int8" or pool[slots].equal(output[slots]), "exact residuals restore the pool's bits"
    return [*rates, *times]


def call_seconds(call: Callable[[], object], device: str, calls: int) -> float:
    """Return the seconds of one of ``calls`` calls that are launched together."""
    return wall_seconds(lambda: [call() for _ in range(calls)], device, REPEATS) / calls


def kernel_seconds(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call in which the GPU computes or copies."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profiled.key_averages()) / 1e6 / calls
