"""Documents scored ahead of requests serve verified decoding in the real server."""

import pytest
from servers import EXPECTED_TOKENS, STRICT, greedy

from sglang_ext.precompress import main

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def scores(model, prompts, tmp_path_factory):
    """A folder with the scores of three prompts, the last of which changed since."""
    from transformers import AutoTokenizer

    folder, out = (tmp_path_factory.mktemp(name) for name in ("texts", "scores"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [folder / f"{place}.txt" for place in range(3)]
    for text, prompt in zip(texts, prompts):
        text.write_text(tokenizer.decode(prompt))
    assert main(["--model", str(model), "--out", str(out), "--device", "cpu", *map(str, texts)]) == 0
    changed = max(out.iterdir(), key=lambda path: path.stat().st_mtime)
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    return out, changed


def test_prompts_that_begin_with_a_scored_document_are_drafted_by_its_scores_others_by_the_online_method(
    launch, scores, prompts, expected
):
    folder, changed = scores
    server = launch(
        "--kv-mode", "verified", "--kv-compressor", "kvzip", "--kv-draft-length", "8", "--kv-scores", str(folder),
        "--kv-online-compressor", "expected-attention", "--enable-metrics", env=STRICT,
    )
    assert server.request("/server_info")["kv_head_budgets"] == "adaptive", "the default"
    found = server.ask_all(prompts, **greedy(EXPECTED_TOKENS))
    assert [r["output_ids"] for r in found] == expected
    methods = [r["meta_info"]["kv_compressor"] for r in found]
    assert methods == ["kvzip", "kvzip", "expected-attention", "expected-attention"]
    for method in ("kvzip", "expected-attention"):
        assert server.metric(f'sglang_ext:copies_total{{compressor="{method}"') == 2
    assert f"{changed} has changed" in server.log.read_text()
