"""Messages between the managers of two servers, over the sockets of SGLang's control plane: msgspec structs with bounds, no pickle.

The decode side says where a room goes, and either side that it ends there. Bytes of KV travel over links alone.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_ext.managers.kv_transfer.wire import Message, Reason, Room, WireError

VERSION = 5
MAX_MESSAGE_BYTES = 1 << 16

Host = Annotated[str, Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]


class RoomMetadata(Message, tag="metadata"):
    """The decode side has slots for a room, and has registered it with its link server.

    Attributes:
        version: ``VERSION`` of the decode side. The fields stay as they are in all versions, so that any two can refuse each other.
        room: of the request.
        host, port: of the decode rank's socket for answers.
        endpoint: of its link server.
        settings: a ``LinkSettings`` of its end of links in MessagePack, of that version.
        aux_sizes: bytes of each row of an auxiliary record, and of the queries that may follow it (prompt_queries.py) at most.
        prefix: tokens of the prompt whose KV the decode side has.
        tokens: of the prompt.
        link_room: Random number of this attempt to receive the room. Several requests may have the same room, so links and all later
            messages name the attempt by this number.
        coded: where in the prompt the tokens begin and end that shall travel as codes, whole blocks; equal where none do.
    """

    version: Annotated[int, Meta(ge=0, le=1 << 31)]
    room: Room
    host: Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    endpoint: Annotated[str, Meta(min_length=1, max_length=512)]
    settings: Annotated[bytes, Meta(max_length=1 << 15)]
    aux_sizes: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 28)], ...], Meta(max_length=64)]
    prefix: Tokens
    tokens: Tokens
    link_room: Room = 0
    coded: tuple[Tokens, Tokens] = (0, 0)


class Abort(Message, tag="abort"):
    """The decode side has ended an attempt.

    Attributes:
        link_room: The attempt's. Its metadata may not have been sent.
    """

    room: Room
    reason: Reason
    link_room: Room = 0


class Failed(Message, tag="failed"):
    """The prefill side sends no more of a room, or never began.

    Attributes:
        link_room: Of the attempt that it ends.
    """

    room: Room
    reason: Reason
    link_room: Room = 0


def retry_room(room: int, rid: str) -> int:
    """Return the room in which a request is prefilled again, 1 to 2**63 - 1; the same on all ranks.

    The first sender may still wait in the old room. In this room it would be matched with the attempt for the new sender.
    The answers of a request with ``n`` > 1 share a room. Prefilled again, each gets its own room, by ``rid``.
    """
    digest = hashlib.blake2b(f"{room} {rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (1 << 63) or 1


Control = RoomMetadata | Abort | Failed
_decoder = msgspec.msgpack.Decoder(Control)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> Control:
    """What a manager said.

    Raises:
        WireError: it is too long, or no message of this version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a control message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read: the peer speaks another protocol")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no control message of version {VERSION}: {error}; use backend progressive on both sides") from error
