"""Prefill on codes of one layer, by tile, beside FlashInfer's over 16 bits, on a GPU: docs/results/hack.md.

    sglang-ext-bench prefill-tiles [--tokens 16384] [--forms 4:64 4:128 2:64] [--tiles specialized 64,4,3 64,4,2 128,8,3 128,8,2]

One request, 32 heads of 128 channels, 8 KV heads. The error is that of the last 16 tokens against float64, by what their codes mean.
``specialized``: by the kernels whose warps have different work, on Hopper.
"""

import argparse
from dataclasses import astuple
from functools import partial

import torch

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import gpu_launch
from sglang_ext.layers.kernels.hack import integer_prefill, specialized_prefill
from sglang_ext.layers.kernels.hack.integer_prefill import PrefillTile, attend
from sglang_ext.layers.kernels.hack.prompt_codes import PromptBatch, prompt_codes
from sglang_ext.layers.kernels.hack.specialized_prefill import attend_to_codes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext_bench.attention import prefill
from sglang_ext_bench.attention.setting import FullKV as Full, AttentionShape as Shape
from sglang_ext_bench.attention.timing import seconds

# Tokens whose attention is compared with float64.
COMPARED = 16
SPECIALIZED = "specialized"
# Tiles that are taken where none is asked for.
OF_THEIR_OWN = integer_prefill.TILES, integer_prefill.LONG_TILES


def measure(shape: Shape, tokens: int, forms: list[tuple[int, int]], tiles: list[PrefillTile | str]) -> None:
    """Print milliseconds of each tile, and what they are of FlashInfer's."""
    full, queries = Full.of(shape, 1, tokens), shape.queries(tokens)
    pools, device = (full.keys, full.values), shape.device
    stock = seconds(prefill._whole(full, queries), device) if device.type == "cuda" else float("nan")
    print(f"FlashInfer {stock * 1e3:.3f} ms", flush=True)
    buffers = KVBuffers((0,), (shape.scaling,), *((pool[:1],) for pool in pools))
    seeds = {0: torch.arange(tokens, dtype=torch.int32, device=device)}
    for bits, partition in forms:
        packing = Packing.for_pool(quantizer("hack", bits, partition), buffers, 1)
        prompts = PromptBatch(packing, full.slots.int(), [0], [0], [tokens], seeds)
        codes = prompt_codes(prompts, *pools, 0, 0)
        quantizing = seconds(lambda prompts=prompts: prompt_codes(prompts, *pools, 0, 0), device)
        print(f"{bits} bits, P {partition}: quantizing {quantizing * 1e3:.3f} ms", flush=True)
        last = prefill.prefix(packing, tokens)
        asked = queries[-min(COMPARED, tokens - packing.sinks - last) :]
        exact = prefill.exactly(asked, *prefill._meaning(full, packing, seeds[0], last), shape.scaling).double().view(-1)
        for tile in tiles:
            kernel, name = ("tiles", astuple(tile)) if isinstance(tile, PrefillTile) else (tile, tile)
            if kernel == SPECIALIZED and not specialized_prefill.is_supported(prompts, queries, pools[0]):
                print(f"  {name}: it does not take these", flush=True)
                continue
            integer_prefill.TILES, integer_prefill.LONG_TILES = ((tile,),) * 2 if kernel != SPECIALIZED else OF_THEIR_OWN
            gpu_launch._TAKEN.clear()

            def run(prompts: PromptBatch = prompts, codes=codes, kernel=kernel) -> torch.Tensor:
                return attend(prompts, codes, queries, *pools, shape.scaling, kernel=kernel)

            try:
                error = float((run()[-len(asked) :].double().view(-1) - exact).norm() / exact.norm())
            except OptionError as refused:
                print(f"  {name}: {refused}", flush=True)
                continue
            took, more = seconds(run, device) + quantizing, ""
            if kernel == SPECIALIZED:
                left, out = specialized_prefill.PrefillQueryCodes.empty(queries, codes), torch.empty_like(queries)
                alone = seconds(partial(attend_to_codes, prompts, codes, left, out), device)
                more = f" ({alone * 1e3:.3f} of them its second kernel)"
            print(f"  {name}: {took * 1e3:.3f} ms{more} with quantizing, {took / stock:.2f} of FlashInfer's; error {error:.1e}", flush=True)


def main() -> None:
    """Measure by the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--forms", nargs="+", default=["4:64", "4:128", "2:64"])
    parser.add_argument("--tiles", nargs="+", default=[SPECIALIZED, "64,4,3", "64,4,2", "128,8,3", "128,8,2"])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(32, 8, 128, device) if device.type == "cuda" else Shape(4, 1, 128, device)
    forms = [tuple(map(int, form.split(":"))) for form in options.forms]
    tiles = [tile if tile == SPECIALIZED else PrefillTile(*map(int, tile.split(","))) for tile in options.tiles]
    print(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", options.tokens, "tokens", flush=True)
    with torch.inference_mode():
        measure(shape, options.tokens, forms, tiles)


if __name__ == "__main__":
    main()
