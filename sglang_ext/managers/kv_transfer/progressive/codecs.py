"""Selects the codec that transfers the pages of a pool."""

import torch

from sglang_ext.config.disaggregation_options import RAW, REFERENCES
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.kv_transfer.progressive.page_codec import BenchCodec, PageCodec, PlacedPage, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.progressive.raw_codec import RawCodec
from sglang_ext.managers.kv_transfer.wire import LayerRange
from sglang_ext.named_classes import NAMED, load_class


def make_codec(reference: str, pool: PoolBuffers, bench: str | None = None) -> PageCodec:
    """Create the codec whose streams restore ``reference``, a value of ``--kv-reference``.

    Args:
        reference: What the streams restore.
        pool: The pool of this rank.
        bench: The class of a codec that a benchmark compares with, instead: a value of ``--kv-bench-codec``.

    Raises:
        LinkError: The codec does not support such a pool.
        OptionError: ``bench`` names no codec.
    """
    if bench is not None:
        return bench_codec(bench).for_pool(pool)
    tokens = page_tokens(pool.bytes_per_token)
    return RawCodec(pool, tokens) if reference == RAW else LynxCodec(pool, reference, tokens)


def bench_codec(value: str) -> type[BenchCodec]:
    """Load the codec that a value of ``--kv-bench-codec`` names.

    Raises:
        OptionError: The value names no class, or a class that is not a codec. The message has the remedy.
    """
    setting = f"--kv-bench-codec is {value!r}"
    if NAMED.fullmatch(value) is None:
        raise OptionError(
            f"{setting}; it names the class of a codec for comparison: pass MODULE:CLASS, for example "
            "sglang_ext_bench.baselines.quantized_codec:Int8Codec. The codecs of sglang-ext itself are values of --kv-reference: "
            f"{', '.join(REFERENCES)}"
        )
    return load_class(value, setting, BenchCodec)


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
