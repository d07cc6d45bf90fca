"""Errors of attention outputs on KV that went through a codec, and the codec's bits per number. It needs no server."""

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
class CodecAccuracy:
    """Errors and size of the KV of one method. The fields are keys of the JSON file.

    An error is the vNMSE of attention outputs: the squared length of the difference over that of the exact output. It is the mean over
    query heads, tokens and layers. Each layer gets the queries of full KV.

    Attributes:
        method: Name of the method.
        anchor: Error on the data with which decoding can start.
        all: Error on all transferred data. None without a residual.
        bits_anchor: Bits per number of the data with which decoding can start.
        bits_all: Bits per number of all transferred data.
    """

    method: str
    anchor: float
    all: float | None
    bits_anchor: float
    bits_all: float


def measure(model: Path, dtype: str, input_ids: tuple[int, ...], methods: Sequence[str]) -> Iterator[CodecAccuracy]:
    """Measure the methods of ``methods`` that are in :data:`CODED`, on the KV of one text.

    Args:
        model: Folder of the model. It runs in float32.
        dtype: Data type of the KV that the codecs get.
        input_ids: Token ids of the text.
        methods: Names of methods.
    """
    layers = CapturedModel(str(model), "float32").attention(input_ids)
    kinds = [torch.stack([getattr(layer, kind) for layer in layers]).to(getattr(torch, dtype)) for kind in ("keys", "values")]
    for name in methods:
        if name in CODED:
            yield measure_codec(name, layers, *kinds)


def measure_codec(name: str, layers: Sequence[LayerAttention], keys: torch.Tensor, values: torch.Tensor) -> CodecAccuracy:
    """Encode and decode keys and values [layers, tokens, heads, dim] page by page, and compare the attention outputs."""
    from sglang_ext.managers.kv_transfer.progressive.compatibility import make_codec
    from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage

    source, target = (LayerPool(keys.clone(), values.clone()) for _ in range(2))
    reference, codec = (SPLIT[name], None) if name in SPLIT else ("exact", CODECS[name])
    sender, receiver = (make_codec(reference, each.pool, codec) for each in (source, target))
    tokens = keys.shape[1]
    pages = [PlacedPage(begin, torch.arange(begin, min(begin + sender.page_size, tokens))) for begin in range(0, tokens, sender.page_size)]
    streams = [sender.encode(page) for page in pages]
    sizes = [sum(len(stream or b"") for stream in kind) for kind in zip(*streams, strict=True)]
    for page, (anchor, _) in zip(pages, streams, strict=True):
        receiver.write_anchor(page, anchor)
    anchor_error, full_error = attention_error(layers, source, target), None
    if sizes[1]:
        for page, both in zip(pages, streams, strict=True):
            receiver.write_residual(page, *both)
        full_error = attention_error(layers, source, target)
    numbers = keys.numel() + values.numel()
    return CodecAccuracy(name, anchor_error, full_error, 8 * sizes[0] / numbers, 8 * sum(sizes) / numbers)


class LayerPool:
    """Keys and values in the form of a server's pool, with one slot per token.

    Attributes:
        keys: Keys [layers, tokens, heads, dim], in the pool's memory.
        values: Values of the same shape.
        pool: Buffers that point to them.
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


def attention_error(layers: Sequence[LayerAttention], source: LayerPool, target: LayerPool) -> float:
    """The vNMSE of attention outputs on ``target``, relative to those on ``source``. Mean over layers."""
    errors = []
    for index, layer in enumerate(layers):
        heads = layer.queries.shape[1]
        exact, coded = (
            attend(layer.queries, each.keys[index], each.values[index], layer.scaling).unflatten(1, (heads, -1)) for each in (source, target)
        )
        errors.append(((coded - exact).square().sum(-1) / exact.square().sum(-1)).double().mean())
    return float(torch.stack(errors).mean())
