"""Each flag, SGLang's and this plugin's, is refused by name or served: none is accepted and does nothing."""

import dataclasses
import logging
from collections import Counter

import pytest
from argument_helpers import arguments
from served_options import SERVED
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_ext import flag_checks
from sglang_ext.arguments import KVServerArgs
from sglang_ext.config import refusal
from sglang_ext.config.refusal import Refusal
from sglang_ext.config.refused_options import REFUSALS, check_combinations
from sglang_ext.core import OptionError

# By option of the table of refusals, arguments that ask for it.
ASKED: dict[str, dict[str, object]] = {
    "--radix-cache-backend": {"radix_cache_backend": "flexkv"},
    "--disable-radix-cache": {"disable_radix_cache": True, "kv_host_gb": 1.0},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "--page-size": {"page_size": 0},
    "--kv-canary": {"kv_canary": "raise"},
    "--dp-size": {"dp_size": 2},
    "--pp-size": {"pp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--moe-dp-size": {"moe_dp_size": 2},
    "--dwdp-size": {"dwdp_size": 2},
    "--disaggregation-mode decode --kv-host-gb": {"disaggregation_mode": "decode", "kv_host_gb": 1.0},
    "--disaggregation-mode decode --kv-compressor kvzap": {"disaggregation_mode": "decode", "kv_compressor": "kvzap"},
    "--kv-bench-codec": {
        "kv_bench_codec": "sglang_ext_bench.baselines.quantized_codec:Int4Codec", "kv_mode": "lossy", "kv_compressor": "kivi", "kv_budget": 1,
        "disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive",
    },  # fmt: skip
    "--disaggregation-mode prefill --kv-full-tier": {"disaggregation_mode": "prefill", "kv_full_tier": "host"},
    "--speculative-algorithm": {"speculative_algorithm": "NGRAM"},
    "--decoupled-spec-role": {"decoupled_spec_role": "verifier"},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--kv-compressor verify-guided": {"kv_compressor": "verify-guided", "kv_mode": "lossy"},
    "--torchao-config": {"torchao_config": "int8wo"},
    "--tokenizer-worker-num": {"tokenizer_worker_num": 2},
    "--detokenizer-worker-num": {"detokenizer_worker_num": 2},
    "--rl-on-policy-target": {"rl_on_policy_target": "fsdp"},
}
VARIABLES = {refused.option for refused in REFUSALS if not refused.option.startswith("--")}

OVER_LINKS = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive"}
# By flag of this plugin, a value that is refused, and what else is given.
WRONG: dict[str, dict[str, object]] = {
    "kv_mode": {"kv_mode": "fast"},
    "kv_compressor": {"kv_compressor": "zip"},
    "kv_more_compressors": {"kv_more_compressors": " , "},
    "kv_scores": {"kv_scores": "/"},
    "kv_predictor": {"kv_predictor": "/"},
    "kv_online_compressor": {"kv_online_compressor": "kvzip"},
    "kv_bits": {"kv_bits": 4},
    "kv_partition": {"kv_partition": 64},
    "kv_prefill": {"kv_prefill": "fast"},
    "kv_budget": {"kv_budget": 0.0},
    "kv_sparse_from": {"kv_sparse_from": 127},
    "kv_select": {"kv_select": 2.5},
    "kv_select_every": {"kv_select_every": 0},
    "kv_select_by": {"kv_select_by": "mean"},
    "kv_cache_ranks": {"kv_cache_ranks": -1},
    "kv_pack_layers": {"kv_pack_layers": 0},
    "kv_cache_rank_gb": {"kv_cache_rank_gb": 0.0},
    "kv_cache_rank_gpu": {"kv_cache_rank_gpu": -1},
    "kv_score_bits": {"kv_score_bits": 5},
    "kv_head_budgets": {"kv_head_budgets": "even"},
    "kv_draft_length": {"kv_draft_length": 0},
    "kv_max_burst": {"kv_max_burst": 1},
    "kv_stream_pacing": {"kv_stream_pacing": "smooth"},
    "kv_host_gb": {"kv_host_gb": -1.0},
    "kv_full_tier": {"kv_full_tier": "disk"},
    "kv_offload_draft_length": {"kv_offload_draft_length": 0},
    "kv_reference": {"kv_reference": "int4", **OVER_LINKS},
    "kv_link_gbps": {"kv_link_gbps": 0.001, **OVER_LINKS},
    "kv_link_keys": {"kv_link_keys": "/", **OVER_LINKS},
    "kv_bench_acceptance": {"kv_bench_acceptance": 2.0},
    "kv_bench_corrupt_loads": {"kv_bench_corrupt_loads": 0},
    "kv_bench_codec": {"kv_bench_codec": "zip", **OVER_LINKS},
    "kv_bench_timeline": {"kv_bench_timeline": "/proc/no-such/times", **OVER_LINKS},
}
# By flag, a value that is served in verified.
RIGHT: dict[str, object] = {
    "kv_compressor": "sink-recent", "kv_more_compressors": "kivi", "kv_online_compressor": "sink-recent", "kv_budget": 0.5, "kv_sparse_from": 1024,
    "kv_head_budgets": "adaptive", "kv_draft_length": 8, "kv_max_burst": 4, "kv_stream_pacing": "even",
    "kv_cache_ranks": 1, "kv_pack_layers": 6, "kv_cache_rank_gb": 8.0, "kv_cache_rank_gpu": 1, "kv_score_bits": 8,
    "kv_host_gb": 1.0, "kv_full_tier": "auto", "kv_offload_draft_length": 32,
}  # fmt: skip


def field_of(refused: Refusal) -> str:
    return refused.option.split()[0].removeprefix("--").replace("-", "_")


def asking(refused: Refusal) -> dict[str, object]:
    """Arguments that ask for it: what the table above says, else its flag."""
    return ASKED.get(refused.option, {field_of(refused): True})


def test_each_argument_of_sglang_is_refused_by_name_or_served() -> None:
    ours = set(KVServerArgs.__annotations__)
    fields = {field.name for field in dataclasses.fields(ServerArgs)} - ours
    # An alias that SGLang folds into another argument.
    refused = {"grpc_mode"} | {field_of(each) for each in REFUSALS if each.option not in VARIABLES} - ours
    refused |= {part for each in REFUSALS for part in each.parts}
    served = Counter(name for names in SERVED.values() for name in names.split())
    assert not [name for name, count in served.items() if count > 1]
    assert refused & set(served) == set(), "an argument is either refused or served"
    assert fields - refused - set(served) == set(), "new in SGLang: refuse it, or say why it is served"
    assert (refused | set(served)) - fields == set(), "no longer in SGLang"


@pytest.mark.parametrize("refused", [r for r in REFUSALS if r.option not in VARIABLES], ids=lambda refused: refused.option)
def test_what_is_not_served_is_refused_with_reason_and_remedy(refused: Refusal) -> None:
    with pytest.raises(OptionError) as raised:
        check_combinations(arguments(**asking(refused)))
    assert str(raised.value).endswith(f"cannot be combined with {refused.option}: {refused.why}; {refused.remedy}.")


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_an_environment_variable_that_is_not_served_is_refused(name: str) -> None:
    with getattr(envs, name).override(True), pytest.raises(OptionError, match=f"{name}: .*; unset that variable"):
        check_combinations(arguments())


@pytest.mark.parametrize("refused", [r for r in REFUSALS if r.parts], ids=lambda refused: refused.option)
def test_parts_of_what_is_refused_are_refused_too(refused: Refusal) -> None:
    for part in refused.parts:
        with pytest.raises(OptionError, match=f"{refusal.flag(part)} .*(part of {refused.option}|{refused.why})"):
            check_combinations(arguments(**{part: "given"}))


def test_arguments_by_default_are_served() -> None:
    check_combinations(arguments())


@pytest.mark.parametrize("name", KVServerArgs.__annotations__)
def test_each_flag_of_this_plugin_refuses_a_wrong_value_by_name(name: str) -> None:
    with pytest.raises(OptionError) as raised:
        args = arguments(**WRONG[name])
        flag_checks.check_flags(args)
    assert str(raised.value).startswith(refusal.flag(name))


@pytest.mark.parametrize("name", RIGHT)
def test_each_flag_is_named_where_the_mode_is_full(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flag_checks.check_flags(arguments(**{name: RIGHT[name]}))
    assert "--kv-mode is full" not in caplog.text
    with caplog.at_level(logging.WARNING):
        flag_checks.check_flags(arguments(kv_mode="full", **{name: RIGHT[name]}))
    assert f"--kv-mode is full, stock SGLang, in which {refusal.flag(name)} does nothing: pass --kv-mode verified" in caplog.text


def test_all_flags_are_named_at_once_where_the_mode_is_full(caplog: pytest.LogCaptureFixture) -> None:
    flag_checks.check_flags(arguments(kv_mode="full", kv_budget=0.5, kv_draft_length=8))
    assert "--kv-budget, --kv-draft-length do nothing" in caplog.text
    caplog.clear()
    flag_checks.check_flags(arguments(kv_mode="full"))
    assert caplog.text == ""
