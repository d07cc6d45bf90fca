"""Measure the Lynx transfer codec on the KV of a model: error, bits per number and speed. Runs on a CPU.

    sglang-ext-bench lynx-codec MODEL --tokens 1024

The KV of all layers is computed in float32 and rounded to the dtype of the pool. The command prints one row per dtype and setting:

    sinks, reference                 exact first tokens, and what the residual restores
    anchor, both                     error with the anchor alone, and with the residual
    bits, anchor; bits, both         bits per number of the pool
    encode, decode anchor, ...       MB/s of the pool

The error is the vNMSE of attention outputs against those of the pool. It is the squared length of the difference over that of the output,
averaged over layers, query heads and tokens.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ext.config.model_folder import read_config
from sglang_ext.layers.kernels.lynx.codec import Streams, decode_page, encode_page
from sglang_ext.layers.kernels.lynx.layout import PageLayout
from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext_bench.report import markdown_header, markdown_row

PAGE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (
    "dtype", "sinks", "reference", "anchor", "both", "bits, anchor", "bits, both", "encode, MB/s", "decode anchor", "decode both",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Options of the codec, as :class:`PageLayout` has them.

    Attributes:
        sinks: First tokens of the context that the anchor holds exactly.
        reference: ``int8`` or ``exact``.
    """

    sinks: int
    reference: str

    def layout(self, page: torch.Tensor, first: bool) -> PageLayout:
        """Return the layout of a page, [tokens, heads, dim]; ``first`` of the context."""
        sinks = min(self.sinks, len(page)) if first else 0
        return PageLayout(len(page), page[0].numel(), page.dtype, sinks=sinks, reference=self.reference)


SETTINGS = (Setting(0, "int8"), Setting(4, "int8"), Setting(4, "exact"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("model", nargs="?", type=Path, default=".cache/models/SmolLM2-135M-Instruct", help="folder of the model (default: %(default)s)")
    add("--text", type=Path, default=Path("docs/architecture.md"), help="file with the prompt (default: %(default)s)")
    add("--tokens", type=int, default=1024, help="first tokens of the text to use (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a row for each dtype and setting.

    Raises:
        CommandError: The text does not exist, or --tokens is out of range.
        OptionError: The model's folder has no config.json.
    """
    check_counts({"--tokens": args.tokens})
    if not args.text.is_file():
        raise CommandError(f"--text {args.text}: there is no such file; pass a text file")
    read_config(args.model)
    from transformers import AutoTokenizer

    input_ids = tuple(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"][: args.tokens])
    layers = CapturedModel(str(args.model), "float32").attention(input_ids)
    print(markdown_header(COLUMNS))
    for dtype in DTYPES:
        for setting in SETTINGS:
            cells = str(dtype)[6:], str(setting.sinks), setting.reference
            print(markdown_row([*cells, *measure(layers, dtype, setting)]), flush=True)
    return 0


def measure(layers: list[LayerAttention], dtype: torch.dtype, setting: Setting) -> list[str]:
    """Return the errors, bits per number and MB/s of a setting, as cells of a row.

    Args:
        layers: Queries, keys and values of each layer.
        dtype: dtype of the pool.
        setting: Options of the codec.
    """
    errors = torch.zeros(2, dtype=torch.float64)
    anchor_bytes, residual_bytes, numbers = 0, 0, 0
    # Of encoding, decoding the anchor, and decoding both.
    seconds = [0.0, 0.0, 0.0]
    for layer in layers:
        exact = [part.to(dtype) for part in (layer.keys, layer.values)]
        decoded: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for part in exact:
            began = time.perf_counter()
            pages = encode_pages(part, setting)
            seconds[0] += time.perf_counter() - began
            anchor_bytes += sum(len(streams.anchor) for _, streams in pages)
            residual_bytes += sum(len(streams.residual) for _, streams in pages)
            for both, outputs in enumerate(decoded):
                began = time.perf_counter()
                outputs.append(decode_pages(pages, bool(both)).view(part.shape))
                seconds[1 + both] += time.perf_counter() - began
            assert setting.reference == "int8" or torch.equal(decoded[1][-1], part), "exact residuals restore the pool's bits"
            numbers += part.numel()
        expected = attention_outputs(layer, *exact)
        for both, outputs in enumerate(decoded):
            off = (attention_outputs(layer, *outputs) - expected).square().sum(-1) / expected.square().sum(-1)
            errors[both] += off.double().mean() / len(layers)
    bits = (8 * size / numbers for size in (anchor_bytes, anchor_bytes + residual_bytes))
    rates = (numbers * dtype.itemsize / each / 1e6 for each in seconds)
    return [*(f"{each:.2g}" for each in errors), *(f"{each:.2f}" for each in bits), *(f"{each:.0f}" for each in rates)]


def encode_pages(numbers: torch.Tensor, setting: Setting) -> list[tuple[PageLayout, Streams]]:
    """Return the layout and the streams of each page of keys or values, [tokens, heads, dim]."""
    found = []
    for index, page in enumerate(numbers.split(PAGE)):
        layout = setting.layout(page, index == 0)
        found.append((layout, encode_page([page.contiguous()], layout)[0]))
    return found


def decode_pages(pages: list[tuple[PageLayout, Streams]], with_residual: bool) -> torch.Tensor:
    """Return the numbers of all pages, [tokens, channels]."""
    found = [torch.empty(layout.tokens, layout.channels, dtype=layout.dtype) for layout, _ in pages]
    for (layout, streams), page in zip(pages, found, strict=True):
        decode_page([streams.anchor], [streams.residual] if with_residual else None, layout, [page])
    return torch.cat(found)


def attention_outputs(layer: LayerAttention, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention outputs of all tokens over these keys and values, [query_heads, tokens, dim]."""
    queries, keys, values = (part.transpose(0, 1).float() for part in (layer.queries, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, scale=layer.scaling, enable_gqa=True
    )[0]
