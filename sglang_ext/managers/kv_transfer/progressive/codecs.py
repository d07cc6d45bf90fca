"""Selects the codec that transfers the pages of a pool."""

import torch

from sglang_ext.config.disaggregation_options import RAW
from sglang_ext.managers.kv_transfer.progressive.baselines.cachegen import CacheGen
from sglang_ext.managers.kv_transfer.progressive.baselines.quantized_codec import QuantizedCodec
from sglang_ext.managers.kv_transfer.progressive.baselines.quantizers import Int4Quantizer, Bfloat16Quantizer, Int8Quantizer
from sglang_ext.managers.kv_transfer.progressive.baselines.unsplit_codec import UnsplitCodec
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, PageCodec, PlacedPage, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.progressive.raw_codec import RawCodec
from sglang_ext.managers.kv_transfer.wire import LayerRange

QUANTIZERS = {
    each.name: each for each in (Bfloat16Quantizer(), Int8Quantizer(), Int8Quantizer(by_token=False), Int4Quantizer(), CacheGen())
}


def make_codec(reference: str, pool: PoolBuffers, bench: str | None = None) -> PageCodec:
    """Create the codec whose streams restore ``reference``, a value of ``--kv-reference``.

    Args:
        reference: What the streams restore.
        pool: The pool of this rank.
        bench: A codec that a benchmark selects instead (``--kv-bench-codec``).

    Raises:
        LinkError: The codec does not support such a pool.
    """
    tokens = page_tokens(pool.bytes_per_token)
    if bench in QUANTIZERS:
        quantizer = QUANTIZERS[bench]
        return QuantizedCodec(pool, quantizer, UNIT if quantizer.spans_page else tokens)
    if bench is not None:
        return UnsplitCodec(LynxCodec(pool, "int8", tokens), whole=bench == "lynx-int8")
    return RawCodec(pool, tokens) if reference == RAW else LynxCodec(pool, reference, tokens)


def compile_kernels(codec: PageCodec, layers: LayerRange, writes: bool) -> None:
    """Compile the codec's kernels by a run on slot 0, which belongs to no request. Otherwise the first pages would wait seconds for each
    kernel.

    Args:
        codec: Codec of the pool.
        layers: Layers of one part.
        writes: Whether this server also writes pages.
    """
    with codec.pool.use_stream():
        for tensor in codec.pool.tensors(layers.first, layers.count):
            # Codecs refuse values that are not finite.
            tensor[0] = 0
        slots = torch.zeros(codec.page_size, dtype=torch.int64, device=codec.pool.device)
        # With sinks, and without.
        for page in (PlacedPage(0, slots), PlacedPage(codec.page_size, slots)):
            encoded = codec.start(page, layers)()
            if codec.has_residual:
                for kinds in ({"residual": False}, {"anchor": False}):
                    codec.start(page, layers, **kinds)()
            if writes:
                codec.write_anchor(page, layers, encoded.anchor)
                if codec.has_residual:
                    codec.write_residual(page, layers, encoded.anchor, encoded.residual)
        codec.pool.synchronize()
