"""Messages between an inference rank and a cache rank: what is one, and what is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_helpers import attach

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.kv_transfer.wire import WireError, encode

TO_RANK = (
    attach(),
    protocol.Lease(1, 0, (3, 4)),
    protocol.Append((protocol.KeyPiece(3, 60, 4, 7), protocol.KeyPiece(4, 0, 64, 1)), 5),
    protocol.SelectionRequest(0, 4, 2, 9, 300, 64, (298, 299)),
    protocol.Free(1),
    protocol.RankPing(1),
)
FROM_RANK = (
    protocol.Attached(2, 0.001),
    protocol.AttachRefused(2, "of another version"),
    protocol.SelectionReply(2, 0, 4, 2, 9, True, 0.5),
    protocol.PlacesFreed(2, (7,)),
    protocol.Heartbeat(2),
)


@pytest.mark.parametrize("message", TO_RANK, ids=lambda message: type(message).__name__)
def test_what_a_rank_is_told_arrives(message):
    assert protocol.decode_to_rank(encode(message)) == message
    with pytest.raises(WireError):
        protocol.decode_from_rank(encode(message))


@pytest.mark.parametrize("message", FROM_RANK, ids=lambda message: type(message).__name__)
def test_what_a_rank_says_arrives(message):
    assert protocol.decode_from_rank(encode(message)) == message
    with pytest.raises(WireError):
        protocol.decode_to_rank(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        protocol.Lease(protocol.MAX_LANES, 0, ()),
        protocol.Lease(0, 0, (protocol.MOST_BLOCKS,)),
        protocol.Append((protocol.KeyPiece(0, 64, 1, 0),)),
        protocol.Append((protocol.KeyPiece(0, 0, 1, 0), protocol.KeyPiece(0, 0, 65, 0))),
        protocol.Append(()),
        protocol.SelectionRequest(0, 0, 1, 0, 10, 1, (9,)),
        protocol.SelectionRequest(0, 0, 1, 1, 10, 1, ()),
        protocol.SelectionRequest(0, 0, 1, 1, 10, 1, tuple(range(protocol.MOST_WINDOW + 1))),
        msgspec.structs.replace(attach(), shape=msgspec.structs.replace(attach().shape, dtype="object")),
    ],
    ids=str,
)
def test_numbers_beyond_their_bounds_are_no_message(message):
    with pytest.raises(WireError):
        protocol.decode_to_rank(encode(message))


def test_a_message_longer_than_any_is_refused_before_it_is_read():
    with pytest.raises(WireError, match=f"{protocol.MAX_MESSAGE_BYTES + 1} bytes; at most {protocol.MAX_MESSAGE_BYTES} are read"):
        protocol.decode_to_rank(bytes(protocol.MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for decode in (protocol.decode_to_rank, protocol.decode_from_rank):
        try:
            decode(data)
        except WireError:
            continue


@given(st.sampled_from(TO_RANK), st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_another_message_or_a_protocol_error(message, place, flip):
    data = bytearray(encode(message))
    data[place % len(data)] ^= flip
    try:
        found = protocol.decode_to_rank(bytes(data))
    except WireError:
        return
    assert isinstance(found, protocol.ToRank)
