"""What every backend of a prefix store promises, on real servers of this machine."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from store_servers import file_url, free_port, mooncake_url, redis_server, s3_url, small_disk

from sglang_ext.core import OptionError
from sglang_ext.managers.store_server.server import StoreServer
from sglang_ext.mem_cache.prefix_store import file_backend
from sglang_ext.mem_cache.prefix_store.backend import ReadRange, StoreBackend, StoreError, open_backend
from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.object_cache import ObjectCache
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object, read_page
from sglang_ext.mem_cache.prefix_store.redis_backend import connect_without_use
from sglang_ext.mem_cache.prefix_store.s3_backend import S3Backend

SPACE = "0123456789abcdef"
OTHER = "f" * 16


def name(number: int, space: str = SPACE) -> str:
    return f"{space}/{number:064x}"


def path(number: int) -> str:
    """Where a folder has an object."""
    return f"{SPACE}/00/{number:064x}"


def content(number: int, size: int = 5000) -> bytes:
    return Random(number).randbytes(size)


def parts(value: bytes) -> list[memoryview]:
    return [memoryview(value)[:100], memoryview(value)[100:]]


def read(store: StoreBackend, wanted: str, offset: int, size: int) -> bytes | None:
    memory = bytearray(size)
    (filled,) = store.read([ReadRange(wanted, offset, memoryview(memory))])
    return bytes(memory) if filled else None


@contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    port = free_port()
    with redis_server(folder, port):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def tcp_url(folder: Path) -> Iterator[str]:
    # The objects of these tests are random bytes, so they are not checked on arrival.
    cache = ObjectCache(100 << 20, FileBackend(folder / "disk"), check=lambda name, content: None)
    server = StoreServer("tcp://127.0.0.1:0", cache)
    yield server.endpoint
    server.close()


URLS: dict[str, Callable] = {"file": file_url, "tcp": tcp_url, "redis": redis_url, "s3": s3_url, "mooncake": mooncake_url}
LISTED = ("file", "tcp", "redis", "s3")
"""Backends that can list their objects."""


@pytest.fixture(scope="module", params=URLS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with URLS[request.param](tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def store(url: str) -> Iterator[StoreBackend]:
    """An empty store."""
    opened = open_backend(url)
    opened.delete([name(number, space) for number in range(200) for space in (SPACE, OTHER)])
    yield opened
    opened.close()
    opened.close()


def test_an_object_is_read_as_it_was_written_by_another_connection_too(store: StoreBackend, url: str) -> None:
    assert store.put(name(1), parts(content(1)))
    other = open_backend(url)
    assert read(other, name(1), 0, 5000) == content(1)
    assert read(other, name(1), 90, 200) == content(1)[90:290]
    assert read(other, name(1), 4999, 1) == content(1)[-1:]
    other.close()


@pytest.mark.parametrize("form", ["anchored", "raw"])
def test_a_page_of_kv_is_restored_from_every_store(store: StoreBackend, form: str) -> None:
    torch.manual_seed(0)
    page = StoredPage(ObjectFormat("a model", torch.bfloat16, layers=2, heads=2, head_dim=64, page_size=64, form=form), bytes(32), 0)
    kv, found = torch.randn(2, 4, 64, 2, 64).bfloat16()
    assert store.put(page.name, encode_object(page, kv))
    read_page(store, page, found)
    store.delete([page.name])
    assert torch.equal(found, kv)


def test_a_range_beyond_the_end_is_not_filled(store: StoreBackend) -> None:
    store.put(name(1), parts(content(1)))
    assert read(store, name(1), 4999, 2) is None
    assert read(store, name(1), 5000, 1) is None
    assert read(store, name(2), 0, 1) is None


def test_an_object_is_written_once(store: StoreBackend) -> None:
    assert store.put(name(1), parts(content(1)))
    assert not store.put(name(1), parts(content(1)))
    assert read(store, name(1), 0, 5000) == content(1)


def test_a_run_ends_at_the_first_missing_object(store: StoreBackend) -> None:
    names = [name(number) for number in range(200)]
    assert store.count_run(names) == 0 == store.count_run([])
    for number in (*range(70), *range(71, 80)):
        store.put(name(number), parts(content(number, 200)))
    assert store.count_run(names) == 70
    assert store.count_run(names[71:]) == 9
    assert store.count_run(names[:30]) == 30
    assert store.count_run([name(0, OTHER), *names]) == 0


def test_many_ranges_are_read_together(store: StoreBackend) -> None:
    for number in range(0, 150, 2):
        store.put(name(number), parts(content(number, 300 + number)))
    memories = [bytearray(200) for _ in range(150)]
    filled = store.read([ReadRange(name(number), 50, memoryview(memory)) for number, memory in enumerate(memories)])
    assert filled == [number % 2 == 0 for number in range(150)]
    assert all(memories[number] == content(number, 300 + number)[50:250] for number in range(0, 150, 2))


def test_deleted_objects_are_gone(store: StoreBackend) -> None:
    for number in range(3):
        store.put(name(number), parts(content(number)))
    store.delete([name(0), name(2), name(7)])
    assert [store.count_run([name(number)]) for number in range(3)] == [0, 1, 0]
    assert store.put(name(0), parts(content(0)))


@pytest.mark.parametrize("url", LISTED, indirect=True)
def test_a_listing_has_names_sizes_and_times(store: StoreBackend) -> None:
    before = time.time()
    for number in range(3):
        store.put(name(number), parts(content(number, 400 + number)))
    store.put(name(1, OTHER), parts(content(1, 1000)))
    found = {each.name: each for each in store.objects()}
    assert {each: found[each].size for each in found} == {name(0): 400, name(1): 401, name(2): 402, name(1, OTHER): 1000}
    assert all(each.used_at is None or before - 2 < each.used_at < time.time() + 2 for each in found.values())
    counted = store.statistics()
    assert (counted.objects, counted.size) == (4, 2203)


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_a_listing_of_redis_has_the_last_use_before_it(store: StoreBackend, url: str) -> None:
    store.put(name(1), parts(content(1)))
    with pytest.importorskip("redis").Redis.from_url(url) as client:
        key = f"sglang-ext:{name(1)}"
        client.restore(key, 0, client.dump(key), replace=True, idletime=1000)
        version = tuple(map(int, client.info("server")["redis_version"].split(".")))
    (found,) = store.objects()
    assert found.used_at < time.time() - 900
    # Servers before 7.2 count the listing as a use.
    memory = bytearray(5000)
    assert store.read([ReadRange(name(1), 0, memoryview(memory))], is_use=False) == [True] and memory == content(1)
    (found,) = store.objects()
    assert (found.used_at < time.time() - 900) == (version >= (7, 2))
    assert read(store, name(1), 0, 5000) == content(1)
    (found,) = store.objects()
    assert found.used_at > time.time() - 900


@pytest.mark.parametrize("is_old", [False, True], ids=["supported", "refused"])
def test_connections_for_listings_tell_redis_that_their_commands_are_no_use(is_old: bool) -> None:
    redis, done = pytest.importorskip("redis"), []

    def reply() -> bytes:
        if is_old:
            raise redis.ResponseError("ERR unknown subcommand 'NO-TOUCH'")
        return b"OK"

    connect_without_use(
        SimpleNamespace(on_connect=lambda: done.append("set up"), send_command=lambda *words: done.append(words), read_response=reply)
    )
    assert done == ["set up", ("CLIENT", "NO-TOUCH", "ON")]


def test_s3_names_objects_that_it_does_not_delete() -> None:
    pytest.importorskip("boto3")
    refusal = {"Key": name(1), "Code": "AccessDenied", "Message": "Access Denied"}
    client = SimpleNamespace(delete_objects=lambda **_: {"Errors": [refusal]}, close=lambda: None)
    with closing(S3Backend(client, "bucket")) as store, pytest.raises(StoreError, match="1 of 2 objects.*Access Denied"):
        store.delete([name(1), name(2)])


def test_threads_may_share_a_backend(store: StoreBackend) -> None:
    wrong = []

    def work(worker: int) -> None:
        random = Random(worker)
        for _ in range(60):
            number = random.randrange(20)
            store.put(name(number), parts(content(number, 3000)))
            # Another thread may be writing the object.
            if read(store, name(number), 0, 3000) not in (None, content(number, 3000)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    written = [number for number in range(20) if store.count_run([name(number)])]
    assert len(written) > 15 and all(read(store, name(number), 0, 3000) == content(number, 3000) for number in written)


@pytest.mark.parametrize("url", ["mooncake"], indirect=True)
def test_a_store_without_a_listing_says_so(store: StoreBackend) -> None:
    with pytest.raises(StoreError, match="cannot be listed"):
        next(iter(store.objects()))
    with pytest.raises(StoreError, match="cannot be listed"):
        store.statistics()


@pytest.mark.parametrize(
    "bad", ["../../etc/passwd", f"{SPACE}/../{'0' * 61}", f"{SPACE}/{'0' * 63}", f"{SPACE}/{'G' * 64}", "", f"/{'0' * 64}", name(1) + "\n"]
)
def test_names_that_are_no_hashes_are_refused(store: StoreBackend, bad: str) -> None:
    uses = (lambda: store.put(bad, parts(content(1))), lambda: store.count_run([bad]), lambda: read(store, bad, 0, 1), lambda: store.delete([bad]))
    for use in uses:
        with pytest.raises(ValueError, match="pass 16 to 64 hexadecimal digits"):
            use()


BAD_TCP = (
    *("tcp://", "tcp://127.0.0.1", "tcp://localhost:1", "tcp://*:1", "tcp://0.0.0.0:1", "tcp://192.0.2.1:1", "tcp://127.0.0.1:1/x"),
    "tcp://127.0.0.1:1?key=x",
)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "ftp://host/x", "file:", "file://host/folder", "file:/x?max-gb=many", "file:/x?max-gb=-1", "file:/x?size=1"),
        *("s3://", "s3://b?endpoint=ftp://x", "s3://b?region=x", "mooncake://", "mooncake://m?protocol=udp"),
        *("tcp://[::1:80", "s3://[", "mooncake://[", "mooncake://m:port"),
        *BAD_TCP,
    ],
)
def test_malformed_urls_are_refused_with_the_allowed_form(bad: str) -> None:
    with pytest.raises(OptionError, match="pass"):
        open_backend(bad)


def test_a_url_of_a_store_process_without_a_port_is_refused_with_the_form_of_its_urls_alone() -> None:
    with pytest.raises(OptionError) as refused:
        open_backend("tcp://127.0.0.1")
    assert "pass tcp://ADDRESS:PORT" in str(refused.value) and "ipc:" not in str(refused.value)


def test_a_missing_file_of_keys_is_refused_with_one_remedy() -> None:
    with pytest.raises(OptionError, match="link_keys") as refused:
        open_backend("tcp://127.0.0.1:1?keys=missing")
    assert "pass tcp://" not in str(refused.value)


@pytest.mark.parametrize("unbounded", ["tcp://127.0.0.1:1", "redis://127.0.0.1:1/0", "s3://bucket", "mooncake://127.0.0.1:1"])
def test_stores_that_bound_themselves_take_no_bound(unbounded: str) -> None:
    with pytest.raises(OptionError, match="cannot be bounded from here"):
        open_backend(unbounded, 10**9)


def test_a_store_that_is_gone_is_an_error() -> None:
    pytest.importorskip("redis")
    with pytest.raises(StoreError, match="connecting"):
        open_backend(f"redis://127.0.0.1:{free_port()}/0")


class TestFolder:
    def test_links_folders_pipes_and_huge_files_are_no_objects(self, tmp_path: Path) -> None:
        store = open_backend(f"file:{tmp_path}")
        folder = tmp_path / SPACE / "00"
        folder.mkdir(parents=True)
        target = tmp_path / "secret"
        target.write_bytes(content(1))
        (tmp_path / path(1)).symlink_to(target)
        (tmp_path / path(2)).mkdir()
        os.mkfifo(tmp_path / path(3))
        with (tmp_path / path(4)).open("wb") as file:
            file.truncate(10 * 10**9)
        (tmp_path / "notes.txt").write_text("of somebody else")
        assert store.count_run([name(1)]) == store.count_run([name(2)]) == store.count_run([name(3)]) == store.count_run([name(4)]) == 0
        assert [read(store, name(number), 0, 10) for number in (1, 2, 3, 4)] == [None] * 4
        assert (tmp_path / "notes.txt").exists()

    @pytest.mark.parametrize("linked", [SPACE, f"{SPACE}/00"])
    def test_nothing_is_read_written_or_deleted_behind_a_link(self, tmp_path: Path, linked: str) -> None:
        folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
        store = open_backend(f"file:{folder}")
        store.put(name(1), parts(content(1)))
        (folder / linked).rename(elsewhere)
        (folder / linked).symlink_to(elsewhere)
        before = sorted(elsewhere.rglob("*"))
        assert store.count_run([name(1)]) == 0 and read(store, name(1), 0, 10) is None and not list(store.objects())
        store.delete([name(1)])
        with pytest.raises(StoreError, match="is a link; delete the link"):
            store.put(name(2), parts(content(2)))
        assert sorted(elsewhere.rglob("*")) == before

    def test_no_old_file_is_deleted_behind_a_link(self, tmp_path: Path) -> None:
        folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "notes").write_text("of somebody else")
        os.utime(elsewhere / "notes", (0, 0))
        store = open_backend(f"file:{folder}")
        shutil.rmtree(folder / ".new")
        (folder / ".new").symlink_to(elsewhere)
        with pytest.raises(StoreError, match="is a link; delete the link"):
            store.put(name(1), parts(content(1)))
        with pytest.raises(OptionError, match="is a link; delete the link"):
            open_backend(f"file:{folder}")
        assert [each.name for each in elsewhere.iterdir()] == ["notes"]

    def test_a_removed_folder_is_created_again(self, tmp_path: Path) -> None:
        store = open_backend(f"file:{tmp_path}/store", 100_000)
        store.put(name(1), parts(content(1)))
        shutil.rmtree(tmp_path / "store")
        assert store.count_run([name(1)]) == 0 and read(store, name(1), 0, 10) is None
        assert store.put(name(1), parts(content(1))) and read(store, name(1), 0, 5000) == content(1)

    def test_a_full_disk_is_an_error_and_leaves_the_objects(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 200_000) as disk:
            store = open_backend(f"file:{disk}/store")
            store.put(name(1), parts(content(1, 100_000)))
            with pytest.raises(StoreError, match="No space left"):
                store.put(name(2), parts(content(2, 200_000)))
            assert store.count_run([name(2)]) == 0 and read(store, name(1), 0, 100_000) == content(1, 100_000)
            assert not list((disk / "store/.new").iterdir())

    def test_a_url_may_have_the_bound(self, tmp_path: Path) -> None:
        assert open_backend(f"file:{tmp_path}?max-gb=0.5").statistics().max_size == 500_000_000
        assert open_backend(f"file:{tmp_path}?max-gb=0.5", 10**6).statistics().max_size == 10**6

    def test_the_objects_that_were_not_used_for_longest_make_room(self, tmp_path: Path) -> None:
        store = open_backend(f"file:{tmp_path}", 100_000)
        for number in range(9):
            store.put(name(number), parts(content(number, 10_000)))
            os.utime(tmp_path / path(number), (time.time() - 1000 + number,) * 2)
        assert read(store, name(0), 0, 10) is not None  # used now
        for number in range(9, 12):
            store.put(name(number), parts(content(number, 10_000)))
        left = {found.name for found in store.objects()}
        assert name(0) in left and name(11) in left and name(1) not in left and len(left) > 5
        assert store.statistics().size <= 100_000

    def test_a_stopped_process_that_holds_the_lock_blocks_writes_for_a_bounded_time_and_reads_not_at_all(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(file_backend, "LOCK_SECONDS", 0.2)
        with closing(open_backend(f"file:{tmp_path}")) as store:
            store.put(name(1), parts(content(1)))
        hold = f"import fcntl, os, signal; f = open({str(tmp_path / '.lock')!r}); fcntl.flock(f, 2); os.kill(os.getpid(), signal.SIGSTOP)"
        holder = subprocess.Popen([sys.executable, "-c", hold])
        try:
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
            begin = time.monotonic()
            store = open_backend(f"file:{tmp_path}")
            assert read(store, name(1), 0, 5000) == content(1) and store.count_run([name(1)]) == 1 == store.statistics().objects
            assert time.monotonic() - begin < 0.2
            with pytest.raises(StoreError, match="holds .*lock for 0.2 s; end it if it is stopped"):
                store.put(name(2), parts(content(2)))
            assert time.monotonic() - begin < 3
        finally:
            holder.kill()
            holder.wait()
        assert store.put(name(2), parts(content(2)))

    def test_an_object_of_another_user_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_backend(f"file:{tmp_path}")
        store.put(name(1), parts(content(1)))
        os.utime(tmp_path / path(1), (1000, 1000))

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "utime", refuse)
        assert read(store, name(1), 0, 5000) == content(1)

    def test_an_object_larger_than_the_bound_is_refused_and_nothing_is_deleted(self, tmp_path: Path) -> None:
        store = open_backend(f"file:{tmp_path}", 10_000)
        store.put(name(1), parts(content(1, 7_000)))
        with pytest.raises(StoreError, match="at most 8000 fit"):
            store.put(name(2), parts(content(2, 11_000)))
        assert store.count_run([name(1)]) == 1

    def test_an_interrupted_write_leaves_no_object(self, tmp_path: Path) -> None:
        code = (
            "import os, sys; from sglang_ext.mem_cache.prefix_store import file_backend as f\n"
            "from sglang_ext.mem_cache.prefix_store.backend import open_backend\n"
            "write = os.write\n"
            "def half(file, data):\n    write(file, data[:50]); os._exit(9)\n"
            "f.os.write = half\n"
            f"open_backend('file:{tmp_path}').put('{name(1)}', [memoryview(bytes(5000))])"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 9
        store = open_backend(f"file:{tmp_path}")
        assert store.count_run([name(1)]) == 0 and len(list((tmp_path / ".new").iterdir())) == 1
        # The file is deleted once nobody can be writing it any more.
        for file in (tmp_path / ".new").iterdir():
            os.utime(file, (time.time() - 4000,) * 2)
        store.put(name(2), parts(content(2)))
        assert not list((tmp_path / ".new").iterdir())

    def test_two_servers_keep_one_bound(self, tmp_path: Path) -> None:
        code = (
            "import sys; from random import Random\n"
            "from sglang_ext.mem_cache.prefix_store.backend import ReadRange, open_backend\n"
            f"store, random = open_backend('file:{tmp_path}', 1_000_000), Random(int(sys.argv[1]))\n"
            "for _ in range(400):\n"
            "    number = random.randrange(300)\n"
            f"    name, memory = f'{SPACE}/{{number:064x}}', bytearray(10_000)\n"
            "    if store.read([ReadRange(name, 0, memoryview(memory))])[0]:\n"
            "        assert memory == Random(number).randbytes(10_000), number\n"
            "    else:\n"
            "        store.put(name, [memoryview(Random(number).randbytes(10_000))])\n"
        )
        servers = [subprocess.Popen([sys.executable, "-c", code, str(seed)]) for seed in (1, 2)]
        largest = 0
        while any(server.poll() is None for server in servers):
            largest = max(largest, open_backend(f"file:{tmp_path}", 1_000_000).statistics().size)
            time.sleep(0.05)
        assert [server.returncode for server in servers] == [0, 0]
        assert 0 < largest <= 1_000_000

    def test_a_folder_of_another_program_is_not_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # As lost+found at the root of a disk, which only root may read.
        (tmp_path / "lost+found").mkdir()
        scandir = os.scandir

        def scan(path: str | Path) -> Iterator["os.DirEntry[str]"]:
            if str(path).endswith("lost+found"):
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", scan)
        store = open_backend(f"file:{tmp_path}")
        assert store.put(name(1), parts(content(1))) and [each.name for each in store.objects()] == [name(1)]

    def test_a_folder_that_cannot_be_listed_is_an_error_of_the_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_backend(f"file:{tmp_path}")

        def scan(path: str | Path) -> Iterator["os.DirEntry[str]"]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "scandir", scan)
        with pytest.raises(StoreError, match="listing .*: Input/output error"):
            store.statistics()

    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(OptionError, match="pass a folder that this user may write"):
            open_backend(f"file:{tmp_path}/file/store")
