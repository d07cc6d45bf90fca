"""The same answers over SGLang's own transport and over links: twelve prompts, with three methods each, and one stock server's.

It needs mooncake, which needs libraries of the system: pip install mooncake-transfer-engine-non-cuda, Debian's libibverbs1, librdmacm1 and
liburing2. The other tests of two servers need neither.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from preloaded import Preloaded
from server_pair import Pair
from servers import POOL_TOKENS, STOCK, Server, greedy

pytestmark = pytest.mark.server

# More than a window of queries, which SGLang's transport does not bring: snapkv drafts once the decode server has as many itself.
TOKENS, AT_ONCE = 44, 4
COMMON = (
    *("--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup", "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
    *("--kv-mode", "verified", "--kv-draft-length", "6"),
)
# Of a server one method at most packs tokens.
PACKING = {"kivi": ("--kv-compressor", "kivi", "--kv-more-compressors", "snapkv"), "lynx": ("--kv-compressor", "lynx")}
TRANSPORTS = {"mooncake_tcp": (), "progressive": ("--kv-reference", "exact")}


@pytest.mark.parametrize("packing", PACKING)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_are_stocks_whatever_the_transport_and_the_method(
    transport: str,
    packing: str,
    model: Path,
    tmp_path: Path,
    preloaded: Preloaded | None,
    launch: Callable[..., Server],
    once: Callable,
    prompts: list[list[int]],
) -> None:
    pytest.importorskip("mooncake.engine", reason="it is not installed, or lacks libraries", exc_type=ImportError)
    twelve = [ids[begin : begin + 180 + 8 * begin] for ids in prompts[:4] for begin in (0, 7, 19)]
    expected = once("transported", lambda: [each["output_ids"] for each in launch(*STOCK).ask_all(twelve, 1, **greedy(TOKENS))])
    flags = (*COMMON, *PACKING[packing], "--disaggregation-transfer-backend", transport, *TRANSPORTS[transport])
    pair = Pair(model, tmp_path, preloaded, flags, flags)
    try:
        for name in PACKING[packing][1::2]:
            bodies = [{"input_ids": ids, **greedy(TOKENS, custom_params={"kv_compressor": name})} for ids in twelve]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(lambda body: pair.ask(**body), bodies))
            assert [each["output_ids"] for each in found] == expected, (transport, name)
            assert sum(each["meta_info"]["kv_drafts"] for each in found) > 0, (transport, name)
    finally:
        pair.stop()
