"""The objects of a prefix store: one page of one rank, its keys and values of all layers.

An object has three parts, which can be read by range::

    header      magic, version, settings, name of the page, sizes, checksums
    anchors     4 bits a number, usable alone (layers/kernels/lynx)
    residuals   what restores all bits of the numbers

A reader that drafts reads header and anchors. An exact reader also reads the residuals. In the form "raw", anchors are copies of the
numbers, and residuals are empty. docs/internals/prefix-store.md lists the bytes.

Checksums detect damage, not forgery: a process that can write to the store can change answers. But no object makes a reader allocate more
than a page needs, or write outside the given memory.

Example::

    form = ObjectFormat("SmolLM2", torch.bfloat16, layers=30, heads=3, head_dim=64, page_size=64)
    page = StoredPage(form, page_hash, start=0)
    backend.put(page.name, encode_object(page, kv))
    read_page(backend, StoredPage(form, page_hash, start=0), kv)  # raises ObjectError: compute the page

The KV of a page is one tensor, [2 * layers, page_size, heads, head_dim]: keys of all layers, then values. The numbers of a layer are contiguous.
Pages in the form "raw" are copied by threads that hold no GIL, in one call.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import torch
import xxhash

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.lynx.codec import decode_page, encode_page
from sglang_ext.layers.kernels.lynx.layout import HEADER, RAW, PageLayout, StreamBatch
from sglang_ext.mem_cache.prefix_store.backend import MAX_OBJECT_BYTES, ReadRange, StoreBackend, StoreError, check_name
from sglang_ext.mem_cache.prefix_store.object_header import (
    CHECKSUM_BYTES,
    FIELDS,
    MAGIC,
    VERSION,
    ObjectError,
    aligned,
    header_bytes,
    unpack_header,
)

FORMS = ("anchored", "raw")
"""Values of ``--kv-store-form``."""
BITS, SINKS = 4, 4
"""Bits of an anchor's codes, and first tokens of a prompt that anchors hold exactly."""


@dataclass(frozen=True)
class ObjectFormat:
    """The settings that all objects of one rank share. Other settings have another namespace.

    Attributes:
        model: Identifies the weights, and all else that changes KV.
        dtype: Dtype of the KV: bfloat16, float16 or float32.
        layers: Layers of this rank.
        heads: KV heads of this rank.
        head_dim: Channels of a head, equal for keys and values.
        page_size: Tokens of a page.
        rank, ranks: This rank, and the number of ranks.
        form: ``anchored`` or ``raw``.

    Raises:
        OptionError: The form is unknown, or the codec does not support such KV.
    """

    model: str
    dtype: torch.dtype
    layers: int
    heads: int
    head_dim: int
    page_size: int
    rank: int = 0
    ranks: int = 1
    form: str = "anchored"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise OptionError(f"--kv-store-form {self.form}: pass anchored or raw")
        try:
            self.layout(0)
        except ValueError as error:
            raise OptionError(f"a prefix store does not support this KV: {error}") from error
        if self.most_bytes > MAX_OBJECT_BYTES:
            raise OptionError(f"pages of {self.page_size} tokens need objects of {self.most_bytes} bytes; pass a smaller --page-size")

    @property
    def tensors(self) -> int:
        """Tensors of a page: keys of all layers, then values of all layers."""
        return 2 * self.layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of a page."""
        return self.tensors * self.page_size * self.heads * self.head_dim * self.dtype.itemsize

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the settings, the codec's settings, and the version."""
        settings = asdict(self) | {"dtype": str(self.dtype), "version": VERSION, "bits": BITS, "sinks": self.layout(0).sinks}
        return sha256(json.dumps(settings, sort_keys=True).encode()).digest()

    @property
    def namespace(self) -> str:
        """The namespace of the objects: 32 hexadecimal digits."""
        return self.digest.hex()[:32]

    def layout(self, start: int) -> PageLayout:
        """Layout of each tensor of the page whose first token has prompt position ``start``."""
        sinks = min(self.page_size, max(0, SINKS - start))
        return PageLayout(self.page_size, self.heads * self.head_dim, self.dtype, BITS, sinks, "compact")

    def compile_codec(self) -> None:
        """Compile the codec's loops, or load them from Numba's cache, so that the first page does not wait for it."""
        if self.form == "raw":
            return
        layout = self.layout(0)
        page = torch.zeros(self.page_size, layout.channels, dtype=self.dtype)
        (streams,) = encode_page([page], layout)
        for residuals in (None, [streams.residual]):
            decode_page([streams.anchor], residuals, layout, [page])

    @cached_property
    def header_bytes(self) -> int:
        """Size of a header."""
        return header_bytes(self.tensors)

    @cached_property
    def most_bytes(self) -> int:
        """Size that no object exceeds."""
        layout = self.layout(0)
        return self.header_bytes + self.tensors * (aligned(max(layout.raw_bytes, layout.coded_bytes)) + aligned(layout.most_compact_bytes))


