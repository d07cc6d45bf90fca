"""Pages of quantized numbers in one stream: keys of all layers, then values of all layers, in the quantizer's format."""

from dataclasses import dataclass
from typing import ClassVar, Self

from sglang_ext.managers.kv_transfer.wire import LOSSY, LinkError, OptionValue
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import pack_streams, packed_size, unpack_streams
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT, BenchCodec, PlacedPage, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import Stream
from sglang_ext_bench.baselines.quantizers import Bfloat16Quantizer, Int4Quantizer, Int8Quantizer, PageQuantizer


@dataclass(frozen=True)
class QuantizedCodec(BenchCodec):
    """Writes a quantizer's output into the anchor stream. Each baseline is a subclass with its quantizer.

    Attributes:
        quantizer: Quantizer of the pool's numbers.
        pool: The pool of this rank: bfloat16, float16 or float32.
        page_size: Tokens of a page.

    Raises:
        LinkError: The pool has another dtype.
    """

    quantizer: ClassVar[PageQuantizer]
    pool: PoolBuffers
    page_size: int = UNIT
    version = 1
    reference = LOSSY

    @classmethod
    def for_pool(cls, pool: PoolBuffers) -> Self:
        """Create the codec of a pool. Pages have 64 tokens if the quantizer's scales span a page."""
        return cls(pool, UNIT if cls.quantizer.spans_page else page_tokens(pool.bytes_per_token))

    def __post_init__(self) -> None:
        if self.pool.dtype.itemsize < 2:
            raise LinkError(f"codec {self.name} supports pools of bfloat16, float16 or float32, not {self.pool.dtype}")

    @property
    def name(self) -> str:
        """Name of the quantizer."""
        return self.quantizer.name

    @property
    def options(self) -> dict[str, OptionValue]:
        """The options that change the bytes."""
        return dict(self.quantizer.options)

    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a full page."""
        if stream is not Stream.ANCHOR:
            return 0
        return packed_size([self.quantizer.most_bytes(self.pool.layers, self.page_size, self.pool.heads, dim) for dim in self._dims])

    def encode_anchor(self, page: PlacedPage) -> memoryview:
        """Quantize the current KV of the page.

        Raises:
            LinkError: A number is not finite, or too large for a float16 scale.
        """
        streams = []
        for half, dim in zip(self.pool.gather(page.slots), self._dims, strict=True):
            x = half.view(self.pool.layers, -1, self.pool.heads, dim).float()
            if not x.isfinite().all():
                raise LinkError(
                    f"KV of the page at {page.start} is not finite: codec {self.name} has no codes for it; use --kv-reference exact"
                )
            try:
                streams.append(self.quantizer.encode(x, self.pool.layers))
            except ValueError as error:
                raise LinkError(f"KV of the page at {page.start}: {error}; use --kv-reference exact") from error
        stream = pack_streams(streams, self.pool.blocks)
        self.pool.synchronize()
        return stream

    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Fill the page's slots with the quantized numbers.

        Raises:
            LinkError: The data is not a stream of such a page.
        """
        found = []
        for stream, dim in zip(unpack_streams(anchor, 2, self.pool.blocks), self._dims, strict=True):
            shape = self.pool.layers, len(page.slots), self.pool.heads, dim
            try:
                x = self.quantizer.decode(stream, shape, self.pool.layers)
            except ValueError as error:
                raise LinkError(f"no stream of a page of {len(page.slots)} tokens: {error}") from error
            found.append(x.to(self.pool.dtype).flatten(2))
        self.pool.scatter(page.slots, found)

    @property
    def _dims(self) -> tuple[int, int]:
        """Elements of a head's keys and values."""
        return self.pool.key_dim, self.pool.value_dim


@dataclass(frozen=True)
class Bfloat16Codec(QuantizedCodec):
    """16 bits of each number."""

    quantizer: ClassVar[Bfloat16Quantizer] = Bfloat16Quantizer()


@dataclass(frozen=True)
class Int8Codec(QuantizedCodec):
    """8 bits, with a scale for each token and head."""

    quantizer: ClassVar[Int8Quantizer] = Int8Quantizer()


@dataclass(frozen=True)
class Int8TensorCodec(QuantizedCodec):
    """8 bits, with a scale for the keys, and one for the values, of a layer in a page."""

    quantizer: ClassVar[Int8Quantizer] = Int8Quantizer(by_token=False)


@dataclass(frozen=True)
class Int4Codec(QuantizedCodec):
    """4 bits, with a least number and a step for 32 channels of a token: 5 bits together."""

    quantizer: ClassVar[Int4Quantizer] = Int4Quantizer()
