"""Shapes of attention that kernels once could not serve, on tiny models of random weights: many query heads a KV head, and one."""

import pytest
from servers import greedy
from test_gpu_decoding import DRAFTS, EXACT, VERIFIED
from test_gpu_several_methods import METHODS, ask

from sglang_ext.tools import CommandError
from sglang_ext_bench.comparing import families

pytestmark = pytest.mark.server

SEVERAL = ("--kv-mode", "verified", *DRAFTS, "--kv-compressor", METHODS[0], "--kv-more-compressors")


@pytest.fixture(scope="module")
def model_flag(model, tmp_path_factory):
    """The flag that names a family's model."""
    folder = tmp_path_factory.mktemp("families")
    return lambda name: ("--model-path", str(families.write_model(name, folder / name, str(model))))


@pytest.mark.parametrize("family", ["qwen3-gqa16-128", "llama-gqa16-128"])
def test_sixteen_query_heads_a_kv_head_draft_and_answers_are_stocks(launch, model_flag, prompts, family):
    flags = (*EXACT, *model_flag(family))
    expected = [r["output_ids"] for r in launch(*flags).ask_all(prompts, 1, **greedy(64))]
    methods = ("kivi", "snapkv:0.5", "snapkv+kivi")
    answers = ask(launch(*flags, *SEVERAL, ",".join(methods[1:])), prompts, methods)
    guided = launch(*flags, *VERIFIED, "--kv-compressor", "verify-guided")
    answers["verify-guided"] = guided.ask_all(prompts, 4, **greedy(64))
    for method, found in answers.items():
        assert [r["output_ids"] for r in found] == expected, method
        assert all(r["meta_info"]["kv_drafts"] > 0 for r in found), method


def test_deterministic_mode_refuses_one_query_head_a_kv_head(launch, model_flag):
    with pytest.raises(CommandError, match="query heads and as many KV heads.*--enable-deterministic-inference"):
        launch(*EXACT, *model_flag("llama-mha-64"), *VERIFIED)