@dataclass(frozen=True)
class ObjectHeader:
    """A header whose sizes are possible for its format.

    Attributes:
        anchors, residuals: Bytes of each tensor's streams.
        anchor_checksum, residual_checksum, page_checksum: xxh3_128 of the anchors, of the residuals, and of the page's numbers.
    """

    anchors: tuple[int, ...]
    residuals: tuple[int, ...]
    anchor_checksum: bytes
    residual_checksum: bytes
    page_checksum: bytes

    def encode(self, page: "StoredPage") -> bytes:
        """The bytes of the header of ``page``."""
        fields = FIELDS.pack(
            MAGIC, VERSION, page.form.tensors, page.start, _packed_size(self.anchors), _packed_size(self.residuals), page.form.digest,
            page.page_hash, self.anchor_checksum, self.residual_checksum, self.page_checksum,
        )  # fmt: skip
        content = fields + np.array([*self.anchors, *self.residuals], "<u4").tobytes()
        content = content.ljust(page.form.header_bytes - CHECKSUM_BYTES, b"\0")
        return content + xxhash.xxh3_128_digest(content)

    @classmethod
    def decode(cls, content: bytes, page: "StoredPage") -> "ObjectHeader":
        """Decode and check the header of ``page``.

        Raises:
            ObjectError: It is damaged, or another version's, server's or page's, or its sizes are impossible.
        """
        form, layout = page.form, page.layout
        tensors, start, anchor_bytes, residual_bytes, digest, page_hash, *checksums = unpack_header(content, page.name)
        if (tensors, start, digest, page_hash) != (form.tensors, page.start, form.digest, page.page_hash):
            raise ObjectError(f"object {page.name} is of another page, or of a server with other settings")
        sizes = np.frombuffer(content, "<u4", 2 * form.tensors, FIELDS.size).tolist()
        anchors, residuals = tuple(sizes[:tensors]), tuple(sizes[tensors:])
        try:
            most = [0 if form.form == "raw" or layout.is_raw(size) else layout.most_compact_bytes for size in anchors]
        except ValueError as error:
            raise ObjectError(f"object {page.name}: {error}") from error
        if form.form == "raw" and set(anchors) != {layout.raw_bytes} or any(size > limit for size, limit in zip(residuals, most)):
            raise ObjectError(f"object {page.name}: no tensor of this page has streams of {max(anchors)} and {max(residuals)} bytes")
        if (anchor_bytes, residual_bytes) != (_packed_size(anchors), _packed_size(residuals)):
            raise ObjectError(f"object {page.name}: {anchor_bytes} and {residual_bytes} bytes are not the sums of its streams")
        return cls(anchors, residuals, *checksums)


