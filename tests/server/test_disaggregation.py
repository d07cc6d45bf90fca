"""A prefill and a decode server, driven without a router: KV over links, anchors first, and the answers of one stock server.

The prefill server keeps what compressors need of prompts, the decode server drafts and verifies; pages hold 16 tokens, chunks 128.
"""

import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import sglang as sgl
from preloaded import Preloaded
from server_pair import Pair, said
from servers import EXPECTED_TOKENS, POOL_TOKENS, STOCK, Server, assert_same_answers, greedy
from sglang.lang.interpreter import ProgramState
from waiting import tries, until

from sglang_ext.tools.server_process import free_port
from sglang_ext_bench.client import readings
from sglang_ext.hooks.request_body import HEADER
from sglang_ext.router_endpoint import RouterEndpoint
from sglang_ext.serve_pd import ROUTER, Router
from sglang_ext_bench.server import BenchServer

pytestmark = pytest.mark.server

COMMON = (
    *("--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup", "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
    *("--disaggregation-transfer-backend", "progressive", "--kv-reference", "exact", "--enable-metrics"),
)
DRAFTS = 4
METHODS = ("--kv-mode", "verified", "--kv-compressor", "hack", "--kv-more-compressors", "snapkv", "--kv-draft-length", str(DRAFTS))
PREFILL = (*METHODS, "--chunked-prefill-size", "128", "--kv-link-gbps", "0.05")
# On anchors more drafts are made than a round has, and so few that an answer goes on with copies once all of its KV is there.
DECODE = (*METHODS, "--kv-max-burst", "7")


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded | None) -> Iterator[Pair]:
    """Servers that the tests of this file share."""
    made = Pair(model, tmp_path_factory.mktemp("disaggregation"), preloaded, (*COMMON, *PREFILL), (*COMMON, *DECODE))
    yield made
    made.stop()


def assert_stocks(expected: Any, found: Any) -> None:
    assert_same_answers(expected, found, fallback=None)
    tops = [answer["meta_info"].get("output_token_logprobs") for answer in (expected, found)]
    if tops[0] is not None:
        assert [token for _, token, _ in tops[1]] == [token for _, token, _ in tops[0]]
        assert [each for each, *_ in tops[1]] == pytest.approx([each for each, *_ in tops[0]], abs=1e-3)


def test_answers_of_all_kinds_at_once_and_from_a_warm_prefix_are_stocks(pair: Pair, kinds: dict[str, tuple[dict[str, Any], Any]]) -> None:
    asked = {kind: body for kind, (body, _) in kinds.items()}
    # The prefill server has all of these prompts, the decode server none: however slowly prompts are computed, the link is waited for.
    for body in asked.values():
        pair.ask(input_ids=body["input_ids"], **greedy(1))
    for _ in tries(3, "no more drafts were made on anchors than a round has"):
        pair.servers["decode"].flush_cache()
        with ThreadPoolExecutor(len(asked)) as pool:
            cold = dict(zip(asked, pool.map(lambda body: pair.ask(**body), asked.values()), strict=True))
        for kind, answer in cold.items():
            assert_stocks(kinds[kind][1], answer)
            assert answer["meta_info"]["kv_drafts"] > 0
        # Prompts are computed on exact KV; once all of that is there, drafts are made on codes. A short answer may end before.
        methods = {answer["meta_info"]["kv_compressor"] for answer in cold.values()}
        assert "hack" in methods and methods <= {"hack", None}
        if any(sum(answer["meta_info"]["kv_offer_histogram"][DRAFTS + 1 :]) for answer in cold.values()):
            break
    warm = pair.ask(**asked["greedy"])
    assert_stocks(kinds["greedy"][1], warm)
    assert warm["meta_info"]["kv_drafts"] > 0
    # All but the prompt's newest tokens, whose queries are needed, in whole pages.
    assert warm["meta_info"]["cached_tokens"] >= 256


def long(prompts: list[list[int]]) -> list[int]:
    """Tokens whose KV the link takes many seconds for."""
    return [token for prompt in reversed(prompts) for token in prompt]


def told(pair: Pair, role: str, name: str) -> dict[str, float]:
    """A counter of one server, by its second label."""
    series = readings(pair.servers[role].request("metrics"), f"sglang_ext:{name}")
    return {re.search(r'(?:stream|reason)="(\w+)"', labels)[1]: value for labels, value in series}


