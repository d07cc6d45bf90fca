"""The bytes of messages are pinned, bounded, and nothing else is read."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_helpers import LAYERS, SETTINGS, header, shape

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.wire import LayerRange, RoomShape, Stream, WireError

GOLDEN = Path(__file__).parent / "golden" / f"v{wire.VERSION}"
LINK = bytes(range(16))
PAYLOAD = bytes(range(200))
SENT = {
    "hello": wire.Hello(wire.VERSION, LINK, wire.encode(SETTINGS)),
    "open": wire.Open(7, RoomShape(3, (LayerRange(0, 15), LayerRange(15, 15)), residual=True, aux=False)),
    "frame": wire.Frame(header((1 << 63) - 1, Stream.RESIDUAL, PAYLOAD, page=300, prefix_hash=bytes(range(32))), 70),
    "cancel": wire.Cancel(7, "cancelled"),
    "ping": wire.Ping(),
}
ANSWERED = {
    "welcome": wire.Welcome(1 << 24),
    "refused": wire.Refused("page_size differs"),
    "hello-first": wire.HelloFirst("restarted"),
    "have": wire.Have(7, b"\x05", b"\x00", True),
    "received": wire.Received(1 << 20, (wire.Acked(7, Stream.ANCHOR, 0), wire.Acked(7, Stream.AUX, 0))),
    "again": wire.Retransmit(7, Stream.RESIDUAL, 5),
    "ended": wire.Ended(7, "unknown room"),
    "pong": wire.Pong(),
}
PAGE = header(7, Stream.ANCHOR, PAYLOAD, page=2, prefix_hash=bytes(range(32)))
# A page as it lies on the wire: header and bytes.
BYTES = {name: wire.encode(message) for name, message in (SENT | ANSWERED).items()} | {"page": wire.encode(PAGE) + PAYLOAD}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_change_only_with_the_version(name):
    """To pin a new version's: python -c "import test_wire; test_wire.pin()" beside this file, with tests/support on the path."""
    assert GOLDEN.is_dir(), f"version {wire.VERSION} has no golden files: pin them"
    assert BYTES[name] == (GOLDEN / f"{name}.bin").read_bytes(), f"the bytes of {name} changed: count wire.VERSION up, and pin them"


def test_each_message_is_pinned():
    def tags(union):
        return {kind.__struct_config__.tag for kind in union.__args__}

    assert set(SENT) == tags(wire.FromSender) and set(ANSWERED) == tags(wire.FromReceiver)
    assert {file.stem for file in GOLDEN.glob("*.bin")} == set(BYTES)


def test_pinned_bytes_are_read_back():
    for name, message in SENT.items():
        assert wire.decode_from_sender((GOLDEN / f"{name}.bin").read_bytes()) == message
    for name, message in ANSWERED.items():
        assert wire.decode_from_receiver((GOLDEN / f"{name}.bin").read_bytes()) == message
    assert wire.decode_settings(SENT["hello"].settings) == SETTINGS


def pin() -> None:
    """Write the golden files of a version that has none."""
    GOLDEN.mkdir(parents=True)
    for name, content in BYTES.items():
        (GOLDEN / f"{name}.bin").write_bytes(content)


def test_neither_side_reads_the_others_messages():
    with pytest.raises(WireError):
        wire.decode_from_sender(wire.encode(ANSWERED["welcome"]))
    with pytest.raises(WireError):
        wire.decode_from_receiver(wire.encode(SENT["hello"]))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_a_message(data):
    for decode in (wire.decode_from_sender, wire.decode_from_receiver):
        try:
            assert isinstance(decode(data), wire.Message)
        except WireError as error:
            assert str(error)


@given(st.sampled_from(sorted(SENT)), st.data())
def test_a_message_cut_short_is_refused_and_a_changed_one_never_raises_another_error(name, data):
    whole = BYTES[name]
    with pytest.raises(WireError):
        wire.decode_from_sender(whole[: data.draw(st.integers(0, len(whole) - 1))])
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    try:
        wire.decode_from_sender(changed)
    except WireError as error:
        assert str(error)


OUTSIDE = [
    ["open", -1, [1, [[0, 1]], True, True]],
    ["open", 1 << 63, [1, [[0, 1]], True, True]],
    ["open", 1, [1 << 20, [[0, 1]], True, True]],
    ["open", 1, [1, [], True, True]],
    ["open", 1, [1, [[0, 1]] * 257, True, True]],
    ["open", 1, [1, [[0, 0]], True, True]],
    ["open", 1, [1, [[0, 1], [0, 2]], True, True]],
    ["open", 1, [1 << 19, [[0, 1], [1, 1], [2, 1]], True, True]],
    ["open", 1, [1, [[0, 1]], True, True], "more"],
    ["cancel", 1, "x" * 2049],
    ["hello", 1, b"short", b""],
    ["hello", 1, LINK, bytes((1 << 16) + 1)],
    ["frame", [1, "neither", 0, [0, 1], 0, "lynx", 1, b"", 0], 0],
    ["frame", [1, "anchor", 0, [0, 1], 0, "lynx", (1 << 28) + 1, b"", 0], 0],
    ["frame", [1, "anchor", 0, [0, 1], 0, "", 1, b"", 0], 0],
    ["frame", [1, "anchor", 0, [0, 1], 0, "lynx", 1, bytes(33), 0], 0],
]


@pytest.mark.parametrize("fields", OUTSIDE, ids=lambda fields: str(fields)[:50])
def test_what_is_out_of_bounds_is_refused(fields):
    with pytest.raises(WireError, match="no message of version"):
        wire.decode_from_sender(msgspec.msgpack.encode(fields))


def test_a_long_message_is_not_read():
    with pytest.raises(WireError, match=f"at most {wire.MAX_MESSAGE_BYTES}"):
        wire.decode_from_sender(bytes(wire.MAX_MESSAGE_BYTES + 1))


@given(st.integers(0, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_parts_of_a_room_are_numbered_without_gaps(pages, ranges, residual, aux):
    layers = tuple(LayerRange(2 * number, 2) for number in range(ranges))
    room = RoomShape(pages, layers, residual, aux)
    numbers = [room.part(Stream.ANCHOR, page, one) for page in range(pages) for one in layers]
    assert numbers == list(range(room.parts(Stream.ANCHOR))) and room.parts(Stream.RESIDUAL) == residual * len(numbers)
    assert room.part(Stream.AUX, 0, layers[0]) == (0 if aux else None)
    assert room.part(Stream.ANCHOR, pages, layers[0]) is None and room.part(Stream.ANCHOR, 0, LayerRange(1, 2)) is None


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_checksum_covers_the_bytes_and_the_header(payload, data):
    sealed = header(7, Stream.ANCHOR, payload, page=2)
    digest = sealed.digest()
    digest.update(payload)
    assert digest.intdigest() == sealed.checksum
    for field, value in {"room": 8, "page": 3, "stream": Stream.RESIDUAL, "prefix_hash": b"x", "layers": LayerRange(1, 29)}.items():
        assert msgspec.structs.replace(sealed, **{field: value}).sealed(payload).checksum != sealed.checksum
    place = data.draw(st.integers(0, len(payload) - 1))
    changed = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
    assert sealed.sealed(changed).checksum != sealed.checksum


def test_a_room_of_one_range_has_as_many_parts_as_pages():
    assert shape(4).parts(Stream.ANCHOR) == 4 and shape(4).part(Stream.RESIDUAL, 3, LAYERS) == 3
