"""A prefill and a decode server whose prompts travel as codes: the answers of one lossy server, of as many bytes as its copies hold, and no
full KV for what is packed."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from server_pair import Pair
from servers import STRICT, Server, greedy, sampled
from waiting import tries, until

pytestmark = pytest.mark.server

METHOD = ("--kv-mode", "lossy", "--kv-compressor", "hack", "--kv-bits", "4")
COMMON = ("--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup", "--disaggregation-transfer-backend", "progressive")
# Slots of the decode server's pool, in which no two of the prompts would fit in full, and those that it keeps for an answer.
POOL, KEPT = 580, 16
# Slots of the prefill server's pool, which does not hold both of the longest prompts.
ROOM = 900
ANSWER = 12


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded | None) -> Iterator[Pair]:
    """Servers that the tests of this file share, with strict checks."""
    flags = (*COMMON, *METHOD, "--enable-metrics")
    prefill = (*flags, "--max-total-tokens", str(ROOM), "--chunked-prefill-size", "256", "--optimistic-prefill-attempts", "1")
    decode = (*flags, "--max-total-tokens", str(POOL), "--num-reserved-decode-tokens", str(KEPT))
    made = Pair(model, tmp_path_factory.mktemp("coded"), preloaded, prefill, decode, env=STRICT)
    yield made
    made.stop()


@pytest.fixture
def lossy(launch: Any) -> Server:
    """One server with the same method."""
    return launch(*METHOD, "--chunked-prefill-size", "256", "--max-total-tokens", "8000")


def answers(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Those of prompts that are computed, and do not begin as one of which that server holds codes alone."""
    server.flush_cache()
    return [server.ask(input_ids=ids, **greedy(ANSWER))["output_ids"] for ids in prompts]


def test_answers_are_those_of_one_lossy_server_cold_and_warm(pair: Pair, lossy: Server, prompts: list[list[int]]) -> None:
    asked = prompts[:3]
    expected = answers(lossy, asked)
    cold = [pair.ask(input_ids=ids, **greedy(ANSWER)) for ids in asked]
    warm = [pair.ask(input_ids=ids, **greedy(ANSWER)) for ids in asked]
    assert [each["output_ids"] for each in cold] == [each["output_ids"] for each in warm] == expected
    assert {each["meta_info"]["kv_compressor"] for each in cold + warm} == {"hack"}


def test_a_prompt_too_short_for_a_copy_travels_as_it_is(pair: Pair, lossy: Server, prompts: list[list[int]]) -> None:
    ids = prompts[1][:100]
    found = pair.ask(input_ids=ids, **greedy(ANSWER))
    assert [found["output_ids"]] == answers(lossy, [ids])
    assert found["meta_info"]["kv_compressor"] is None


def test_more_prompts_run_than_fit_in_full_and_who_is_retracted_is_answered_to_its_end(pair: Pair, prompts: list[list[int]]) -> None:
    tokens = 48
    asked = [prompts[2][:300] + prompts[3][i * 100 : i * 100 + 100] for i in range(6)]
    pair.wait()
    decode = pair.servers["decode"]
    for _ in tries(3, "they came one by one"):
        with sampled(decode, "sglang_ext:codes_alone_tokens") as packed, ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda ids: pair.ask(input_ids=ids, **greedy(tokens)), asked))
        assert [len(each["output_ids"]) for each in found] == [tokens] * len(asked)
        # Their answers do not fit beside their copies.
        if max(packed) > 2 * POOL and sum(each["meta_info"]["num_retractions"] for each in found) > 0:
            break
    decode.flush_cache()
    assert decode.metric("sglang_ext:codes_alone_tokens") == decode.metric("sglang_ext:compressed_bytes") == 0


def test_a_prompt_for_which_no_decode_server_has_room_waits_packed_and_leaves_its_slots_to_others(
    pair: Pair, lossy: Server, prompts: list[list[int]]
) -> None:
    first, other = prompts[1], prompts[2]
    expected = answers(lossy, [first, other])
    prefill, room = pair.servers["prefill"], pair.new_room()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(prefill.ask, input_ids=first, rid="waits", **greedy(ANSWER), **room)
        until(lambda: "request waits waits for its decode server" in prefill.log.read_text(), "it waits", pause=0.1)
        # No room for both: the pool holds 900 tokens.
        assert pair.ask(input_ids=other, **greedy(ANSWER))["output_ids"] == expected[1]
        found = pair.servers["decode"].ask(input_ids=first, **greedy(ANSWER), **room)
        assert sent.result()["meta_info"]["completion_tokens"] == 1
    assert found["output_ids"] == expected[0]


def test_aborts_leave_no_slot_behind(pair: Pair, prompts: list[list[int]]) -> None:
    bodies = [{"input_ids": ids, "rid": f"given up {i}", **greedy(200)} for i, ids in enumerate(prompts[:2])]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(pair.both, body, body) for body in bodies]
        # The first one while it decodes, the other whenever.
        while not all(each.done() for each in asked):
            for body in bodies:
                pair.servers["decode"].request("abort_request", {"rid": body["rid"]})
            time.sleep(0.05)
    for server in pair.servers.values():
        server.flush_cache()
    assert pair.ask(input_ids=prompts[0], **greedy(2))["meta_info"]["completion_tokens"] == 2
