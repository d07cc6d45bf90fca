"""Codecs of pages: their interface, the size of pages, the codec without encoding, and the hashes that identify pages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, Self

import numpy as np
import torch

from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LinkError, OptionValue, Stream

# Page sizes are multiples of this many tokens: chunks of codecs, and blocks of quantized KV.
UNIT = 64
# Target bytes of the pool and maximum tokens in a page. Smaller pages cost as much host time as transfer time; larger ones delay the link's
# first page.
PAGE_BYTES, MOST_TOKENS = 1 << 25, 256


def page_tokens(bytes_per_token: int) -> int:
    """Return the tokens of a page. Both ends of a link have equal pools, and therefore equal pages."""
    return max(UNIT, min(PAGE_BYTES // bytes_per_token, MOST_TOKENS) // UNIT * UNIT)


@dataclass(frozen=True)
class PlacedPage:
    """A page of a prompt from position ``start``, and its slots in the pool, int64 [tokens], on the pool's device.

    For a page that is written as quantized blocks, these are the slots of the blocks.
    """

    start: int
    slots: torch.Tensor


class EncodedPage(NamedTuple):
    """Streams of one page, in host memory that is not written to any more. None: not requested, or not a stream of the codec."""

    anchor: memoryview | None
    residual: memoryview | None


class PageCodec(ABC):
    """Encodes pages of one pool to streams, and decodes them. It keeps no state of a page. Its methods may be called from several threads.

    This base has the methods of a codec that writes a whole page into its anchor stream. The two ends of a link compare ``name``,
    ``version``, ``options`` and ``reference`` (wire.py:LinkSettings). A page has ``page_size`` tokens.
    """

    pool: PoolBuffers
    name: str
    version: int
    reference: str
    page_size: int
    has_residual = False

    @property
    def options(self) -> dict[str, OptionValue]:
        """The options that change the bytes, by name."""
        return {}

    def ends(self, prompt: int, prefix: int = 0) -> list[int]:
        """Return the ends of the pages of a prompt of ``prompt`` tokens, after its first ``prefix`` tokens."""
        return page_ends(self.page_size, prompt, prefix)

    @abstractmethod
    def most_bytes(self, stream: Stream) -> int:
        """Return the maximum bytes of a page's stream; 0 for a stream that the codec does not have."""

    def encode(self, page: PlacedPage) -> EncodedPage:
        """Encode the current KV of the page to all streams."""
        return self.start(page)()

    @abstractmethod
    def start(self, page: PlacedPage, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to encode the requested streams that the codec has, from the current KV. Return a function that waits for them.

        The function may be called from another thread. The pool must keep the page, and the arguments must be kept alive, until it returns.
        Without ``has_residual``, callers never request a residual alone.
        """

    @abstractmethod
    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Fill the page's slots with the values that the anchor alone restores. Raise ``LinkError`` if it is no anchor of such a page."""

    def write_residual(self, page: PlacedPage, anchor: memoryview, residual: memoryview) -> None:
        """Fill the page's slots with the reference. Raise ``LinkError`` if these are no streams of such a page."""
        raise LinkError(f"codec {self.name} has no residuals, and received one of {len(residual)} bytes")


class BenchCodec(PageCodec):
    """Base of the codecs that benchmarks compare with: ``--kv-bench-codec`` names subclasses. They are outside this package."""

    @classmethod
    @abstractmethod
    def for_pool(cls, pool: PoolBuffers) -> Self:
        """Create the codec of a pool. Raise ``LinkError`` if it does not support the pool."""

    @abstractmethod
    def encode_anchor(self, page: PlacedPage) -> memoryview:
        """Encode the current KV of the page to its one stream."""

    def start(self, page: PlacedPage, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Encode the one stream at once."""
        found = EncodedPage(self.encode_anchor(page), None)
        return lambda: found


@dataclass(frozen=True)
class RawCodec(PageCodec):
    """Copies the pool's bytes, all of them in the anchor stream."""

    pool: PoolBuffers
    page_size: int = 64
    name = "raw"
    version = 1
    reference = "raw"

    def most_bytes(self, stream: Stream) -> int:
        """Return the bytes of a full page."""
        return self.page_size * self.pool.bytes_per_token if stream is Stream.ANCHOR else 0

    def start(self, page: PlacedPage, anchor: bool = True, residual: bool = True) -> Callable[[], EncodedPage]:
        """Start to copy the page; there is no residual."""
        size = len(page.slots) * self.pool.bytes_per_token
        if self.pool.device.type == "cpu":
            content, where = self.pool.blocks.take(size), _slot_index(page.slots)
            for rows, part in self._views(content, len(page.slots)):
                part[:] = rows[where]
            return lambda: EncodedPage(memoryview(content), None)
        brought = self.pool.copy_to_host(self.pool.gather(page.slots), size)
        return lambda: EncodedPage(brought(), None)

    def write_anchor(self, page: PlacedPage, anchor: memoryview) -> None:
        """Copy the bytes back to the pool. Raise ``LinkError`` if the page has another size."""
        tokens, expected = len(page.slots), len(page.slots) * self.pool.bytes_per_token
        if len(anchor) != expected:
            raise LinkError(f"a page of {tokens} tokens has {len(anchor)} bytes; expected are {expected}")
        if self.pool.device.type == "cpu":
            where = _slot_index(page.slots)
            for rows, part in self._views(np.frombuffer(anchor, np.uint8), tokens):
                rows[where] = part
            return
        content = self.pool.blocks.to_device(anchor).view(self.pool.dtype)
        split = tokens * self.pool.layers * self.pool.heads * self.pool.key_dim
        self.pool.scatter(page.slots, tuple(half.view(self.pool.layers, tokens, -1) for half in (content[:split], content[split:])))

    def _views(self, content: np.ndarray, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rows of a pool in host memory, uint8 [slots, width], and their part of a page's bytes, for each tensor."""
        begin = 0
        for rows in self._pool_rows:
            end = begin + tokens * rows.shape[1]
            yield rows, content[begin:end].reshape(tokens, rows.shape[1])
            begin = end

    @cached_property
    def _pool_rows(self) -> tuple[np.ndarray, ...]:
        """The tensors of a pool in host memory: uint8 [slots, width]."""
        return tuple(tensor.view(torch.uint8).numpy() for tensor in self.pool.tensors)


def _slot_index(slots: torch.Tensor) -> np.ndarray | slice:
    """Return slots in host memory as an index. Consecutive slots become a slice, which is copied faster."""
    places = slots.numpy()
    if len(places) == 0 or (np.diff(places) != 1).any():
        return places
    return slice(int(places[0]), int(places[0]) + len(places))


def page_hashes(tokens: Sequence[int], ends: Sequence[int], start: int = 0, page_size: int = UNIT) -> list[bytes]:
    """Return a hash for each page: SHA-256 of the previous hash and the page's tokens, as 32-bit integers.

    They equal SGLang's names of HiCache pages (``sglang.srt.mem_cache.utils.get_hash_str``). Pages end at ``ends``, ascending. The first
    begins at ``start``; tokens before it are hashed in pages of ``page_size`` tokens.
    """
    row, earlier = np.asarray(tokens, "<u4"), page_ends(page_size, start)
    before, hashes, begin = b"", [], 0
    for end in (*earlier, *ends):
        before = sha256(before + row[begin:end].tobytes()).digest()
        hashes.append(before)
        begin = end
    return hashes[len(earlier) :]


def page_ends(page_size: int, end: int, start: int = 0) -> list[int]:
    """Return the ends of pages of ``page_size`` tokens that cover ``start`` to ``end``. The last page may hold fewer tokens."""
    return [min(begin + page_size, end) for begin in range(start, end, page_size)]
