"""The wire format of a link: tagged msgspec structs in MessagePack, with bounds on each field. Nothing is unpickled.

Also the settings that both ends must agree on before any KV is transferred, and the error that names the difference.

A message is one ZMQ frame; a ``Frame`` is two: its struct, and bytes of a part. Structs are encoded as arrays, so the order of their fields
is part of the format. A change of the encoded bytes must increment ``VERSION`` (tests/unit/managers/kv_transfer/golden pins them).
"""

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta, Struct

from sglang_ext.core import CODES_PREFIX

VERSION = 2
# Maximum bytes of a frame's payload, and of a part.
MAX_FRAME_BYTES, MAX_PART_BYTES = 1 << 22, 1 << 28
# Maximum bytes of a message as libzmq counts it, including the 33 bytes that CURVE adds. libzmq drops the connection of a longer message.
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 1024
# Bytes of the receiver's window that a frame uses in addition to its payload.
FRAME_OVERHEAD = 512
# Maximum of parts in a stream of one room, and of acknowledgements in one message.
MAX_PARTS, MAX_ACKS = 1 << 20, 4096

# Bytes of a hash.
HASH_BYTES = 32

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
OptionValue = bool | Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | float | Annotated[str, Meta(max_length=128)]
Room = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
LayerIndex = Annotated[int, Meta(ge=0, le=4096)]
Size = Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
Reason = Annotated[str, Meta(max_length=2048)]
Bitmap = Annotated[bytes, Meta(max_length=MAX_PARTS // 8)]


class LinkError(Exception):
    """A link, or a room on it, cannot work. The message has the value, the allowed values and the remedy."""


class WireError(ValueError):
    """The data is not a message of this version, or the message cannot be followed."""


class LinkSettings(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Settings of one end of a link. Both ends' settings must be equal.

    Attributes:
        model_key: Key of the model's weights (mem_cache/scores.py).
        pool_dtype: Dtype of SGLang's KV pool, such as ``bfloat16``.
        layers, kv_heads: Layers and KV heads of this rank.
        key_dim, value_dim: Elements of a head.
        page_size: Tokens in a page of the codec; the last page of a request may hold fewer.
        codec, codec_version: Codec that encodes the pages.
        codec_options: Options of the codec that change its bytes, by name.
        reference: What anchor and residual together restore: ``int8`` the codec's 8-bit reconstruction, ``exact`` the pool's bits, ``raw``
            KV without a codec, ``lossy`` an approximation.
        tp_rank, tp_size: Tensor parallel rank and size of both ends.
    """

    model_key: Name
    pool_dtype: Name
    layers: Count
    kv_heads: Count
    key_dim: Count
    value_dim: Count
    page_size: Count
    codec: Name
    codec_version: Count
    codec_options: Annotated[dict[Name, OptionValue], Meta(max_length=32)]
    reference: Literal["int8", "exact", "raw", "lossy"]
    tp_rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    tp_size: Count


class Stream(StrEnum):
    """The stream of a part, in the order in which a room's streams are sent."""

    ANCHOR = "anchor"
    AUX = "aux"
    RESIDUAL = "residual"


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of all messages."""


class LayerRange(Message):
    """Layers ``first`` to ``first + count``, counted among the layers that the rank transfers."""

    first: LayerIndex
    count: Annotated[int, Meta(ge=1, le=4096)]


class RoomShape(Message):
    """The parts of a room.

    Attributes:
        pages: Pages of the codec, counted from the first page that is transferred; 0 if the decode side has all KV already.
        layer_ranges: Each page has one part for each range.
        residual, aux: Whether there are residuals, and an auxiliary record.
    """

    pages: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    layer_ranges: Annotated[tuple[LayerRange, ...], Meta(min_length=1, max_length=256)]
    residual: bool = True
    aux: bool = True

    def __post_init__(self) -> None:
        if self.pages * len(self.layer_ranges) > MAX_PARTS:
            raise ValueError(f"{self.pages} pages in {len(self.layer_ranges)} ranges of layers; a room has at most {MAX_PARTS} parts")
        if len({layers.first for layers in self.layer_ranges}) < len(self.layer_ranges):
            raise ValueError(f"{self.layer_ranges}: two ranges of layers must not start at the same layer")

    def parts(self, stream: Stream) -> int:
        """Return the number of parts in a stream."""
        if stream is Stream.AUX:
            return int(self.aux)
        return self.pages * len(self.layer_ranges) if stream is Stream.ANCHOR or self.residual else 0

    def part(self, stream: Stream, page: int, layers: LayerRange) -> int | None:
        """Return a part's number in its stream; None if the room has no such part."""
        if stream is Stream.AUX:
            return 0 if self.aux and page == 0 else None
        if not 0 <= page < self.pages or layers not in self.layer_ranges or not self.parts(stream):
            return None
        return page * len(self.layer_ranges) + self.layer_ranges.index(layers)


class PageHeader(Message):
    """Header of a part of ``size`` bytes, which ``codec`` encoded on ``rank``.

    Attributes:
        page: Index of the page, counted from the first page that is transferred; 0 for aux.
        layers: Layers of the KV; meaningless for aux.
        prefix_hash: Hash of the tokens up to the page's end (page_codec.py), 32 bytes; empty if there is none.
        checksum: xxh3_64 of this header with checksum 0, followed by the part's bytes.
    """

    room: Room
    stream: Stream
    page: Index
    layers: LayerRange
    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    codec: Name
    size: Size
    prefix_hash: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    checksum: Annotated[int, Meta(ge=0)] = 0

    def digest(self) -> xxhash.xxh3_64:
        """Return the checksum state of the header alone, to be updated with the part's bytes."""
        return xxhash.xxh3_64(encode(msgspec.structs.replace(self, checksum=0)))

    def sealed(self, payload: memoryview | bytes) -> "PageHeader":
        """Return this header with the checksum of ``payload``, the part's bytes."""
        digest = self.digest()
        digest.update(payload)
        return msgspec.structs.replace(self, checksum=digest.intdigest())


class Hello(Message, tag="hello"):
    """First message of a connection. Its fields stay the same in all versions, so that any two versions can refuse each other.

    Attributes:
        protocol: ``VERSION`` of the sender.
        link: Random id of this sender's link to this receiver; the same after a reconnection.
        settings: ``LinkSettings`` in MessagePack, of that version.
    """

    protocol: Annotated[int, Meta(ge=0, le=1 << 31)]
    link: Annotated[bytes, Meta(min_length=16, max_length=16)]
    settings: Annotated[bytes, Meta(max_length=1 << 16)]


class Open(Message, tag="open"):
    """The sender has parts for a room, or had before the connection broke. It asks which parts the receiver has."""

    room: Room
    shape: RoomShape


class Frame(Message, tag="frame"):
    """Bytes of a part, from ``offset``. They follow in a second ZMQ frame."""

    header: PageHeader
    offset: Size


class Cancel(Message, tag="cancel"):
    """The sender sends nothing more of a room."""

    room: Room
    reason: Reason


class Ping(Message, tag="ping"):
    """Asks for a Pong."""


class Welcome(Message, tag="welcome"):
    """Reply to Hello: the sender may have ``window`` bytes in flight."""

    window: Annotated[int, Meta(ge=1, le=1 << 32)]


class Refused(Message, tag="refused"):
    """The receiver does not serve this sender. Reconnecting does not help."""

    reason: Reason


class HelloFirst(Message, tag="hello-first"):
    """The receiver got an unexpected message. The sender must reconnect and send the missing parts."""

    reason: Reason


class Have(Message, tag="have"):
    """Reply to Open: the parts that the receiver has, as bitmaps with the lowest bit first."""

    room: Room
    anchors: Bitmap
    residuals: Bitmap
    aux: bool

    @classmethod
    def of(cls, room: int, shape: RoomShape, parts: Mapping[Stream, Collection[int]]) -> "Have":
        """Return the message for a room of which the parts with these numbers are here."""
        bitmaps = []
        for stream in (Stream.ANCHOR, Stream.RESIDUAL):
            bitmaps.append(bitmap := bytearray(-(-shape.parts(stream) // 8)))
            for number in parts[stream]:
                bitmap[number // 8] |= 1 << number % 8
        return cls(room, *map(bytes, bitmaps), len(parts[Stream.AUX]) > 0)

    def parts(self) -> dict[Stream, set[int]]:
        """Return the numbers of the parts."""
        anchors, residuals = (
            {8 * place + bit for place, byte in enumerate(bitmap) for bit in range(8) if byte >> bit & 1}
            for bitmap in (self.anchors, self.residuals)
        )
        return {Stream.ANCHOR: anchors, Stream.RESIDUAL: residuals, Stream.AUX: {0} if self.aux else set()}


class Acked(Message, tag="acked"):
    """A part that was checked and written."""

    room: Room
    stream: Stream
    part: Index


class Received(Message, tag="received"):
    """Grants bytes in addition to earlier grants, and acknowledges parts."""

    granted: Annotated[int, Meta(ge=0, le=1 << 32)]
    acked: Annotated[tuple[Acked, ...], Meta(max_length=MAX_ACKS)]


class Retransmit(Message, tag="again"):
    """A part had a wrong checksum and must be sent again."""

    room: Room
    stream: Stream
    part: Index


class Ended(Message, tag="ended"):
    """The receiver accepts nothing more of a room: it is unknown, aborted or failed."""

    room: Room
    reason: Reason


class Pong(Message, tag="pong"):
    """Reply to Ping."""


FromSender = Hello | Open | Frame | Cancel | Ping
FromReceiver = Welcome | Refused | HelloFirst | Have | Received | Retransmit | Ended | Pong
encode = msgspec.msgpack.Encoder().encode


def make_decoder(kind: Any, name: str, version: int, most: int, remedy: str = "") -> Callable[[bytes | memoryview], Any]:
    """Return a function that decodes messages of a kind, of at most ``most`` bytes. It raises :class:`WireError` for other data."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes | memoryview) -> Any:
        if len(data) > most:
            raise WireError(f"a {name} of {len(data)} bytes; at most {most} are read: the peer speaks another protocol")
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(f"no {name} of version {version}: {error}{remedy}") from error

    return decode


decode_from_sender: Callable[[bytes | memoryview], FromSender] = make_decoder(FromSender, "message", VERSION, MAX_MESSAGE_BYTES)
decode_from_receiver: Callable[[bytes | memoryview], FromReceiver] = make_decoder(FromReceiver, "message", VERSION, MAX_MESSAGE_BYTES)
# Settings of a Hello of this version.
decode_settings: Callable[[bytes], LinkSettings] = make_decoder(LinkSettings, "message", VERSION, MAX_MESSAGE_BYTES)

# Reference of codecs for benchmarks: no stream restores the original KV.
LOSSY = "lossy"
_SAME_CODES = (
    "give both servers the same --kv-mode lossy, --kv-compressor, --kv-more-compressors, --kv-bits, --kv-partition and --kv-prefill, or "
    "neither: prompts are transferred as quantized KV"
)
_SAME_CODEC = "start both servers with the same --kv-reference, and the same --kv-bench-codec where one has it"
_REMEDIES = {
    "model_key": "serve the same weights on both sides",
    "pool_dtype": "give both servers the same --dtype and the same --kv-cache-dtype",
    "layers": "serve the same model on both sides, with the same pipeline ranks",
    "kv_heads": "give both servers the same --tp-size",
    "key_dim": "serve the same model on both sides",
    "value_dim": "serve the same model on both sides",
    "page_size": "install the same version of sglang-ext on both sides, which gives equal pools equal pages",
    "codec": _SAME_CODEC,
    "codec_version": "install the same version of sglang-ext on both sides",
    "codec_options": _SAME_CODEC,
    "reference": _SAME_CODEC,
    "tp_rank": "connect each rank to the receiver of its own rank",
    "tp_size": "give both servers the same --tp-size",
}


def settings_mismatch(here: LinkSettings, peer: LinkSettings) -> str | None:
    """Return why a peer is refused: the first field that differs, both values and the remedy; None if all are equal."""
    # The page size is compared last, because it follows from other fields.
    for field in sorted(LinkSettings.__struct_fields__, key="page_size".__eq__):
        ours, theirs = getattr(here, field), getattr(peer, field)
        if ours != theirs:
            remedy = _REMEDIES[field]
            if field == "codec_options":
                remedy = options_mismatch(ours, theirs)
                ours, theirs = ({name: each.get(name) for name in _differing_options(ours, theirs)} for each in (ours, theirs))
            return f"{field} is {ours!r} at the receiver and {theirs!r} at the sender; {remedy}"
    return None


def _differing_options(ours: dict[str, OptionValue], theirs: dict[str, OptionValue]) -> list[str]:
    return [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]


def options_mismatch(ours: dict[str, OptionValue], theirs: dict[str, OptionValue]) -> str:
    """Return which options differ, and the remedy."""
    names = _differing_options(ours, theirs)
    coded = all(name.startswith(CODES_PREFIX) for name in names)
    return f"{', '.join(names)}: {_SAME_CODES if coded else _REMEDIES['codec_options']}"


def version_mismatch(here: int, peer: int) -> str | None:
    """Return why a peer with another version of the wire format is refused; None if equal. Checked before all settings."""
    if here == peer:
        return None
    return f"protocol is {here} at the receiver and {peer} at the sender; install the same version of sglang-ext on both sides"
