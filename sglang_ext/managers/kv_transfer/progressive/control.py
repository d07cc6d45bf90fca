"""Control messages between the managers of two servers, over the sockets of SGLang's control plane. They are msgspec structs with bounds;
nothing is unpickled.

The decode side sends the destination of a room. Either side sends the end of a room. KV bytes are sent over links only.
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
    """The decode side has allocated slots for a room and registered it with its link server.

    Attributes:
        version: ``VERSION`` of the decode side. The fields stay the same in all versions, so that any two versions can refuse each other.
        room: SGLang's ``bootstrap_room`` of the request.
        host, port: Address of the decode rank's control socket, for replies.
        endpoint: Endpoint of its link server.
        settings: ``LinkSettings`` of its end of links in MessagePack, in that version's format.
        aux_sizes: Bytes per row of each buffer of an auxiliary record, then the maximum bytes of the queries that may follow it
            (prompt_queries.py).
        prefix: Prompt tokens whose KV the decode side already has.
        tokens: Prompt tokens.
        link_room: Random number of this attempt to receive the room. Several requests may have the same room, so links and all later
            messages name the attempt by this number.
        coded: Begin and end of the prompt tokens to transfer as quantized KV, in whole blocks. Equal if there are none.
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
        link_room: Number of the attempt. Its metadata may not have been sent.
    """

    room: Room
    reason: Reason
    link_room: Room = 0


class Failed(Message, tag="failed"):
    """The prefill side stops sending a room, or never started.

    Attributes:
        link_room: Number of the attempt that it ends.
    """

    room: Room
    reason: Reason
    link_room: Room = 0


def retry_room(room: int, rid: str) -> int:
    """Return the room in which a request is prefilled again, 1 to 2**63 - 1; the same on all ranks.

    The first sender may still wait in the old room, where it would be matched with the attempt for the new sender. The outputs of a request
    with ``n`` > 1 share a room. Prefilled again, each gets its own room, derived from ``rid``.
    """
    digest = hashlib.blake2b(f"{room} {rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (1 << 63) or 1


Control = RoomMetadata | Abort | Failed
_decoder = msgspec.msgpack.Decoder(Control)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> Control:
    """Decode a message of another manager.

    Raises:
        WireError: The data is too long, or is not a message of this version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a control message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are read: the peer speaks another protocol")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no control message of version {VERSION}: {error}; use backend progressive on both sides") from error
