"""Conversations reuse as much of their prefixes with drafting as without, and a restarted server reads the rest from a store."""

from collections.abc import Callable
from pathlib import Path

import pytest
from servers import STRICT, VERIFIED, Server, greedy

from sglang_ext.mem_cache.prefix_store.backend import open_backend
from sglang_ext_bench.serving.conversations import PLAIN_LOOP, STOCK, STORED, VERIFIED as VERIFIED_ARM, Conversation, Turn, compare, replay
from sglang_ext_bench.serving.prefix_store import wait_until_quiet

pytestmark = pytest.mark.server
TURNS, MIDDLE, OUTPUT_LEN = 4, 2, 13


def conversations(prompts: list[list[int]]) -> list[Conversation]:
    """Two conversations with the same instructions. Each message has more than the 32 tokens that a compressor may compute again."""
    begins = range(0, 50 * (TURNS - 1), 50)
    return [
        Conversation([prompts[0][:200] + prompts[which][-150:], *(prompts[which][at : at + 37 + at % 11] for at in begins)]) for which in (1, 2)
    ]


def replayed(server: Server, given: list[Conversation], turns: int) -> None:
    # The first request after a start does not read the store.
    server.flush_cache()
    server.ask(input_ids=[5, 6, 7], **greedy(1))
    replay(server, given, turns, OUTPUT_LEN)


@pytest.fixture(scope="module")
def stocks(once: Callable, launch: Callable[..., Server], prompts: list[list[int]]) -> list[Conversation]:
    """The conversations with stock in its plain loop. Its overlapped loop also computes the KV of an answer's last token."""

    def ask() -> list[list[dict]]:
        given = conversations(prompts)
        replayed(launch("--enable-deterministic-inference", "--enable-cache-report", PLAIN_LOOP), given, TURNS)
        return [[vars(turn) for turn in each.turns] for each in given]

    return [Conversation([], [Turn(**turn) for turn in turns]) for turns in once("conversations", ask)]


def test_reuse_and_answers_are_stocks_before_and_after_a_restart(
    launch: Callable[..., Server], prompts: list[list[int]], stocks: list[Conversation], tmp_path: Path
) -> None:
    flags, url = (*VERIFIED, "--enable-cache-report", "--kv-host-gb", "0.5"), f"file:{tmp_path}/store"
    found = {STOCK: stocks, VERIFIED_ARM: conversations(prompts), STORED: conversations(prompts)}
    replayed(launch(*flags, env=STRICT), found[VERIFIED_ARM], TURNS)
    replayed(launch(*flags, "--kv-store", url, env=STRICT), found[STORED], MIDDLE)
    wait_until_quiet(open_backend(url))
    restarted = launch(*flags, "--kv-store", url, "--kv-budget", "0.5", env=STRICT)
    replayed(restarted, found[STORED], TURNS - MIDDLE)
    assert compare(found, MIDDLE) == (0, 0)
    # Reuse that is equal because there is none would not show.
    assert all(turn.cached > 200 for each in stocks for turn in each.turns[1:])
    # The second conversation finds its instructions in the tree, and the rest in the store.
    assert [each.turns[MIDDLE].stored > 100 for each in found[STORED]] == [True, True]
    assert restarted.metric("sglang_ext:drafts_total") > 0