class StoredPage:
    """A page in a store, which is read in three steps. The caller reads the ranges of many pages at once.

    1. :meth:`first_range` has the header, and the anchors if no tensor is raw. Call :meth:`open` when it is filled.
    2. :meth:`anchor_ranges` has the other anchors. :meth:`decode_anchors` needs it.
    3. :meth:`residual_ranges` has the residuals. :meth:`restore` needs both.

    Every step raises :class:`ObjectError` if the object is not what it should be.

    Args:
        form: Format of this rank's objects.
        page_hash: Hash of all tokens up to the page's end, as ``page_hashes`` and SGLang's HiCache compute it: 32 bytes.
        start: Prompt position of the page's first token.
    """

    def __init__(self, form: ObjectFormat, page_hash: bytes, start: int) -> None:
        self.form, self.page_hash, self.start = form, page_hash, start
        self.name = check_name(f"{form.namespace}/{page_hash.hex()}")
        self.layout = form.layout(start)
        self._header: ObjectHeader | None = None
        self._first = self._anchors = self._residuals = torch.empty(0, dtype=torch.uint8)

    def first_range(self) -> ReadRange:
        """The part to read first. Every object of this format has as many bytes or more."""
        layout = self.layout
        size = layout.raw_bytes if self.form.form == "raw" or layout.always_raw else layout.coded_bytes
        self._first = torch.empty(self.form.header_bytes + self.form.tensors * aligned(size), dtype=torch.uint8)
        return ReadRange(self.name, 0, _view(self._first))

    def open(self) -> None:
        """Check the header, after the memory of :meth:`first_range` was filled."""
        content, found = self._first.split([self.form.header_bytes, len(self._first) - self.form.header_bytes])
        header = ObjectHeader.decode(bytes(_view(content)), self)
        missing = _packed_size(header.anchors) - len(found)
        self._anchors = torch.cat([found, found.new_empty(missing)]) if missing else found
        self._residuals, self._header = found.new_empty(_packed_size(header.residuals)), header

    @property
    def anchor_share(self) -> float:
        """Share of the object's bytes before its residuals."""
        self._opened()
        begin = self.form.header_bytes + len(self._anchors)
        return begin / (begin + len(self._residuals))

    def anchor_ranges(self) -> list[ReadRange]:
        """The anchors that the first range lacks. None unless tensors are raw."""
        return self._ranges(len(self._first), self._anchors[len(self._first) - self.form.header_bytes :])

    def residual_ranges(self) -> list[ReadRange]:
        """The residuals. None if all tensors are raw."""
        return self._ranges(self.form.header_bytes + len(self._anchors), self._residuals)

    def decode_anchors(self, kv: torch.Tensor) -> None:
        """Fill ``kv`` with the numbers of the anchors. See :meth:`restore`."""
        header = self._opened()
        self._check(self._anchors, header.anchor_checksum, "anchors")
        self._decode(header, None, kv)

    def restore(self, kv: torch.Tensor) -> None:
        """Fill ``kv`` with exactly the numbers that were stored. After an error its content is undefined.

        Args:
            kv: [2 * layers, page_size, heads, head_dim] or [2 * layers, page_size, channels], in host memory.
        """
        header = self._opened()
        self._check(self._anchors, header.anchor_checksum, "anchors")
        self._check(self._residuals, header.residual_checksum, "residuals")
        self._decode(header, _unpack(self._residuals, header.residuals), kv)
        # Raw numbers are bytes of the anchors, which were compared.
        if self.form.form != "raw" and _checksum_of_numbers(_numbers(kv, self)) != header.page_checksum:
            raise ObjectError(f"object {self.name}: the restored numbers are not those that were stored")

    def release(self) -> None:
        """Free the memory of the bytes that were read."""
        self._header = None
        self._first = self._anchors = self._residuals = torch.empty(0, dtype=torch.uint8)

    def _opened(self) -> ObjectHeader:
        if self._header is None:
            raise ObjectError(f"object {self.name} was not opened; fill its first range, and call open")
        return self._header

    def _ranges(self, offset: int, memory: torch.Tensor) -> list[ReadRange]:
        self._opened()
        return [ReadRange(self.name, offset, _view(memory))] if len(memory) else []

    def _check(self, content: torch.Tensor, expected: bytes, what: str) -> None:
        if xxhash.xxh3_128_digest(_view(content)) != expected:
            raise ObjectError(f"object {self.name}: the checksum of its {what} differs")

    @torch.inference_mode()
    def _decode(self, header: ObjectHeader, residuals: list[torch.Tensor] | None, kv: torch.Tensor) -> None:
        numbers = _numbers(kv, self)
        if self.form.form == "raw":
            np.copyto(numbers, self._anchors.numpy().reshape(self.form.tensors, -1)[:, HEADER : self.layout.raw_bytes])
            return
        try:
            decode_page(_unpack(self._anchors, header.anchors), residuals, self.layout, kv.unbind())
        except (ValueError, IndexError, RuntimeError) as error:
            raise ObjectError(f"object {self.name}: its streams are not those of a page: {error}") from error


