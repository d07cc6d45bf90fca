"""A prefill and a decode server of three ranks each, as on two machines: each rank's KV goes over an encrypted link of its own, and ranks
agree on what is there."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from preloaded import Preloaded
from server_pair import Pair
from servers import CORES, POOL_TOKENS, STRICT, greedy
from waiting import tries

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys

pytestmark = pytest.mark.server

DRAFTS, TOKENS = 4, 16
COMMON = (
    *("--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup", "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
    *("--tp-size", "3", "--disaggregation-transfer-backend", "progressive", "--kv-reference", "exact"),
    *("--kv-mode", "verified", "--kv-compressor", "kivi", "--kv-draft-length", str(DRAFTS)),
)
# An answer's first tokens are drafted on anchors, so few of them that it goes on once all of its KV is there.
PREFILL = (*COMMON, "--kv-link-gbps", "0.03")
DECODE = (*COMMON, "--enable-metrics", "--kv-max-burst", "9")


def test_each_ranks_kv_comes_by_itself_and_answers_are_those_of_one_server(
    model: Path, tmp_path: Path, preloaded: Preloaded | None, prompts: list[list[int]], expected: list[list[int]], launch: Callable
) -> None:
    # In strict mode a round that differs between ranks stops the server.
    LinkKeys.generate().write(tmp_path / "keys")
    keys = "--kv-link-keys", str(tmp_path / "keys")
    pair = Pair(model, tmp_path, preloaded, (*PREFILL, *keys), (*DECODE, *keys), STRICT | CORES)
    try:
        for _ in tries(2, "no more drafts than a round has were made before the residual of some rank was there"):
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda ids: pair.ask(input_ids=ids, **greedy(TOKENS)), prompts[2:4]))
            assert [each["output_ids"] for each in found] == [ids[:TOKENS] for ids in expected[2:4]]
            if any(sum(each["meta_info"]["kv_offer_histogram"][DRAFTS + 1 :]) for each in found):
                break
            # The prefill server has them then, so that the links alone are waited for.
            pair.servers["decode"].flush_cache()
        warm = pair.ask(input_ids=prompts[2], **greedy(TOKENS))
        assert warm["output_ids"] == expected[2][:TOKENS] and warm["meta_info"]["cached_tokens"] > 0
    finally:
        pair.stop()
