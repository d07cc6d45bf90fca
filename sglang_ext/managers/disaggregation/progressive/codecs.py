"""Which codec moves the pages of a pool."""

from sglang_ext.config.disaggregation_options import RAW
from sglang_ext.managers.disaggregation.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.disaggregation.progressive.page_codec import PageCodec
from sglang_ext.managers.disaggregation.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.disaggregation.progressive.raw_codec import RawCodec


def make_codec(reference: str, pool: PoolBuffers) -> PageCodec:
    """The codec whose streams restore ``reference``, a value of ``--kv-reference``.

    Raises:
        LinkError: it does not take such a pool.
    """
    return RawCodec(pool) if reference == RAW else LynxCodec(pool, reference)
