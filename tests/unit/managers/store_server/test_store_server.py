"""A store process and its clients: invalid messages, clients that die or read nothing, keys, restarts, and the objects that it holds."""

import hashlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.wire import MAX_MESSAGE_BYTES, Message, encode
from sglang_ext.managers.store_server import wire
from sglang_ext.managers.store_server.server import MAX_WAITING, StoreServer
from sglang_ext.mem_cache.prefix_store import object_cache
from sglang_ext.mem_cache.prefix_store.backend import (
    ReadRange,
    StoreBackend,
    StoreError,
    open_backend,
)
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.object_cache import ObjectCache
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object

FORM = ObjectFormat("a model", torch.float32, layers=2, heads=2, head_dim=64, page_size=64, form="raw")


def page(number: int) -> tuple[str, bytes]:
    """Name and bytes of an object: 132 kB."""
    kv = torch.full((FORM.tensors, 64, 2, 64), float(number))
    stored = StoredPage(FORM, hashlib.sha256(str(number).encode()).digest(), 64)
    return stored.name, b"".join(encode_object(stored, kv))


def put(store: StoreBackend, number: int) -> bool:
    name, content = page(number)
    return store.put(name, [memoryview(content)[:100], memoryview(content)[100:]])


def has(store: StoreBackend, number: int) -> bool:
    """Whether a store has a page, and its bytes are right."""
    name, content = page(number)
    memory = bytearray(len(content))
    (filled,) = store.read([ReadRange(name, 0, memoryview(memory))])
    assert not filled or memory == content
    return filled


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "still not so after 10 s"
        time.sleep(0.02)


