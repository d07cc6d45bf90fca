"""Whatever happens to a prefix store: the answers are stock's, the log has at most one line, and the server goes on."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from servers import EXPECTED_TOKENS, STRICT, VERIFIED, Server, greedy
from small_model import KEPT
from store_servers import free_port, redis_server, small_disk
from waiting import tries, until

from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object
from sglang_ext_bench.serving.store_failures import DAMAGES, SLOW_RATE, SlowLink, objects, restore

pytestmark = pytest.mark.server
UNIT = 64
DISK_BYTES = 128 << 20


def launch_with(launch: Callable[..., Server], url: str) -> Server:
    flags = (*VERIFIED, "--kv-host-gb", "0.5", "--kv-store", url, "--enable-cache-report")
    server = launch(*flags, env=STRICT)
    # The prefix tree gets its store with the first forward.
    server.ask(input_ids=[5, 6, 7], **greedy(1))
    return server


def stored_tokens(answers: list[dict]) -> int:
    """Tokens of prompts that came from the store."""
    return sum((each["meta_info"].get("cached_tokens_details") or {}).get("storage", 0) for each in answers)


class Log:
    """What a server logs of failures of its store from now on."""

    def __init__(self, server: Server) -> None:
        self._file, self._begin = server.log, server.log.stat().st_size

    @property
    def lines(self) -> list[str]:
        text = self._file.read_bytes()[self._begin :].decode(errors="replace")
        assert "Traceback" not in text
        return [line for line in text.splitlines() if "sglang-ext: prefix store" in line and "answers again" not in line]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the store, on a small disk where this user may mount one."""
    folder = tmp_path_factory.mktemp("failures")
    try:
        with small_disk(folder / "disk", DISK_BYTES) as disk:
            yield disk / "store"
    except pytest.skip.Exception:
        yield folder / "store"


@pytest.fixture(scope="module")
def whole(store: Path, launch: Callable, prompts: list[list[int]], expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with the pages of all prompts and answers."""
    server = launch_with(launch, f"file:{store}")
    assert [each["output_ids"] for each in server.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))] == expected
    pages = sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts)
    until(lambda: len(objects(store)) >= pages, "all pages are written")
    copy = tmp_path_factory.mktemp("whole") / "store"
    shutil.copytree(store, copy)
    return copy


@pytest.fixture
def server(store: Path, whole: Path, launch: Callable) -> Server:
    """A server whose store has all pages, and did not fail lately."""
    made = launch_with(launch, f"file:{store}")
    restore(store, whole)
    return made


def write_another_models_pages(store: Path, _: Path) -> None:
    """Pages of the same shape under the same names."""
    form = ObjectFormat("another model", torch.float32, layers=len(KEPT), heads=3, head_dim=64, page_size=UNIT, form="raw")
    for path in objects(store):
        parts = encode_object(StoredPage(form, bytes.fromhex(path.name), 0), torch.ones(2 * len(KEPT), UNIT, 3, 64))
        path.write_bytes(b"".join(parts))


SERVED = "a wrong byte in the KV", "a link in place of the namespace", "removed folder", "a file in place of the folder"
"""Damages that a server meets. Unit tests have the others: test_stored_prefixes.py, test_objects.py, test_backends.py."""
CASES = {**{name: DAMAGES[name] for name in SERVED}, "another model's objects": write_another_models_pages}


@pytest.mark.parametrize("damage", CASES.values(), ids=CASES)
def test_a_damaged_store_is_not_used(
    server: Server, store: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, damage: Callable
) -> None:
    prompts, expected = prompts[2:], expected[2:]
    # A store that failed in an earlier test is asked again.
    for _ in tries(60, "the store is read"):
        if stored_tokens(server.ask_all(prompts[:1], 1, **greedy(1))):
            break
        time.sleep(1)
    damage(store, tmp_path)
    log, asked = Log(server), server.metric("sglang_ext:store_miss_pages_total")
    answers = server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in answers] == expected and stored_tokens(answers) == 0
    assert server.metric("sglang_ext:store_miss_pages_total") > asked, "the store was asked"
    assert len(log.lines) <= 1 and server.alive()


def test_strange_names_are_ignored_and_left(server: Server, store: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    page, *_ = objects(store)
    folder = page.parents[1]
    strange = [store / "..x", store / f"..{page.name}", folder / "..%2f..%2fetc", folder / page.name[:2] / f"..{page.name[2:]}", store / "a\nb"]
    for path in strange:
        shutil.copyfile(page, path)
    log = Log(server)
    for _ in tries(60, "all whole pages come from the store"):
        answers = server.ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))
        assert [each["output_ids"] for each in answers] == expected
        if stored_tokens(answers) == sum((len(ids) - 1) // UNIT * UNIT for ids in prompts):
            break
        time.sleep(1)
    assert all(path.exists() for path in strange) and len(log.lines) <= 1


def test_a_full_disk_is_read(server: Server, store: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    if not store.parent.is_mount():
        pytest.skip("this user cannot mount a small disk")
    pages = [path for path in objects(store)]
    for path in pages[::2]:
        path.unlink()

    def ask_all(server: Server) -> bool:
        answers = server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
        assert [each["output_ids"] for each in answers] == expected
        return True

    with (store.parent / "of another program").open("wb") as file:
        left = os.statvfs(store).f_bavail * os.statvfs(store).f_frsize
        file.write(bytes(left))
    # The server knows since a test before that it cannot write, or learns it now.
    log, errors = Log(server), server.metric("sglang_ext:store_errors_total")
    until(lambda: ask_all(server) and server.metric("sglang_ext:store_errors_total") > errors + 1, "pages are written twice", pause=1)
    assert len(log.lines) <= 1 and server.alive()
    (store.parent / "of another program").unlink()


def test_a_bound_that_holds_few_pages_is_kept(launch: Callable, tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    prompts, expected = prompts[2:], expected[2:]
    server = launch_with(launch, f"file:{tmp_path}/store?max-gb=0.008")
    log = Log(server)
    for _ in range(2):
        assert [each["output_ids"] for each in server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))] == expected
        assert sum(path.stat().st_size for path in objects(tmp_path)) <= 8e6
    assert server.metric("sglang_ext:store_written_bytes_total") > 8e6 and not log.lines


def test_a_slow_store_and_a_killed_one(launch: Callable, tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    port = free_port()
    with redis_server(tmp_path, port) as redis, SlowLink(port, SLOW_RATE) as link:
        server = launch_with(launch, f"redis://127.0.0.1:{link.port}/0")
        log = Log(server)
        for _ in range(3):
            assert [each["output_ids"] for each in server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))] == expected
            until(lambda: server.metric("sglang_ext:store_written_pages_total") > 20, "pages are written")
        assert not log.lines
        redis.kill()
        redis.wait()
        for _ in range(3):
            assert [each["output_ids"] for each in server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))] == expected
        assert server.metric("sglang_ext:store_errors_total") > 0 and server.alive()
        assert len(log.lines) == 1 and "failed; " in log.lines[0]
