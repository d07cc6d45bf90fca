"""Which codec moves the pages of a pool."""

from sglang_ext.managers.disaggregation.progressive.page_codec import PageCodec
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.progressive.raw_codec import RawCodec


def make_codec(pool: PoolBuffers) -> PageCodec:
    """The codec of this rank."""
    return RawCodec(pool)
