"""What the transfer codec costs real KV: errors of attention outputs, bits of a number, and speed: lynx_codec.py [MODEL] [--tokens N].

Keys and values of all layers are computed in float32 and rounded to the pool's dtype. An error is the vNMSE of attention outputs of
each layer against those of the pool's own numbers: the squared length of the difference over that of the output, mean over query
heads and tokens.
"""

import argparse
import time
from pathlib import Path

import torch

from sglang_ext.layers.kernels.lynx.codec import Streams, decode, encode
from sglang_ext.layers.kernels.lynx.layout import PageLayout
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention

PAGE = 256


def attended(layer: LayerAttention, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Outputs of all tokens, [query_heads, tokens, dim]."""
    queries, keys, values = (part.transpose(0, 1).float() for part in (layer.queries, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, scale=layer.scaling, enable_gqa=True
    )[0]


def paged(x: torch.Tensor, options: dict) -> tuple[list[tuple[PageLayout, Streams]], int]:
    """Streams of all pages of [tokens, heads, dim], and their bytes."""
    found = []
    for begin in range(0, len(x), PAGE):
        part = x[begin : begin + PAGE]
        layout = PageLayout(len(part), part[0].numel(), x.dtype, **options | {"sinks": options["sinks"] if begin == 0 else 0})
        found.append((layout, encode(part.contiguous(), layout)))
    return found, sum(len(streams.anchor) + len(streams.residual) for _, streams in found)


def measure(layers: list[LayerAttention], dtype: torch.dtype, options: dict) -> str:
    """A row: errors of the anchor and with the residual, bits of anchor and of both, and MB/s."""
    errors, sizes, times, count = torch.zeros(2, dtype=torch.float64), [0, 0], [0.0, 0.0, 0.0], 0
    for layer in layers:
        kinds, rebuilt = [part.to(dtype) for part in (layer.keys, layer.values)], ([], [])
        for x in kinds:
            started = time.perf_counter()
            pages, size = paged(x, options)
            times[0] += time.perf_counter() - started
            sizes = [sizes[0] + sum(len(streams.anchor) for _, streams in pages), sizes[1] + size]
            for whole, parts in enumerate(rebuilt):
                started = time.perf_counter()
                parts.append(torch.cat([decode(s.anchor, s.residual if whole else None, layout) for layout, s in pages]).view(x.shape))
                times[1 + whole] += time.perf_counter() - started
            assert options["reference"] == "int8" or torch.equal(rebuilt[1][-1], x)
            count += x.numel()
        wanted = attended(layer, *kinds)
        for whole, parts in enumerate(rebuilt):
            off = (attended(layer, *parts) - wanted).square().sum(-1) / wanted.square().sum(-1)
            errors[whole] += off.double().mean() / len(layers)
    bits, speed = [8 * size / count for size in sizes], [count * dtype.itemsize / each / 1e6 for each in times]
    return " | ".join([f"{each:.2g}" for each in errors] + [f"{each:.2f}" for each in bits] + [f"{each:.0f}" for each in speed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[3] / "docs/architecture.md")
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    ids = tuple(AutoTokenizer.from_pretrained(asked.model)(asked.text.read_text())["input_ids"][: asked.tokens])
    layers = CapturedModel(asked.model, "float32").attention(ids)
    print("dtype | bits | sinks | scales | reference | anchor | whole | bits, anchor | bits, both | encode | decode anchor | decode both")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bits, sinks, short, reference in (
            (4, 0, False, "int8"), (4, 4, False, "int8"), (4, 4, True, "int8"), (3, 4, False, "int8"), (2, 4, False, "int8"),
            (4, 4, False, "exact"), (4, 4, True, "exact"), (3, 4, False, "exact"), (2, 4, False, "exact"),
        ):  # fmt: skip
            options = {"bits": bits, "sinks": sinks, "short_scales": short, "reference": reference}
            row = measure(layers, dtype, options)
            print(f"{str(dtype)[6:]} | {bits} | {sinks} | {8 if short else 16} | {reference} | {row}", flush=True)


if __name__ == "__main__":
    main()