def test_both_servers_tell_what_went_over_the_link(pair: Pair, prompts: list[list[int]]) -> None:
    pair.ask(input_ids=prompts[0], **greedy(2))
    sent, received = told(pair, "prefill", "kv_link_sent_bytes_total"), told(pair, "decode", "kv_link_received_bytes_total")
    assert sent == received and 0 < sent["aux"] < sent["anchor"] < sent["residual"] and sent["whole"] == 0
    for server in pair.servers.values():
        # The last acknowledgement may be on its way.
        until(lambda: server.metric("sglang_ext:kv_link_rooms{") == 0, "all rooms are over", pause=0.1)
        assert server.metric("sglang_ext:kv_links{") == 1
        assert server.metric("sglang_ext:kv_link_reconnects_total", "sglang_ext:kv_link_refused_frames_total") == 0
    # The link has 0.05 Gbit/s.
    assert told(pair, "prefill", "kv_link_wait_seconds_total")["rate"] > 0


def test_a_method_that_chooses_by_queries_of_the_prompt_drafts_at_once(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    copies = 'sglang_ext:copies_total{compressor="snapkv"'
    found = pair.ask(input_ids=prompts[1], **greedy(EXPECTED_TOKENS, custom_params={"kv_compressor": "snapkv"}))
    assert found["output_ids"] == expected[1]
    assert found["meta_info"]["kv_compressor"] == "snapkv" and found["meta_info"]["kv_drafts"] > 0
    # So few tokens bring fewer queries of their own than a copy is chosen by.
    assert EXPECTED_TOKENS < 32 and pair.servers["decode"].metric(copies) == 1


class StartedRouter(Router, BenchServer):
    """SGLang's router, as a context manager, with requests."""


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedRouter]:
    """SGLang's router before both."""
    pytest.importorskip(ROUTER, reason="make test installs it, from requirements/pd.txt, where the package index has it for this machine")
    pair.wait()
    log = tmp_path_factory.mktemp("router") / "router.log"
    with StartedRouter(free_port(), [server.port for server in pair.servers.values()], pair.bootstrap, log) as started:
        yield started


def test_sglangs_router_sends_requests_through_both(router: StartedRouter, kinds: dict[str, tuple[dict[str, Any], Any]]) -> None:
    body, expected = kinds["greedy"]
    assert_stocks(expected, router.request("generate", body))


def test_a_method_that_is_asked_for_in_a_header_passes_through_sglangs_router(
    router: Router, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    headers = {"Content-Type": "application/json", HEADER: '{"kv_compressor": "snapkv"}'}
    body = {"input_ids": prompts[1], **greedy(EXPECTED_TOKENS)}
    request = urllib.request.Request(f"{router.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    assert found["output_ids"] == expected[1] and found["meta_info"]["kv_compressor"] == "snapkv"


@sgl.function
def choose(s: ProgramState) -> None:
    """A choice by the log-probabilities of prompts, then two branches that depend on it."""
    s += "Paris is the capital of France. Rome is the capital of" + sgl.select("country", choices=[" Spain", " Italy", " the moon"])
    first, second = s.fork(2)
    first += ". Its largest city is" + sgl.gen("text", max_tokens=4, temperature=0)
    second += ". Its people speak" + sgl.gen("text", max_tokens=4, temperature=0)
    s += first["text"] + second["text"]


def chosen(backend: sgl.RuntimeEndpoint) -> list[Any]:
    """The text of a run, and the scores of its choice."""
    state = choose.run(backend=backend)
    assert state.error() is None, state.error()
    return [state.text(), state.get_meta_info("country")["normalized_prompt_logprobs"]]


def test_a_frontend_program_behind_the_router_gives_stocks_state(router: Router, once: Callable, launch: Callable[..., Server]) -> None:
    text, scores = once("chosen", lambda: chosen(sgl.RuntimeEndpoint(launch(*STOCK).url)))
    found = chosen(RouterEndpoint(router.url))
    assert found[0] == text and " Italy" in text
    assert found[1] == pytest.approx(scores, abs=1e-3)


def test_an_aborted_request_ends_on_both_sides_and_the_next_is_answered(pair: Pair, prompts: list[list[int]]) -> None:
    pair.wait()
    body = {"input_ids": long(prompts), "rid": "given up", **greedy(200)}
    sent = lambda: pair.servers["prefill"].metric("sglang_ext:kv_link_sent_bytes_total")
    before = sent()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.both, body, body)
        # Nobody who has it whole, or answers it, would be told of its end.
        until(lambda: sent() > before or asked.done(), "its KV travels", seconds=120, pause=0.1)
        while not asked.done():
            pair.servers["decode"].request("abort_request", {"rid": "given up"})
            time.sleep(0.1)
        prefill, decode = asked.result()
    assert "Aborted by AbortReq" in decode
    assert "the receiver ended it" in prefill or "the decode side ended it" in prefill
    assert pair.ask(input_ids=prompts[2][:100], **greedy(2))["meta_info"]["completion_tokens"] == 2


def test_a_request_whose_prompts_differ_ends_with_an_error_that_says_so(pair: Pair, prompts: list[list[int]]) -> None:
    bodies = [{"input_ids": ids, **greedy(4)} for ids in (prompts[0][:96], prompts[1][:96])]
    _, decode = pair.both(*bodies)
    assert "prefix hash" in decode and "that of the prompt is" in decode


def test_a_request_for_no_token_with_a_grammar_ends_at_both_servers(pair: Pair, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], **greedy(0, regex="2024-[0-9]{2}", ignore_eos=False)}
    ends = [side["meta_info"]["finish_reason"]["type"] for side in pair.both(body, body)]
    assert ends == ["length"] * 2 and all(server.alive() for server in pair.servers.values())


