"""Each flag, SGLang's and this plugin's, is refused by name or served: none is accepted and does nothing."""

import dataclasses
from collections import Counter
from contextlib import nullcontext

import pytest
from argument_helpers import arguments
from served_options import SERVED
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_ext import flag_checks
from sglang_ext.config.flags import FLAGS
from sglang_ext.config.combinations import FULL_MODE, REFUSALS
from sglang_ext.config.rules import Refusal, option
from sglang_ext.core import OptionError

# By option of the table of refusals, arguments that ask for it.
ASKED: dict[str, dict[str, object]] = {
    "--radix-cache-backend": {"radix_cache_backend": "flexkv"},
    "--kv-cache-dtype": {"kv_cache_dtype": "fp8_e4m3"},
    "--kv-canary": {"kv_canary": "raise"},
    "--dp-size": {"dp_size": 2},
    "--pp-size": {"pp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--moe-dp-size": {"moe_dp_size": 2},
    "--dwdp-size": {"dwdp_size": 2},
    "--disaggregation-mode decode --kv-compressor kvzap": {"disaggregation_mode": "decode", "kv_compressor": "kvzap"},
    "--speculative-algorithm": {"speculative_algorithm": "NGRAM"},
    "--decoupled-spec-role": {"decoupled_spec_role": "verifier"},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--torchao-config": {"torchao_config": "int8wo"},
    "--tokenizer-worker-num": {"tokenizer_worker_num": 2},
    "--detokenizer-worker-num": {"detokenizer_worker_num": 2},
    "--rl-on-policy-target": {"rl_on_policy_target": "fsdp"},
}
KV_MODE = FLAGS[0]
VARIABLES = {refused.option for refused in REFUSALS if not refused.option.startswith("--")}


def field_of(refused: Refusal) -> str:
    return refused.option.split()[0].removeprefix("--").replace("-", "_")


def asking(refused: Refusal) -> dict[str, object]:
    """Arguments that ask for it: what the table above says, else its flag."""
    return ASKED.get(refused.option, {field_of(refused): True})


def test_each_argument_of_sglang_is_refused_by_name_or_served() -> None:
    ours = {flag.name for flag in FLAGS}
    fields = {field.name for field in dataclasses.fields(ServerArgs)} - ours
    # An alias that SGLang folds into another argument.
    refused = {"grpc_mode"} | {field_of(each) for each in REFUSALS if each.option not in VARIABLES} - ours
    refused |= {part for each in REFUSALS for part in each.dependent_fields}
    served = Counter(name for names in SERVED.values() for name in names.split())
    assert not [name for name, count in served.items() if count > 1]
    assert refused & set(served) == set(), "an argument is either refused or served"
    assert fields - refused - set(served) == set(), "new in SGLang: refuse it, or say why it is served"
    assert (refused | set(served)) - fields == set(), "no longer in SGLang"


@pytest.mark.parametrize("refused", [r for r in REFUSALS if r.option not in VARIABLES], ids=lambda refused: refused.option)
def test_what_is_not_served_is_refused_with_reason_and_remedy(refused: Refusal) -> None:
    with pytest.raises(OptionError) as raised:
        KV_MODE.check_conflicts(arguments(**asking(refused)))
    assert str(raised.value).endswith(f"cannot be combined with {refused.option}: {refused.why}; {refused.remedy}, or use --kv-mode full.")


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_an_environment_variable_that_is_not_served_is_refused(name: str) -> None:
    with getattr(envs, name).override(True), pytest.raises(OptionError, match=f"{name}: .*; unset that variable, or use --kv-mode full."):
        KV_MODE.check_conflicts(arguments())


@pytest.mark.parametrize("refused", [r for r in REFUSALS if r.dependent_fields], ids=lambda refused: refused.option)
def test_parts_of_what_is_refused_are_refused_too(refused: Refusal) -> None:
    for part in refused.dependent_fields:
        with pytest.raises(OptionError, match=f"{option(part)} .*(part of {refused.option}|{refused.why})"):
            KV_MODE.check_conflicts(arguments(**{part: "given"}))


def test_arguments_by_default_are_served() -> None:
    KV_MODE.check_conflicts(arguments())


@pytest.mark.parametrize("refused", FULL_MODE, ids=lambda refused: refused.option)
def test_full_mode_refuses_host_memory_with_what_it_does_not_serve(refused: Refusal) -> None:
    is_variable = not refused.option.startswith("--")
    given = {} if is_variable else asking(refused)
    with getattr(envs, refused.option).override(True) if is_variable else nullcontext():
        flag_checks.check_flags(arguments(kv_mode="full", **given))
        with pytest.raises(OptionError) as raised:
            flag_checks.check_flags(arguments(kv_mode="full", kv_host_gb=1.0, **given))
    told = f"--kv-host-gb 1 cannot be combined with {refused.option}: {refused.why}; {refused.remedy}, or leave --kv-host-gb out."
    assert str(raised.value) == told


def test_full_mode_refuses_host_memory_with_parts_of_what_it_does_not_serve() -> None:
    flag_checks.check_flags(arguments(kv_mode="full", hicache_ratio=3.0))
    with pytest.raises(OptionError, match="hicache-ratio .*part of --enable-hierarchical-cache.*; leave it out, or leave --kv-host-gb out"):
        flag_checks.check_flags(arguments(kv_mode="full", kv_host_gb=1.0, hicache_ratio=3.0))


def test_a_page_without_tokens_is_refused() -> None:
    flag_checks.check_flags(arguments(kv_mode="full", page_size=0))
    for given in ({"kv_mode": "verified"}, {"kv_mode": "full", "kv_host_gb": 1.0}):
        with pytest.raises(OptionError, match="--page-size is 0; pass a whole number from 1"):
            flag_checks.check_flags(arguments(page_size=0, **given))


def test_full_mode_with_host_memory_and_a_store_has_all_flags_in_effect(caplog: pytest.LogCaptureFixture) -> None:
    flag_checks.check_flags(arguments(kv_mode="full", kv_host_gb=1.0, kv_store="file:/store", kv_store_form="anchored"))
    assert caplog.text == ""


def test_all_flags_are_named_at_once_where_the_mode_is_full(caplog: pytest.LogCaptureFixture) -> None:
    flag_checks.check_flags(arguments(kv_mode="full", kv_budget=0.5, kv_draft_length=8))
    assert "--kv-budget, --kv-draft-length have no effect: --kv-mode is full" in caplog.text
    caplog.clear()
    flag_checks.check_flags(arguments(kv_mode="full"))
    assert caplog.text == ""
