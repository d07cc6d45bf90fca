"""Prefixes outlive their server: another one reads them from a store, with stock's answers, whatever happens to the store."""

import shutil
from pathlib import Path

import pytest
from servers import EXPECTED_TOKENS, STRICT, VERIFIED, Server, greedy
from waiting import tries, until

pytestmark = pytest.mark.server
UNIT = 64


def flags(store: Path) -> tuple[str, ...]:
    return (*VERIFIED, "--kv-host-gb", "0.5", "--kv-store", f"file:{store}", "--enable-metrics", "--enable-cache-report")


def warm_up(server: Server) -> None:
    """The prefix tree gets its store with the first forward."""
    server.ask(input_ids=[5, 6, 7], **greedy(1))


def from_store(answer: dict) -> int:
    """Tokens of a prompt that came from the store."""
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)


def objects(store: Path) -> list[Path]:
    """Files of pages."""
    return [path for path in store.rglob("*") if path.is_file() and len(path.name) == 64]


def check_stored(server: Server, prompts: list[list[int]], expected: list[list[int]], whole: list[int]) -> list[dict]:
    """Answers that are stock's, to prompts that come from the store as far as it has them. On a busy machine computing may be faster."""
    for _ in tries(5, "all prompts come from the store"):
        found = server.ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))
        assert [each["output_ids"] for each in found] == expected
        if [from_store(each) for each in found] == whole:
            return found


def test_a_server_reads_the_prefixes_of_an_earlier_one_and_has_stocks_answers(launch, prompts, expected, tmp_path):
    store = tmp_path / "store"
    first = launch(*flags(store), env=STRICT)
    warm_up(first)
    cold = first.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in cold] == expected and not any(map(from_store, cold))
    # Answers are written, too.
    pages = sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts)
    until(lambda: len(objects(store)) >= pages, "all pages are written")
    whole = [(len(ids) - 1) // UNIT * UNIT for ids in prompts]
    check_stored(first, prompts, expected, whole)
    # Another process, with other compressed KV.
    second = launch(*flags(store), "--kv-compressor", "sink-recent", env=STRICT)
    warm_up(second)
    found = check_stored(second, prompts, expected, whole)
    assert all(each["meta_info"]["kv_drafts"] > 0 for each in found)
    assert second.metric("sglang_ext:store_hit_pages_total") >= sum(whole) // UNIT
    # Damaged pages are computed.
    for path in objects(store):
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    damaged = second.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in damaged] == expected and not any(map(from_store, damaged))
    assert second.metric("sglang_ext:store_bad_pages_total") > 0
    # So is everything without a store.
    shutil.rmtree(store)
    lost = second.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in lost] == expected and second.alive()
