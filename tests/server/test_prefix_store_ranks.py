"""Tensor-parallel ranks share a prefix store: each has its objects, and all read the same pages."""

from collections.abc import Callable
from pathlib import Path

import pytest
from servers import CORES, EXPECTED_TOKENS, STRICT, VERIFIED, Server, greedy
from sglang.srt.mem_cache.utils import get_hash_str
from waiting import tries, until

pytestmark = pytest.mark.server
UNIT, RANKS = 64, 3


def stored(answer: dict) -> int:
    """Tokens of a prompt that came from the store."""
    return (answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)


def test_a_page_that_one_rank_lacks_is_computed_by_all(
    launch: Callable[..., Server], prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    # The demo model's nine query and three KV heads divide by three. In strict mode trees that differ between ranks stop the server.
    flags = ("--tp-size", str(RANKS), "--kv-host-gb", "0.5", "--kv-store", f"file:{tmp_path}/store", "--enable-cache-report")
    server = launch(*VERIFIED, *flags, env={**STRICT, **CORES})
    server.ask(input_ids=[5, 6, 7], **greedy(1))
    prompts, expected = prompts[:2], expected[:2]

    def check(whole: list[int]) -> None:
        """Answers are stock's, and come from the store as far as it has them. On a busy machine computing may be faster."""
        for _ in tries(5, f"{whole} tokens come from the store"):
            answers = server.ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))
            assert [each["output_ids"] for each in answers] == expected
            if [stored(each) for each in answers] == whole:
                return

    assert [each["output_ids"] for each in server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))] == expected
    namespaces = [path for path in (tmp_path / "store").iterdir() if path.is_dir() and not path.name.startswith(".")]
    pages = sum((len(ids) + EXPECTED_TOKENS - 1) // UNIT for ids in prompts)
    until(lambda: len([*(tmp_path / "store").glob("*/*/*")]) == RANKS * pages, "all ranks write all pages")
    assert len(namespaces) == RANKS and {len([*each.glob("*/*")]) for each in namespaces} == {pages}
    check([len(ids) // UNIT * UNIT for ids in prompts])
    gone = [path for ids in prompts for path in namespaces[1].glob(f"*/{get_hash_str(ids, page_size=UNIT)[2]}")]
    assert len(gone) == len(prompts)
    for path in gone:
        path.unlink()
    answers = server.ask_all(prompts, 2, **greedy(EXPECTED_TOKENS))
    assert [each["output_ids"] for each in answers] == expected and server.alive()
    assert all(stored(each) <= 2 * UNIT for each in answers)
    until(lambda: all(path.exists() for path in gone), "the rank writes its missing pages again")
    check([len(ids) // UNIT * UNIT for ids in prompts])
