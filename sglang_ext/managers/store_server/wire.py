"""Messages between a store process and its clients: tagged msgspec structs in MessagePack, with bounds on each field.

A message is one ZMQ frame. Bytes of objects follow in further frames: one after ``ObjectPart``, and one after ``Content`` for each filled range.
A change of the encoded bytes must increment ``VERSION``.
"""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from sglang_ext.managers.kv_transfer.wire import (
    MAX_FRAME_BYTES,
    Message,
    Reason,
    make_decoder,
)
from sglang_ext.mem_cache.prefix_store.backend import MAX_OBJECT_BYTES, NAME

VERSION = 2
MAX_NAMES, MAX_RANGES, MAX_LISTED = 4096, 256, 4096
"""Most names of one request, ranges of one read, and objects of one page of a listing."""
FRAME_BYTES = MAX_FRAME_BYTES
"""Bytes of a frame that this version sends. Smaller frames cost time: with 1 MiB, reads had .4 of ZMQ's rate instead of .67."""
MAX_READ_BYTES = MAX_FRAME_BYTES
"""Most bytes that one read asks for."""
MAX_REQUEST_BYTES = 1 << 20
"""Most bytes of a message without the bytes of objects."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
ObjectName = Annotated[str, Meta(max_length=129, pattern=rf"^{NAME.pattern}\Z")]
ObjectSize = Annotated[int, Meta(ge=1, le=MAX_OBJECT_BYTES)]
Names = Annotated[tuple[ObjectName, ...], Meta(max_length=MAX_NAMES)]


class StoreHello(Message, tag="store-hello"):
    """First message of a connection, with the client's ``VERSION``. Its fields stay the same in all versions."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 31)]


class Put(Message, tag="put"):
    """Asks to store an object. Replaces an unfinished one of this connection. The answer is 0 if the store has it, else 1."""

    request: Number
    name: ObjectName
    size: ObjectSize


class ObjectPart(Message, tag="part"):
    """Bytes of the object of ``Put`` from ``offset``, in a second frame. The last part is answered when the object is stored.

    The answer is the number of bytes so far. After the last part it is 1, or 0 if another client stored the object first.
    """

    request: Number
    offset: Annotated[int, Meta(ge=0, lt=MAX_OBJECT_BYTES)]


class Count(Message, tag="count"):
    """Asks how many leading names the store has."""

    request: Number
    names: Names


class ByteRange(Message):
    """Bytes ``offset`` to ``offset + size`` of an object."""

    name: ObjectName
    offset: Annotated[int, Meta(ge=0, lt=MAX_OBJECT_BYTES)]
    size: Annotated[int, Meta(ge=1, le=MAX_READ_BYTES)]


class Read(Message, tag="read"):
    """Asks for ranges of at most :data:`MAX_READ_BYTES` together."""

    request: Number
    ranges: Annotated[tuple[ByteRange, ...], Meta(min_length=1, max_length=MAX_RANGES)]

    def __post_init__(self) -> None:
        size = sum(each.size for each in self.ranges)
        if size > MAX_READ_BYTES:
            raise ValueError(f"a read of {size} bytes; at most {MAX_READ_BYTES} are read at once")


class Delete(Message, tag="delete"):
    """Asks to delete objects. The answer is 0."""

    request: Number
    names: Names


class List(Message, tag="list"):
    """Asks for the first objects of a listing, or for those after the last ones that this connection got."""

    request: Number
    first: bool


class Statistics(Message, tag="statistics"):
    """Asks for ``Totals``."""

    request: Number


class StoreWelcome(Message, tag="store-welcome"):
    """Reply to ``StoreHello``: this connection may have ``outstanding`` requests without an answer."""

    outstanding: Annotated[int, Meta(ge=1, le=1024)]


class StoreRefused(Message, tag="store-refused"):
    """The store does not serve this client, or got an unexpected message. The connection is closed."""

    reason: Reason


class Answer(Message, tag="answer"):
    """Answer to ``Put``, ``ObjectPart``, ``Count`` and ``Delete``."""

    request: Number
    value: Number


class Waiting(Message, tag="waiting"):
    """The store is alive, and answers to reads of this connection wait for the rate limit. Comes between answers."""


class Content(Message, tag="content"):
    """Answer to ``Read``: which ranges follow, each in a frame."""

    request: Number
    filled: Annotated[tuple[bool, ...], Meta(max_length=MAX_RANGES)]


class Listed(Message):
    """An object of a listing: see ``StoredObject``."""

    name: ObjectName
    # A folder may hold a larger file, which is not read.
    size: Number
    used_at: float | None


class Listing(Message, tag="listing"):
    """Answer to ``List``. No objects: the listing has ended."""

    request: Number
    objects: Annotated[tuple[Listed, ...], Meta(max_length=MAX_LISTED)]


class Totals(Message, tag="totals"):
    """Answer to ``Statistics``: see ``StoreStatistics``."""

    request: Number
    objects: Number
    size: Number
    max_size: Number


class Failed(Message, tag="failed"):
    """Answer to a request that failed."""

    request: Number
    reason: Reason


Request = Put | ObjectPart | Count | Read | Delete | List | Statistics
Reply = Answer | Content | Listing | Totals | Failed
FromStore = StoreWelcome | StoreRefused | Waiting | Reply
decode_from_client: Callable[[bytes | memoryview], StoreHello | Request] = make_decoder(
    StoreHello | Request, "message to a prefix store", VERSION, MAX_REQUEST_BYTES
)
decode_from_store: Callable[[bytes | memoryview], FromStore] = make_decoder(FromStore, "message of a prefix store", VERSION, MAX_REQUEST_BYTES)