class RawClient:
    """A client that sends anything."""

    def __init__(self, endpoint: str, hello: bool = True, queued: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvhwm = 0, queued
        self.socket.connect(endpoint)
        if hello:
            assert isinstance(self.ask(wire.StoreHello(wire.VERSION)), wire.StoreWelcome)

    def send(self, *frames: bytes | Message) -> None:
        self.socket.send_multipart([each if isinstance(each, bytes) else encode(each) for each in frames])

    def ask(self, *frames: bytes | Message) -> Message | None:
        """Send a message, and return the next one of the store; None if none comes."""
        self.send(*frames)
        return wire.decode_from_store(self.socket.recv()) if self.socket.poll(3000) else None

    def close(self) -> None:
        self.context.destroy(0)


class Ends:
    """Starts servers and clients, and closes them after the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def server(self, cache: ObjectCache | None = None, endpoint: str = "tcp://127.0.0.1:0", **others: object) -> StoreServer:
        return self._stack.enter_context(closing(StoreServer(endpoint, cache or ObjectCache(64 << 20), **others)))

    def store(self, url: str) -> StoreBackend:
        return self._stack.enter_context(closing(open_backend(url)))

    def raw(self, endpoint: str, **others: object) -> RawClient:
        return self._stack.enter_context(closing(RawClient(endpoint, **others)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


@pytest.fixture
def server(ends: Ends) -> StoreServer:
    return ends.server(put_seconds=0.5)


@pytest.fixture
def store(ends: Ends, server: StoreServer) -> StoreBackend:
    return ends.store(server.endpoint)


@pytest.fixture
def raw(ends: Ends, server: StoreServer) -> RawClient:
    return ends.raw(server.endpoint)


NAME, CONTENT = page(1)
INVALID = {
    "noise": [b"\xc1 noise"],
    "empty": [b""],
    "of a link": [b"\x95\xa5hello\x02\xc4\x10" + bytes(16) + b"\xc4\x00"],
    "a name with dots": [wire.Count(1, ("../../etc/passwd",))],
    "a name with a new line": [wire.Count(1, (NAME + "\n",))],
    "too many names": [wire.Count(1, (NAME,) * (wire.MAX_NAMES + 1))],
    "too many bytes": [b"\x93\xa4read\x01\x92" + 2 * encode(wire.ByteRange(NAME, 0, wire.MAX_READ_BYTES))],
    "an object of 10 GB": [wire.Put(1, NAME, 10 * 10**9)],
    "a negative offset": [wire.Read(1, (wire.ByteRange(NAME, -1, 10),))],
    "a part of no object": [wire.ObjectPart(1, 0), b"bytes"],
    "a part without bytes": [wire.ObjectPart(1, 0)],
    "bytes after a count": [wire.Count(1, (NAME,)), b"bytes"],
    "three frames": [wire.ObjectPart(1, 0), b"a", b"b"],
    "many frames": [b"a"] * 100,
    "a message of the store": [wire.Answer(1, 1)],
}


@pytest.mark.parametrize("frames", INVALID.values(), ids=INVALID)
def test_an_invalid_message_ends_its_connection_alone(server: StoreServer, store: StoreBackend, raw: RawClient, frames: list) -> None:
    put(store, 1)
    assert isinstance(raw.ask(*frames), wire.StoreRefused)
    assert isinstance(raw.ask(wire.Count(1, ())), wire.StoreRefused)  # no hello since then
    assert isinstance(raw.ask(wire.StoreHello(wire.VERSION)), wire.StoreWelcome)
    assert has(store, 1) and server.refused == 1


def test_a_program_that_is_no_client_gets_no_answer(ends: Ends, server: StoreServer, store: StoreBackend) -> None:
    foreign = ends.raw(server.endpoint, hello=False)
    foreign.send(b"GET / HTTP/1.1\r\n\r\n")
    wait_for(lambda: server.refused == 1)
    assert not foreign.socket.poll(200)
    assert not has(store, 1)


def test_bytes_that_are_not_zmq_change_nothing(server: StoreServer, store: StoreBackend) -> None:
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    for sent in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(10000)):
        with socket.create_connection((host, int(port))) as other:
            other.sendall(sent)
    put(store, 1)
    assert has(store, 1)


def test_a_frame_longer_than_the_bound_is_not_read(server: StoreServer, store: StoreBackend, raw: RawClient) -> None:
    assert raw.ask(wire.Put(1, NAME, len(CONTENT))) == wire.Answer(1, 1)
    assert raw.ask(wire.ObjectPart(1, 0), bytes(MAX_MESSAGE_BYTES + 1)) is None
    put(store, 2)
    assert has(store, 2) and not has(store, 1)


def test_another_version_is_refused_with_the_remedy(ends: Ends, server: StoreServer) -> None:
    other = ends.raw(server.endpoint, hello=False)
    answer = other.ask(wire.StoreHello(wire.VERSION + 1))
    assert isinstance(answer, wire.StoreRefused) and "install the same version" in answer.reason


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_messages_are_refused_or_answered(ends: Ends, server: StoreServer, data: st.DataObject) -> None:
    read = wire.Read(3, (wire.ByteRange(NAME, 0, 10),))
    messages = [wire.Put(1, NAME, len(CONTENT)), wire.ObjectPart(1, 0), wire.Count(2, (NAME,)), read, wire.List(4, True), wire.StoreHello(wire.VERSION)]
    content = bytearray(encode(data.draw(st.sampled_from(messages))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    frames = [bytes(content[: data.draw(st.integers(0, len(content)))]), *data.draw(st.lists(st.binary(max_size=200), max_size=2))]
    client = ends.raw(server.endpoint)
    answer = client.ask(*frames)
    client.close()
    assert answer is not None and server.is_running


def test_a_damaged_object_is_refused(server: StoreServer, store: StoreBackend) -> None:
    for place in (3, 60, 5000, len(CONTENT) - 1):
        damaged = bytearray(CONTENT)
        damaged[place] ^= 1
        with pytest.raises(StoreError, match="refused"):
            store.put(NAME, [memoryview(damaged)])
    with pytest.raises(StoreError, match="refused"):
        store.put(NAME, [memoryview(page(2)[1])])
    with pytest.raises(StoreError, match="refused"):
        store.put(NAME, [memoryview(CONTENT)[:-64]])
    with pytest.raises(StoreError, match="its header says"):
        store.put(NAME, [memoryview(CONTENT + bytes(16))])
    assert store.statistics().objects == 0 and server.cache.counters.damaged == 7
    assert put(store, 1)


def test_an_object_without_free_memory_is_refused(server: StoreServer, store: StoreBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, dtype: type) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(object_cache, "np", SimpleNamespace(empty=fail, uint8=None))
        with pytest.raises(StoreError, match="no memory"):
            put(store, 1)
    assert server.is_running and put(store, 1)


def test_a_client_that_dies_leaves_nothing(ends: Ends, server: StoreServer, store: StoreBackend) -> None:
    dying = ends.raw(server.endpoint)
    assert dying.ask(wire.Put(1, NAME, len(CONTENT))) == wire.Answer(1, 1)
    assert dying.ask(wire.ObjectPart(1, 0), CONTENT[:1000]) == wire.Answer(1, 1000)
    dying.close()
    assert not has(store, 1)
    # Its memory is free again.
    server.cache.max_bytes = len(CONTENT)

    def fits() -> bool:
        try:
            return put(store, 2)
        except StoreError:
            return False

    assert not fits()
    wait_for(fits)


def test_a_client_that_reads_nothing_delays_no_other(ends: Ends, server: StoreServer, store: StoreBackend) -> None:
    put(store, 1)
    lazy = ends.raw(server.endpoint, queued=1)
    ranges = (wire.ByteRange(NAME, 0, 100_000),) * 40
    for number in range(2 * MAX_WAITING):
        lazy.send(wire.Read(number, ranges))
    begin = time.monotonic()
    for _ in range(20):
        assert has(store, 1)
    assert time.monotonic() - begin < 5
    # Its answers are bounded: the store does not keep all that it asked for.
    wait_for(lambda: server.refused >= 1)


def test_objects_that_were_used_least_recently_make_room(server: StoreServer, store: StoreBackend) -> None:
    server.cache.max_bytes = 5 * len(CONTENT)
    for number in range(5):
        put(store, number)
    assert has(store, 0)
    put(store, 5)
    assert [has(store, number) for number in range(6)] == [True, False, True, True, True, True]
    assert server.cache.size <= server.cache.max_bytes
    with pytest.raises(StoreError, match="are available"):
        server.cache.max_bytes = 1000
        put(store, 6)


def test_dropped_objects_are_loaded_from_the_disk(ends: Ends, tmp_path: Path) -> None:
    cache = ObjectCache(2 * len(CONTENT), FileBackend(tmp_path))
    server = ends.server(cache)
    store = ends.store(server.endpoint)
    for number in range(6):
        put(store, number)
        wait_for(lambda number=number: cache.counters.written == number + 1)
    assert cache.num_objects == 2 and store.count_run([page(number)[0] for number in range(6)]) == 6
    assert all(has(store, number) for number in range(6))
    assert not put(store, 0) and len(list(store.objects())) == 6
    name, _ = page(0)
    # A damaged file is no object, and goes.
    (file,) = tmp_path.rglob(name.partition("/")[2])
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert not has(store, 0) and not file.exists() and put(store, 0)
    store.delete([name])
    assert not has(store, 0)


def test_the_disk_learns_what_is_read_from_memory(ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ObjectCache(64 << 20, FileBackend(tmp_path))
    store = ends.store(ends.server(cache).endpoint)
    put(store, 0)
    wait_for(lambda: cache.counters.written == 1)
    (file,) = tmp_path.rglob(page(0)[0].partition("/")[2])
    os.utime(file, (1000, 1000))
    assert has(store, 0) and file.stat().st_mtime == 1000
    monkeypatch.setattr("sglang_ext.mem_cache.prefix_store.object_cache.TOUCH_SECONDS", 0.0)
    assert has(store, 0)
    wait_for(lambda: file.stat().st_mtime > 1000)
    # Another server deleted it to make room.
    file.unlink()
    assert has(store, 0)
    wait_for(file.exists)


def test_a_write_that_is_under_way_does_not_bring_back_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, begun, may_go_on = FileBackend(tmp_path), threading.Event(), threading.Event()
    write = disk.put

    def write_slowly(name: str, parts: list[memoryview]) -> bool:
        begun.set()
        assert may_go_on.wait(10)
        return write(name, parts)

    monkeypatch.setattr(disk, "put", write_slowly)
    with closing(ObjectCache(64 << 20, disk)) as cache:
        memory = cache.reserve(len(CONTENT))
        memory[:] = CONTENT
        cache.store(NAME, memory)
        assert begun.wait(10)
        deleting = threading.Thread(target=cache.delete, args=([NAME],))
        deleting.start()
        deleting.join(0.2)
        may_go_on.set()
        deleting.join(10)
        wait_for(lambda: cache.counters.written == 1)
        assert not cache.count_run([NAME]) and not disk.count_run([NAME])


def test_a_load_that_is_under_way_does_not_bring_back_what_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FileBackend(tmp_path)
    read = disk.read
    disk.put(NAME, [memoryview(CONTENT)])
    with closing(ObjectCache(64 << 20, disk)) as cache:

        def read_before_another_client_deletes(ranges: list[ReadRange]) -> list[bool]:
            found = read(ranges)
            cache.delete([NAME])
            return found

        monkeypatch.setattr(disk, "read", read_before_another_client_deletes)
        cache.load(NAME)
        assert not cache.num_objects and not cache.size and not cache.count_run([NAME])


def test_objects_that_are_dropped_before_they_are_written_are_lost_but_not_deleted_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()

    class LateQueue(queue.Queue):
        def get(self, *args: object) -> str | None:
            found = super().get(*args)
            assert may_write.wait(10)
            return found

    monkeypatch.setattr(queue, "SimpleQueue", LateQueue)
    with closing(ObjectCache(2 * len(CONTENT), FileBackend(tmp_path))) as cache:
        for number in range(4):
            name, content = page(number)
            memory = cache.reserve(len(content))
            memory[:] = content
            cache.store(name, memory)
            if number == 0:
                cache.delete([name])
        may_write.set()
    assert (cache.counters.dropped, cache.counters.lost, cache.counters.written) == (1, 1, 2)


def test_a_listing_has_files_that_are_too_large_to_be_read(ends: Ends, tmp_path: Path) -> None:
    store = ends.store(ends.server(ObjectCache(64 << 20, FileBackend(tmp_path))).endpoint)
    name, _ = page(0)
    file = tmp_path / name.partition("/")[0] / name.partition("/")[2][:2] / name.partition("/")[2]
    file.parent.mkdir(parents=True)
    with file.open("wb") as opened:
        opened.truncate(10**10)
    assert [(each.name, each.size) for each in store.objects()] == [(name, 10**10)]
    assert not has(store, 0)


def test_a_restarted_store_answers_the_same_client(ends: Ends, tmp_path: Path) -> None:
    server = ends.server(ObjectCache(64 << 20, FileBackend(tmp_path)))
    store = ends.store(server.endpoint)
    for number in range(5):
        put(store, number)
    server.close()
    begin = time.monotonic()
    with pytest.raises(StoreError, match=server.endpoint):
        has(store, 1)
    with pytest.raises(StoreError, match="nothing listens"):
        ends.store(server.endpoint)
    assert time.monotonic() - begin < 4
    ends.server(ObjectCache(64 << 20, FileBackend(tmp_path)), server.endpoint)
    assert all(has(store, number) for number in range(5)) and put(store, 7)


def test_answers_may_come_in_another_order(ends: Ends, tmp_path: Path) -> None:
    cache = ObjectCache(20 * len(CONTENT), FileBackend(tmp_path))
    server = ends.server(cache)
    store = ends.store(server.endpoint)
    for number in range(30):
        put(store, number)
        wait_for(lambda number=number: cache.counters.written == number + 1)
    # The first read needs the disk. Those after it do not, and are answered sooner.
    order = [*range(8), *range(20, 30)]
    memories = [bytearray(len(CONTENT)) for _ in order]
    assert all(store.read([ReadRange(page(number)[0], 0, memoryview(memory)) for number, memory in zip(order, memories, strict=True)]))
    assert all(memory == page(number)[1] for number, memory in zip(order, memories, strict=True))


def test_a_store_that_restarts_between_two_requests_is_not_noticed(ends: Ends, server: StoreServer, store: StoreBackend) -> None:
    put(store, 1)
    server.close()
    ends.server(endpoint=server.endpoint)
    assert not has(store, 1) and put(store, 1)


def test_keys_are_needed_by_both_ends(ends: Ends, tmp_path: Path) -> None:
    keys, others = LinkKeys.generate(), LinkKeys.generate()
    keys.write(tmp_path / "keys")
    others.write(tmp_path / "others")
    server = ends.server(keys=keys)
    store = ends.store(f"{server.endpoint}?keys={tmp_path}/keys")
    assert put(store, 1) and has(store, 1)
    for wrong in ("", f"?keys={tmp_path}/others"):
        with pytest.raises(StoreError, match="keys|lost|no answer"):
            ends.store(server.endpoint + wrong)
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(OptionError, match="give it mode 600"):
        ends.store(f"{server.endpoint}?keys={tmp_path}/keys")


def test_the_rate_limit_holds_and_clients_share_it(ends: Ends) -> None:
    server = ends.server(gbps=0.02)
    stores = [ends.store(server.endpoint) for _ in range(2)]
    put(stores[0], 1)
    counts, until = [0, 0], time.monotonic() + 3

    def read(index: int) -> None:
        while time.monotonic() < until:
            assert has(stores[index], 1)
            counts[index] += 1

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 2.5 MB/s, and 50 ms of burst, and one message of each client.
    assert sum(counts) * len(CONTENT) < 2.5e6 * 4 and min(counts) > 0.6 * max(counts)


def test_reads_that_wait_for_the_rate_limit_do_not_expire(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.managers.store_server.tcp_backend.ANSWER_SECONDS", 0.8)
    monkeypatch.setattr("sglang_ext.managers.store_server.server.WAITING_SECONDS", 0.2)
    store = ends.store(ends.server(gbps=0.005).endpoint)
    put(store, 1)
    begin = time.monotonic()
    # Each reader has a connection. The last one waits for 16 objects: about 3 s.
    with ThreadPoolExecutor(16) as readers:
        assert all(readers.map(lambda _: has(store, 1), range(16)))
    assert time.monotonic() - begin > 2


def test_a_store_that_falls_silent_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.managers.store_server.tcp_backend.ANSWER_SECONDS", 0.3)
    server = ends.server()
    store, blocked = ends.store(server.endpoint), threading.Event()
    put(store, 1)
    monkeypatch.setattr(server.cache, "get", lambda name: blocked.wait(10))
    with pytest.raises(StoreError, match="no answer in 0.3 s"):
        has(store, 1)
    blocked.set()


def test_large_objects_and_many_ranges_are_split(store: StoreBackend) -> None:
    form = ObjectFormat("a model", torch.float32, layers=4, heads=4, head_dim=128, page_size=512, form="raw")
    stored = StoredPage(form, bytes(32), 64)
    content = b"".join(encode_object(stored, torch.randn(8, 512, 4, 128)))
    assert len(content) > 2 * wire.MAX_READ_BYTES - 1000 and store.put(stored.name, [memoryview(content)])
    memories = [bytearray(3_000_000), bytearray(10), bytearray(len(content) - 17)]
    offsets = [1, len(content) - 5, 17]
    filled = store.read([ReadRange(stored.name, offset, memoryview(memory)) for offset, memory in zip(offsets, memories, strict=True)])
    assert filled == [True, False, True] and memories[0] == content[1:3_000_001] and memories[2] == content[17:]


def test_a_long_listing_comes_in_pages(ends: Ends) -> None:
    cache = ObjectCache(64 << 20, check=lambda name, content: None)
    for number in range(wire.MAX_LISTED + 10):
        cache.store(f"{FORM.namespace}/{number:064x}", cache.reserve(1))
    server = ends.server(cache)
    store = ends.store(server.endpoint)
    assert len({each.name for each in store.objects()}) == wire.MAX_LISTED + 10 == store.statistics().objects
