"""Time the prefill on quantized codes (HACK) of one layer on a GPU, by tile, beside FlashInfer's prefill in bfloat16.

    sglang-ext-bench prefill-tiles --tokens 16384 --forms 4:64 4:128 --tiles specialized 64,4,3 128,8,2

One request, 32 query heads, 8 KV heads of 128 channels. For each form of codes the command prints the milliseconds that quantizing the
prompt takes, and one line per tile:

    ms          milliseconds of the layer, including quantizing
    of FlashInfer's
                the same over the time of FlashInfer
    error       norm of the error of the last 16 outputs over the norm of the outputs in float64, over the same codes

With the tile `specialized` it times the warp-specialized kernels, which need a Hopper GPU.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial

import torch

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import gpu_launch
from sglang_ext.layers.kernels.packed import integer_prefill
from sglang_ext.layers.kernels.packed.integer_prefill import PrefillTile, attend, attend_to_codes
from sglang_ext.layers.kernels.packed.prompt_codes import PromptBatch, PromptCodes, prompt_codes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.tools import CommandError
from sglang_ext_bench.attention import prefill
from sglang_ext_bench.attention.setting import FullKV, AttentionShape
from sglang_ext_bench.attention.timing import seconds
from sglang_ext_bench.kernels.options import add_list, parse_group, positive_int, require_gpu
from sglang_ext_bench.options import check_counts

HACK, SPECIALIZED = "hack", "specialized"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the prompt (default: %(default)s)")
    add_list(parser, "--forms", ("4:64", "4:128", "2:64"), "bits of a code and numbers of a partition", metavar="BITS:PARTITION")
    tiles = (SPECIALIZED, "64,4,3", "64,4,2", "128,8,3", "128,8,2")
    add_list(parser, "--tiles", tiles, f"{SPECIALIZED}, or rows, warps and stages of a tile", metavar="TILE")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure FlashInfer, then each form of codes with each tile.

    Raises:
        CommandError: An option is out of range, or there is no GPU.
    """
    check_counts({"--tokens": args.tokens}, prefill.COMPARED)
    forms = [parse_group(text, "--forms", {"bits": positive_int, "partition": positive_int}, ":") for text in args.forms]
    allowed_bits, allowed_partitions = catalogue.QUANTIZERS[HACK].bits, catalogue.QUANTIZERS[HACK].partitions
    for bits, partition in forms:
        if bits not in allowed_bits or partition not in allowed_partitions:
            raise CommandError(f"--forms {bits}:{partition}: pass bits from {allowed_bits} and partitions from {allowed_partitions}")
    kinds = {"rows": positive_int, "warps": positive_int, "stages": positive_int}
    tiles = [None if text == SPECIALIZED else PrefillTile(*parse_group(text, "--tiles", kinds)) for text in args.tiles]
    require_gpu()
    shape = AttentionShape(32, 8, 128, torch.device("cuda"))
    full, queries = FullKV.of(shape, 1, args.tokens), shape.queries(args.tokens)
    stock = seconds(prefill._whole(full, queries), shape.device)
    print(f"{torch.cuda.get_device_name()}, {args.tokens} tokens: FlashInfer {stock * 1e3:.3f} ms", flush=True)
    for bits, partition in forms:
        measure_form(full, queries, bits, partition, tiles, stock)
    return 0


def measure_form(
    full: FullKV, queries: torch.Tensor, bits: int, partition: int, tiles: list[PrefillTile | None], stock: float
) -> None:
    """Print the time of quantizing, and one line per tile.

    Args:
        full: Exact keys and values of the request.
        queries: [tokens, heads, dim].
        bits: Bits of a code.
        partition: Numbers that share a scale.
        tiles: Tiles to time; None for the warp-specialized kernels.
        stock: Seconds of FlashInfer.
    """
    shape, pools, tokens = full.shape, (full.keys, full.values), len(queries)
    buffers = KVBuffers((0,), (shape.scaling,), *((pool[:1],) for pool in pools))
    packing = Packing.for_pool(catalogue.quantizer(HACK, bits, partition), buffers, 1)
    seeds = torch.arange(tokens, dtype=torch.int32, device=shape.device)
    prompts = PromptBatch(packing, full.slots.int(), [0], [0], [tokens], {0: seeds})
    codes = prompt_codes(prompts, *pools, 0, 0)
    quantizing = seconds(lambda: prompt_codes(prompts, *pools, 0, 0), shape.device)
    print(f"{bits} bits, P {partition}: quantizing {quantizing * 1e3:.3f} ms", flush=True)
    in_blocks = prefill.prefix(packing, tokens)
    compared = queries[-min(prefill.COMPARED, tokens - packing.sinks - in_blocks) :]
    exact = prefill.exactly(compared, *prefill._meaning(full, packing, seeds, in_blocks), shape.scaling).double()
    for tile in tiles:
        name = SPECIALIZED if tile is None else str(astuple(tile))
        if tile is None and not integer_prefill.is_supported(prompts, queries, pools[0]):
            print(f"  {name}: does not support this GPU or these codes", flush=True)
            continue
        call = partial(attend, prompts, codes, queries, *pools, shape.scaling, kernel=SPECIALIZED if tile is None else "tiles")
        try:
            with only_tile(tile):
                error = float((call()[-len(compared) :].double() - exact).norm() / exact.norm())
                took = seconds(call, shape.device) + quantizing
        except OptionError as refused:
            print(f"  {name}: {refused}", flush=True)
            continue
        second = second_kernel_ms(prompts, codes, queries) if tile is None else ""
        print(f"  {name}: {took * 1e3:.3f} ms{second} with quantizing, {took / stock:.2f} of FlashInfer's; error {error:.1e}", flush=True)


def second_kernel_ms(prompts: PromptBatch, codes: PromptCodes, queries: torch.Tensor) -> str:
    """Return text with the milliseconds of the second warp-specialized kernel, which attends to the codes."""
    query_codes, out = integer_prefill.PrefillQueryCodes.empty(queries, codes), torch.empty_like(queries)
    alone = seconds(partial(attend_to_codes, prompts, codes, query_codes, out), queries.device)
    return f" ({alone * 1e3:.3f} of them its second kernel)"


@contextmanager
def only_tile(tile: PrefillTile | None) -> Iterator[None]:
    """Make ``attend`` use this tile alone inside the context; None changes nothing."""
    before = integer_prefill.TILES, integer_prefill.LONG_TILES
    if tile is not None:
        integer_prefill.TILES = integer_prefill.LONG_TILES = (tile,)
    # It remembers by index which of several tiles fits the GPU.
    gpu_launch._TAKEN.clear()
    try:
        yield
    finally:
        integer_prefill.TILES, integer_prefill.LONG_TILES = before
        gpu_launch._TAKEN.clear()
