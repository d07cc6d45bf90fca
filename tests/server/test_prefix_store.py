"""Prefixes outlive their server: another one reads them from a store, with stock's answers, whatever happens to the store."""

import shutil
import time
from pathlib import Path

import pytest
from server_pair import Pair
from servers import EXPECTED_TOKENS, POOL_TOKENS, STOCK, STRICT, VERIFIED, Server, greedy
from store_servers import AWS, file_url, mooncake_url, s3_url
from waiting import tries, until

pytestmark = pytest.mark.server
UNIT = 64
LOSSY = ("--kv-mode", "lossy")


def flags(store: Path | str, *mode: str) -> tuple[str, ...]:
    """Flags of a server with a store, which is a folder or a URL, by default in mode verified."""
    url = store if isinstance(store, str) else f"file:{store}"
    return (*(mode or VERIFIED), "--kv-host-gb", "0.5", "--kv-store", url, "--enable-metrics", "--enable-cache-report")


def from_store(answer: dict) -> int:
    """Tokens of a prompt that came from the store."""
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)


def objects(store: Path) -> list[Path]:
    """Files of pages."""
    return [path for path in store.rglob("*") if path.is_file() and len(path.name) == 64]


def check_stored(
    server: Server, prompts: list[list[int]], expected: list[list[int]], whole: list[int], params: dict = greedy(EXPECTED_TOKENS)
) -> list[dict]:
    """Answers that are stock's, to prompts that come from the store as far as it has them. On a busy machine computing may be faster."""
    for _ in tries(40, "all prompts come from the store"):
        found = server.ask_all(prompts, 1, **params)
        assert [each["output_ids"] for each in found] == expected
        if [from_store(each) for each in found] == whole:
            return found
        time.sleep(1)


def test_a_server_reads_the_prefixes_of_an_earlier_one_and_has_stocks_answers(launch, prompts, expected, tmp_path):
    store, prompts, expected = tmp_path / "store", prompts[2:], expected[2:]
    first = launch(*flags(store), env=STRICT)
    cold = first.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in cold] == expected and not any(map(from_store, cold))
    # Answers are written, too.
    pages = sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts)
    until(lambda: len(objects(store)) >= pages, "all pages are written")
    whole = [(len(ids) - 1) // UNIT * UNIT for ids in prompts]
    check_stored(first, prompts, expected, whole)
    # Another process, with other compressed KV.
    second = launch(*flags(store), "--kv-compressor", "sink-recent", env=STRICT)
    found = check_stored(second, prompts, expected, whole)
    assert all(each["meta_info"]["kv_drafts"] > 0 for each in found)
    assert second.metric("sglang_ext:store_hit_pages_total") >= sum(whole) // UNIT
    # Damaged pages are computed.
    for path in objects(store):
        path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    damaged = second.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in damaged] == expected and not any(map(from_store, damaged))
    assert second.metric("sglang_ext:store_bad_pages_total") > 0
    # So is everything without a store.
    shutil.rmtree(store)
    lost = second.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in lost] == expected and second.alive()


def written_pages(server: Server) -> float:
    """Pages that a server has written to its store."""
    # Metrics are updated when a request decodes.
    server.ask(input_ids=[5, 6, 7], **greedy(4))
    return server.metric("sglang_ext:store_written_pages_total")


OTHER_MODES = {"file-full": (file_url, STOCK), "s3-lossy": (s3_url, LOSSY), "mooncake-full": (mooncake_url, STOCK)}


@pytest.mark.parametrize(("store", "mode"), OTHER_MODES.values(), ids=OTHER_MODES)
def test_a_server_in_another_mode_shares_its_prefixes_with_one_in_mode_verified(store, mode, launch, model, prompts, expected, tmp_path):
    prompts, expected, environment = prompts[2:], expected[2:], {**STRICT, **AWS}
    first_prompt, *others = prompts
    with store(tmp_path) as url:
        other = launch(*flags(url, *mode), env=environment)
        # In mode lossy, only the first tokens are stock's: the compressed KV of a cached prefix is another one than that of a computed prompt.
        params, answers = (greedy(1), [each[:1] for each in expected]) if mode is LOSSY else (greedy(EXPECTED_TOKENS), expected)
        cold = other.ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))
        assert [each["output_ids"][: len(answers[0])] for each in cold] == answers and not any(map(from_store, cold))
        # Mode lossy writes no answers, whose KV is approximate.
        pages = sum((len(ids) + (0 if mode is LOSSY else EXPECTED_TOKENS - 1)) // UNIT for ids in prompts)
        until(lambda: written_pages(other) >= pages, "all pages are written", pause=0.2)
        whole = [(len(ids) - 1) // UNIT * UNIT for ids in prompts]
        found = check_stored(other, prompts, answers, whole, params)
        assert not any(each["meta_info"].get("kv_drafts") for each in found), "only mode verified drafts"
        assert found[0]["meta_info"]["cached_tokens_details"]["storage_backend"].endswith("Backend")
        # The names of stored pages do not tell weights apart that a running server loads.
        with pytest.raises(OSError, match="400"):
            other.request("update_weights_from_disk", {"model_path": str(model)})
        assert written_pages(other) == pages or mode is not LOSSY
        assert other.metric("sglang_ext:store_hit_pages_total") >= sum(whole) // UNIT
        assert other.metric("sglang_ext:host_stored_bytes_total") > 0 and other.metric("sglang_ext:drafts_total") == 0
        verified = launch(*flags(url), env=environment)
        # The first request that it serves.
        first = verified.ask(input_ids=first_prompt, **greedy(EXPECTED_TOKENS))
        assert first["output_ids"] == expected[0] and from_store(first) == whole[0]
        check_stored(verified, others, expected[1:], whole[1:])


@pytest.mark.parametrize("mode", ["verified", "full", "lossy"])
def test_a_prefill_server_writes_prefixes_and_reads_them(mode, model, preloaded, prompts, expected, tmp_path):
    common = (
        *("--kv-mode", mode, "--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup", "--max-total-tokens", str(POOL_TOKENS)),
        *("--page-size", "16", "--disaggregation-transfer-backend", "progressive", "--enable-metrics"),
    )
    store, prompts, expected = tmp_path / "store", prompts[2:], expected[2:]
    pair = Pair(model, tmp_path, preloaded, (*common, "--kv-host-gb", "0.5", "--kv-store", f"file:{store}"), common, env=STRICT)
    try:
        cold = [pair.ask(input_ids=ids, **greedy(EXPECTED_TOKENS)) for ids in prompts]
        # In mode lossy, only the first tokens are stock's.
        count = 1 if mode == "lossy" else EXPECTED_TOKENS
        assert [each["output_ids"][:count] for each in cold] == [each[:count] for each in expected]
        prefill, pages = pair.servers["prefill"], sum(len(ids) // UNIT for ids in prompts)
        until(lambda: len(objects(store)) >= pages, "all pages of prompts are written")
        prefill.flush_cache()
        for _ in tries(40, "prompts come from the store"):
            before = prefill.metric("sglang_ext:store_hit_pages_total")
            found = [pair.ask(input_ids=ids, **greedy(EXPECTED_TOKENS)) for ids in prompts]
            assert [each["output_ids"][:count] for each in found] == [each[:count] for each in expected]
            # It waits until the server has ended all requests, and counted them.
            prefill.flush_cache()
            if prefill.metric("sglang_ext:store_hit_pages_total") - before == sum((len(ids) - 1) // UNIT for ids in prompts):
                break
    finally:
        pair.stop()
