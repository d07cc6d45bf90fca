"""The wire format of a link: msgspec structs in MessagePack, tagged, with bounds on each field; nothing is unpickled.

A message is one ZMQ frame, and a ``Frame`` two: its struct, and bytes of a part. Arrays, not maps: the order of fields is the
format. Whatever changes bytes counts ``VERSION`` up (tests/unit/managers/disaggregation/golden pins them).
"""

from enum import StrEnum
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from sglang_ext.managers.kv_transfer.page_hashes import HASH_BYTES
from sglang_ext.managers.kv_transfer.link_settings import LinkSettings, Name

VERSION = 2
# Bytes: of a frame's payload, and of a part.
MAX_FRAME_BYTES, MAX_PART_BYTES = 1 << 22, 1 << 28
# Of a message as libzmq counts it: with what CURVE adds, 33 bytes. It drops the connection of a longer one.
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 1024
# What a frame costs of the receiver's window beside its payload.
FRAME_OVERHEAD = 512
# Parts of a stream of one room, and acknowledgements in one message.
MAX_PARTS, MAX_ACKS = 1 << 20, 4096

Room = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
LayerIndex = Annotated[int, Meta(ge=0, le=4096)]
Size = Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
Reason = Annotated[str, Meta(max_length=2048)]
Bitmap = Annotated[bytes, Meta(max_length=MAX_PARTS // 8)]


class WireError(ValueError):
    """Bytes that are no message of this version."""


class Stream(StrEnum):
    """What a part is of, in the order in which a room's parts go."""

    ANCHOR = "anchor"
    AUX = "aux"
    RESIDUAL = "residual"


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all messages are."""


class LayerRange(Message):
    """Layers ``first`` to ``first + count``, counted in those that the rank moves."""

    first: LayerIndex
    count: Annotated[int, Meta(ge=1, le=4096)]


class RoomShape(Message):
    """Which parts a room has.

    Attributes:
        pages: of the codec, counted from the first that travels; 0 where decode has all KV already.
        layer_ranges: each page travels in a part for each of them.
        residual, aux: whether there are residuals, and an auxiliary record.
    """

    pages: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    layer_ranges: Annotated[tuple[LayerRange, ...], Meta(min_length=1, max_length=256)]
    residual: bool = True
    aux: bool = True

    def __post_init__(self) -> None:
        if self.pages * len(self.layer_ranges) > MAX_PARTS:
            raise ValueError(f"{self.pages} pages in {len(self.layer_ranges)} ranges of layers; a room has at most {MAX_PARTS} parts")
        if len({layers.first for layers in self.layer_ranges}) < len(self.layer_ranges):
            raise ValueError(f"{self.layer_ranges}: each range of layers starts at a layer of its own")

    def parts(self, stream: Stream) -> int:
        """How many parts a stream has."""
        if stream is Stream.AUX:
            return int(self.aux)
        return self.pages * len(self.layer_ranges) if stream is Stream.ANCHOR or self.residual else 0

    def part(self, stream: Stream, page: int, layers: LayerRange) -> int | None:
        """A part's number in its stream; None where the room has no such part."""
        if stream is Stream.AUX:
            return 0 if self.aux and page == 0 else None
        if not 0 <= page < self.pages or layers not in self.layer_ranges or not self.parts(stream):
            return None
        return page * len(self.layer_ranges) + self.layer_ranges.index(layers)


class PageHeader(Message):
    """What a part is.

    Attributes:
        room: of the request.
        stream: anchor, residual or aux.
        page: counted from the first page that travels; 0 for aux.
        layers: whose KV it is; for aux they say nothing.
        rank: the sender's.
        codec: what wrote the bytes.
        size: bytes of the part.
        prefix_hash: of the tokens up to the page's end (page_hashes.py), 32 bytes; empty where none is kept.
        checksum: xxh3_64 of this header with checksum 0, then of the part's bytes.
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
        """The checksum's beginning: of the header alone, to be updated with the part's bytes."""
        return xxhash.xxh3_64(encode(msgspec.structs.replace(self, checksum=0)))

    def sealed(self, payload: memoryview | bytes) -> "PageHeader":
        """This header with the checksum of ``payload``, the part's bytes."""
        digest = self.digest()
        digest.update(payload)
        return msgspec.structs.replace(self, checksum=digest.intdigest())


class Hello(Message, tag="hello"):
    """First message of a connection. Its fields stay as they are in all versions, so that any two can refuse each other.

    Attributes:
        protocol: ``VERSION`` of the sender.
        link: of this sender and this receiver, random; the same when the sender connects again.
        settings: a ``LinkSettings`` in MessagePack, of that version.
    """

    protocol: Annotated[int, Meta(ge=0, le=1 << 31)]
    link: Annotated[bytes, Meta(min_length=16, max_length=16)]
    settings: Annotated[bytes, Meta(max_length=1 << 16)]


class Open(Message, tag="open"):
    """The sender has parts for a room, or had before the connection broke: what of them is there?"""

    room: Room
    shape: RoomShape


class Frame(Message, tag="frame"):
    """Bytes of a part, from ``offset``: they follow in a ZMQ frame of their own."""

    header: PageHeader
    offset: Size


class Cancel(Message, tag="cancel"):
    """The sender sends no more of a room."""

    room: Room
    reason: Reason


class Ping(Message, tag="ping"):
    """Is somebody there?"""


class Welcome(Message, tag="welcome"):
    """The answer to Hello: the sender may have ``window`` bytes under way."""

    window: Annotated[int, Meta(ge=1, le=1 << 32)]


class Refused(Message, tag="refused"):
    """This sender is not served; connecting again does not help."""

    reason: Reason


class HelloFirst(Message, tag="hello-first"):
    """The receiver cannot follow: connect again, and send what it has not."""

    reason: Reason


class Have(Message, tag="have"):
    """The answer to Open: parts that are there, a bit each, the lowest bit first."""

    room: Room
    anchors: Bitmap
    residuals: Bitmap
    aux: bool

    @classmethod
    def all_of(cls, room: int, shape: RoomShape) -> "Have":
        """Of a room of which all is there."""
        counts = shape.parts(Stream.ANCHOR), shape.parts(Stream.RESIDUAL)
        anchors, residuals = (((1 << count) - 1).to_bytes(-(-count // 8), "little") for count in counts)
        return cls(room, anchors, residuals, shape.aux)


class Acked(Message, tag="acked"):
    """A part that was checked and written."""

    room: Room
    stream: Stream
    part: Index


class Received(Message, tag="received"):
    """Bytes that may be sent beyond those granted before, and parts that are there."""

    granted: Annotated[int, Meta(ge=0, le=1 << 32)]
    acked: Annotated[tuple[Acked, ...], Meta(max_length=MAX_ACKS)]


class Retransmit(Message, tag="again"):
    """A part whose checksum was wrong: send it once more."""

    room: Room
    stream: Stream
    part: Index


class Ended(Message, tag="ended"):
    """The receiver takes no more of a room: unknown, aborted or failed."""

    room: Room
    reason: Reason


class Pong(Message, tag="pong"):
    """Somebody is there."""


FromSender = Hello | Open | Frame | Cancel | Ping
FromReceiver = Welcome | Refused | HelloFirst | Have | Received | Retransmit | Ended | Pong
_from_sender = msgspec.msgpack.Decoder(FromSender)
_from_receiver = msgspec.msgpack.Decoder(FromReceiver)
_settings = msgspec.msgpack.Decoder(LinkSettings)
encode = msgspec.msgpack.Encoder().encode


def decode_from_sender(data: bytes | memoryview) -> FromSender:
    """What a sender said.

    Raises:
        WireError: it is too long, or no message of a sender.
    """
    return _decode(_from_sender, data)


def decode_from_receiver(data: bytes | memoryview) -> FromReceiver:
    """What a receiver said.

    Raises:
        WireError: it is too long, or no message of a receiver.
    """
    return _decode(_from_receiver, data)


def decode_settings(data: bytes) -> LinkSettings:
    """The settings of a Hello of this version.

    Raises:
        WireError: they are none.
    """
    return _decode(_settings, data)


def _decode(decoder: msgspec.msgpack.Decoder, data: bytes | memoryview):
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read: the peer speaks another protocol")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no message of version {VERSION}: {error}") from error