@pytest.mark.parametrize("sides", [("prefill", "decode"), ("decode", "prefill")])
def test_a_request_whose_grammar_is_none_ends_with_status_400_as_on_one_server(pair: Pair, sides: tuple[str, str]) -> None:
    """Whichever server is through with it before the other has heard of it."""
    pair.wait()
    body = {"text": "A list of", **greedy(4, regex="[a-z"), **pair.new_room()}
    for side in sides:
        with pytest.raises(HTTPError) as refused:
            pair.servers[side].ask(**body)
        assert refused.value.code == 400 and "Failed to compile regex grammar" in refused.value.read().decode()


def test_several_answers_of_one_request_are_stocks(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    body = {"input_ids": prompts[1], **greedy(EXPECTED_TOKENS, n=2)}
    prefill, decode = pair.both(body, body)
    assert [each["output_ids"] for each in decode] == [expected[1]] * 2
    assert len(prefill) == 2


def test_a_prefill_server_that_stops_holds_up_no_turn_and_its_request_is_answered_when_it_goes_on(
    pair: Pair, prompts: list[list[int]]
) -> None:
    pair.wait()
    prefill, decode = pair.servers["prefill"], pair.servers["decode"]
    body = {"input_ids": long(prompts), **greedy(24)}
    before = told(pair, "decode", "kv_link_received_bytes_total").get("aux", 0)
    begun = pair.begin(body, body)
    # The first token comes after all anchors: the request decodes early then, and its residuals still travel.
    came = lambda: told(pair, "decode", "kv_link_received_bytes_total").get("aux", 0)
    until(lambda: came() > before or begun[1].done(), "the request decodes early", seconds=120, pause=0.1)
    assert not begun[1].done()
    os.killpg(prefill.group, signal.SIGSTOP)
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
            lost = {**pair.new_room(), "bootstrap_port": silent.getsockname()[1]}
            asked = pool.submit(lambda: decode.ask(input_ids=[1, 2, 3], **greedy(2), **lost))
            turns = []
            # The link gives up after 15 s, and the request without a prefill server after 30.
            while not asked.done():
                start = time.monotonic()
                decode.request("server_info")
                turns.append(time.monotonic() - start)
                time.sleep(0.1)
            assert isinstance(asked.exception(), HTTPError) and asked.exception().code == 503
        # An attempt to reach a server that does not answer takes 5 s.
        assert max(turns) < 4
    finally:
        os.killpg(prefill.group, signal.SIGCONT)
    answer = said(begun[1])
    assert not isinstance(answer, str), answer
    assert answer["output_ids"] == pair.ask(**body)["output_ids"]


@pytest.mark.usefixtures("kinds")  # so that it runs after all others, some of which wait for stock's answers
def test_a_decode_server_killed_while_residuals_travel_leaves_nothing_at_the_prefill_server(pair: Pair, prompts: list[list[int]]) -> None:
    """The last test here: its decode server is gone."""
    pair.wait()
    body = {"input_ids": long(prompts), **greedy(200)}
    came = lambda: told(pair, "decode", "kv_link_received_bytes_total").get("residual", 0)
    before = came()
    prefill, decode = pair.begin(body, body)
    until(lambda: came() > before or decode.done(), "residuals travel", seconds=120, pause=0.1)
    assert not decode.done()
    os.killpg(pair.servers["decode"].group, signal.SIGKILL)
    assert isinstance(decode.exception(60), OSError)
    # It has answered, or says why not.
    assert prefill.exception(60) is None or "the receiver" in said(prefill)
    # Which is refused while a request holds slots.
    pair.servers["prefill"].flush_cache()
