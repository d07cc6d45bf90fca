"""The benchmark of failing stores: damages hit the objects, a restored store is whole, and the slow link has its rate."""

import socket
import threading
import time
from pathlib import Path

import pytest

from sglang_ext.mem_cache.prefix_store.backend import ReadRange
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext_bench.serving.store_failures import DAMAGES, SlowLink, objects, restore

NAMES = [f"{'a' * 16}/{number:02x}{'b' * 62}" for number in range(3)]


def contents(store: Path) -> list[bytes | None]:
    """What can be read under each name."""
    found = []
    backend = FileBackend(store)
    for name in NAMES:
        memory = bytearray(1000)
        found.append(bytes(memory) if backend.read([ReadRange(name, 0, memoryview(memory))])[0] else None)
    return found


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_no_object_is_read_as_it_was_until_the_store_is_restored(tmp_path: Path, damage) -> None:
    whole, store, elsewhere = tmp_path / "whole", tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number, name in enumerate(NAMES):
        FileBackend(whole).put(name, [memoryview(bytes([number]) * 1000)])
    expected = contents(whole)
    store.mkdir()
    restore(store, whole)
    assert contents(store) == expected and len(objects(store)) == 3
    damage(store, elsewhere)
    if store.is_dir():
        assert not any(found == before for found, before in zip(contents(store), expected))
    restore(store, whole)
    assert contents(store) == expected


def test_replies_come_at_the_rate_of_the_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(5) == b"hello"
                connection.sendall(bytes(1_000_000))

        thread = threading.Thread(target=reply)
        thread.start()
        with SlowLink(server.getsockname()[1], rate=4e6) as link, socket.create_connection(("127.0.0.1", link.port)) as client:
            begin, count = time.monotonic(), 0
            client.sendall(b"hello")
            while data := client.recv(1 << 16):
                count += len(data)
            assert count == 1_000_000 and time.monotonic() - begin > 0.2
        thread.join()