def encode_object(page: StoredPage, kv: torch.Tensor) -> list[memoryview]:
    """Encode a page to the parts of its object, none of them empty, for ``StoreBackend.put``. Equal pages have equal bytes.

    Args:
        page: The page, with its name.
        kv: [2 * layers, page_size, heads, head_dim] or [2 * layers, page_size, channels], in host memory. Numbers need not be finite.

    Raises:
        ValueError: The KV does not fit the page's format.
    """
    numbers, layout, residuals = _numbers(kv, page), page.layout, torch.empty(0, dtype=torch.uint8)
    if page.form.form == "raw":
        streams = StreamBatch.empty(page.form.tensors, layout.raw_bytes, kv.device)
        rows = streams.rows.numpy()
        rows[:, :HEADER] = 0
        rows[:, 0] = RAW
        np.copyto(rows[:, HEADER:], numbers)
        anchors = streams.memory
        anchor_sizes, residual_sizes = (layout.raw_bytes,) * page.form.tensors, (0,) * page.form.tensors
    else:
        streams = encode_page(kv.unbind(), layout)
        anchors, residuals = (_pack(each) for each in zip(*streams, strict=True))
        anchor_sizes, residual_sizes = (tuple(map(len, each)) for each in zip(*streams))
    header = ObjectHeader(
        anchor_sizes,
        residual_sizes,
        xxhash.xxh3_128_digest(_view(anchors)),
        xxhash.xxh3_128_digest(_view(residuals)),
        _checksum_of_numbers(numbers),
    )
    return [memoryview(header.encode(page)), _view(anchors)] + ([_view(residuals)] if len(residuals) else [])


def read_page(backend: StoreBackend, page: StoredPage, kv: torch.Tensor, exact: bool = True) -> None:
    """Read one page to ``kv``: exactly, or the numbers of its anchors alone. See :meth:`StoredPage.restore`.

    Raises:
        ObjectError: The store lacks the object or fails, or the object does not restore the page.
    """
    try:
        fetch_page(backend, page, exact)
    except StoreError as error:
        raise ObjectError(str(error)) from error
    if exact:
        page.restore(kv)
    else:
        page.decode_anchors(kv)


def fetch_page(backend: StoreBackend, page: StoredPage, exact: bool = True) -> None:
    """Read the bytes of a page, or of its anchors alone, so that it can be restored.

    Raises:
        ObjectError: The store lacks the object, or its header is not that of the page.
        StoreError: The store fails.
    """
    _fill(backend, [page.first_range()])
    page.open()
    _fill(backend, page.anchor_ranges() + (page.residual_ranges() if exact else []))


def fetch_residuals(backend: StoreBackend, page: StoredPage) -> None:
    """Read the residuals of a page whose anchors were read. Raises as :func:`fetch_page`."""
    _fill(backend, page.residual_ranges())


def _fill(backend: StoreBackend, ranges: list[ReadRange]) -> None:
    filled = backend.read(ranges) if ranges else []
    if not all(filled):
        raise ObjectError(f"object {ranges[filled.index(False)].name} is missing or shorter than its header says")


def _numbers(kv: torch.Tensor, page: StoredPage) -> np.ndarray:
    """The numbers of a page's KV as bytes, uint8 [2 * layers, bytes]: a view.

    Raises:
        ValueError: The KV does not fit the page's format, or the numbers of a layer are not contiguous.
    """
    form, shape = page.form, (page.form.tensors, page.form.page_size * page.form.heads * page.form.head_dim)
    if kv.dtype != form.dtype or len(kv) != shape[0] or kv[0].numel() != shape[1] or kv.shape[1] != form.page_size or not kv[0].is_contiguous():
        raise ValueError(
            f"{kv.dtype} {tuple(kv.shape)}: pass {form.dtype} [{shape[0]}, {form.page_size}, {form.heads}, {form.head_dim}], whose parts are contiguous"
        )
    return kv.view(shape).view(torch.uint8).numpy()


def _packed_size(sizes: Sequence[int]) -> int:
    return sum(map(aligned, sizes))


def _pack(streams: Sequence[torch.Tensor]) -> torch.Tensor:
    """Streams one after another, each at a multiple of ``ALIGNMENT``, with zeros between: uint8 [bytes]."""
    packed = torch.zeros(_packed_size([len(stream) for stream in streams]), dtype=torch.uint8)
    for stream, place in zip(streams, _unpack(packed, [len(stream) for stream in streams]), strict=True):
        place.copy_(stream)
    return packed


def _unpack(packed: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The streams of :func:`_pack`, as views."""
    places = packed.split([aligned(size) for size in sizes])
    return [place[:size] for place, size in zip(places, sizes, strict=True)]


def _view(memory: torch.Tensor) -> memoryview:
    return memoryview(memory.numpy())


def _checksum_of_numbers(numbers: np.ndarray) -> bytes:
    """xxh3_128 of all bytes of :func:`_numbers`, in order."""
    found = xxhash.xxh3_128()
    for row in numbers:
        found.update(row)
    return found.digest()
