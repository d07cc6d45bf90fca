"""What codecs do to attention: vNMSE of its outputs on real KV, in this process, and bits of a number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ext_bench.baselines import CODECS
from sglang_ext_bench.quality.attention import attend
from sglang_ext_bench.quality.capture import CapturedModel, LayerAttention
from sglang_ext_bench.transfer.methods import LYNX, SPLIT

CODED = (LYNX, *CODECS)


@dataclass(frozen=True)
class Accuracy:
    """Errors of a method.

    Attributes:
        method: its name.
        anchor, all: vNMSE of attention outputs on what decoding can begin on, and on all that travels; the latter None where these are
            the same. Squared length of the difference over that of the output, mean over query heads, tokens and layers; every layer
            sees the queries of full KV.
        bits_anchor, bits_all: of a number.
    """

    method: str
    anchor: float
    all: float | None
    bits_anchor: float
    bits_all: float


def measure(model: Path, dtype: str, input_ids: tuple[int, ...], methods: Sequence[str]) -> Iterator[Accuracy]:
    """Of the methods among ``CODED``, on the KV of one text."""
    layers = CapturedModel(str(model), "float32").attention(input_ids)
    kinds = [torch.stack([getattr(layer, kind) for layer in layers]).to(getattr(torch, dtype)) for kind in ("keys", "values")]
    for name in methods:
        if name in CODED:
            yield of_method(name, layers, *kinds)


def of_method(name: str, layers: Sequence[LayerAttention], keys: torch.Tensor, values: torch.Tensor) -> Accuracy:
    """Of keys and values [layers, tokens, heads, dim] that go through a method's codec page by page."""
    from sglang_ext.managers.kv_transfer.progressive.codecs import make_codec
    from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage
    from sglang_ext.managers.kv_transfer.wire import LayerRange

    source, target = (Held(keys.clone(), values.clone()) for _ in range(2))
    chosen = (SPLIT[name], None) if name in SPLIT else ("exact", CODECS[name])
    sender, receiver = (make_codec(chosen[0], held.pool, chosen[1]) for held in (source, target))
    tokens, parts = keys.shape[1], LayerRange(0, len(layers))
    pages = [PlacedPage(begin, torch.arange(begin, min(begin + sender.page_size, tokens))) for begin in range(0, tokens, sender.page_size)]
    streams = [sender.encode(page, parts) for page in pages]
    sizes = [sum(len(stream or b"") for stream in kind) for kind in zip(*streams, strict=True)]
    for page, (anchor, _) in zip(pages, streams, strict=True):
        receiver.write_anchor(page, parts, anchor)
    found, whole = error(layers, source, target), None
    if sizes[1]:
        for page, both in zip(pages, streams, strict=True):
            receiver.write_residual(page, parts, *both)
        whole = error(layers, source, target)
    numbers = keys.numel() + values.numel()
    return Accuracy(name, found, whole, 8 * sizes[0] / numbers, 8 * sum(sizes) / numbers)


class Held:
    """Keys and values as a server's pool, one slot a token.

    Attributes:
        keys, values: [layers, tokens, heads, dim]; the pool's memory.
        pool: of these.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        from sglang.srt.disaggregation.base.conn import KVArgs

        from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers

        self.keys, self.values = keys.contiguous(), values.contiguous()
        args, buffers = KVArgs(), [*self.keys, *self.values]
        args.kv_data_ptrs = [buffer.data_ptr() for buffer in buffers]
        args.kv_data_lens = [buffer.nbytes for buffer in buffers]
        args.kv_item_lens = [buffer[0].nbytes for buffer in buffers]
        args.page_size = 1
        heads, key_dim = keys.shape[2:]
        self.pool = PoolBuffers(args, keys.dtype, heads, key_dim, values.shape[3], torch.device("cpu"))


def error(layers: Sequence[LayerAttention], source: Held, target: Held) -> float:
    """vNMSE of attention outputs, mean over layers."""
    found = []
    for place, layer in enumerate(layers):
        heads = layer.queries.shape[1]
        exact, coded = (
            attend(layer.queries, held.keys[place], held.values[place], layer.scaling).unflatten(1, (heads, -1)) for held in (source, target)
        )
        found.append(((coded - exact).square().sum(-1) / exact.square().sum(-1)).double().mean())
    return float(torch.stack(found).mean())
