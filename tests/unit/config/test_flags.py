"""The table of flags: each entry's values, conditions and conflicts are checked as the table says."""

import logging
import math
from collections.abc import Iterator

import pytest
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.config.combinations import (
    BURST_LIMITS_ROUND,
    CAN_OFFLOAD_FULL_KV,
    HAS_NO_OFFLOAD_OBSTACLE,
    HAS_ONLINE_METHOD,
    HAS_PROGRESSIVE_TRANSFER,
    HAS_RANKS,
    HAS_SELECTOR,
    HAS_STORE,
    HAS_TIMELINE,
    IS_NOT_PREFILL_SERVER,
    IS_PREFILL_SERVER,
    IS_SPADE,
    IS_VERIFIED,
    NEEDS_ONLINE_METHOD,
    SELECTS_FEWER_THAN_ALL,
)
from sglang_ext.config.flags import FLAGS, GROUPS
from sglang_ext.config.rules import ANY_MODE, IS_NOT_FULL_MODE, Condition, Flag, KVServerArgs, Range, one_of, render_text
from sglang_ext.core import OptionError

PREFILL, DECODE = ({"disaggregation_mode": role, "disaggregation_transfer_backend": "progressive"} for role in ("prefill", "decode"))
CODEC = "sglang_ext_bench.baselines.quantized_codec:Int4Codec"
# Arguments that meet a condition, and arguments that do not.
MET: dict[Condition, dict[str, object]] = {
    ANY_MODE: {}, IS_NOT_FULL_MODE: {}, HAS_PROGRESSIVE_TRANSFER: DECODE, HAS_TIMELINE: DECODE, IS_PREFILL_SERVER: PREFILL, IS_VERIFIED: {},
    BURST_LIMITS_ROUND: {}, HAS_NO_OFFLOAD_OBSTACLE: {"kv_host_gb": 1.0},
    CAN_OFFLOAD_FULL_KV: {"kv_host_gb": 1.0, "kv_full_tier": "auto"}, HAS_SELECTOR: {"kv_compressor": "spade"}, SELECTS_FEWER_THAN_ALL: {},
    IS_SPADE: {"kv_compressor": "spade"}, HAS_RANKS: {"kv_cache_ranks": 1}, IS_NOT_PREFILL_SERVER: {"disaggregation_mode": "null"},
    HAS_ONLINE_METHOD: {"kv_compressor": "kvzap", "kv_predictor": "/"}, NEEDS_ONLINE_METHOD: {"kv_host_gb": 1.0},
    HAS_STORE: {"kv_store": "file:/store", "kv_host_gb": 1.0},
}  # fmt: skip
UNMET: dict[Condition, dict[str, object]] = {
    IS_NOT_FULL_MODE: {"kv_mode": "full"}, HAS_PROGRESSIVE_TRANSFER: {}, HAS_TIMELINE: {}, IS_PREFILL_SERVER: DECODE,
    IS_VERIFIED: {"kv_mode": "lossy"}, BURST_LIMITS_ROUND: {"kv_draft_length": 2}, HAS_NO_OFFLOAD_OBSTACLE: {},
    CAN_OFFLOAD_FULL_KV: {"kv_host_gb": 1.0}, HAS_SELECTOR: {}, SELECTS_FEWER_THAN_ALL: {"kv_select": 1.0},
    IS_SPADE: {"kv_compressor": "quest"}, HAS_RANKS: {}, IS_NOT_PREFILL_SERVER: {"disaggregation_mode": "prefill"}, HAS_ONLINE_METHOD: {},
    NEEDS_ONLINE_METHOD: {"kv_host_gb": 0.0}, HAS_STORE: {},
}  # fmt: skip
# By flag, a value that is served, and other flags that it needs.
RIGHT: dict[str, dict[str, object]] = {
    "kv_mode": {}, "kv_compressor": {"kv_compressor": "sink-recent"}, "kv_budget": {"kv_budget": 0.5},
    "kv_sparse_from": {"kv_sparse_from": 1024}, "kv_bits": {"kv_bits": 2, "kv_compressor": "kivi"},
    "kv_partition": {"kv_partition": 32, "kv_compressor": "hack"},
    "kv_prefill": {"kv_prefill": "quantized", "kv_compressor": "hack", "kv_mode": "lossy"}, "kv_head_budgets": {"kv_head_budgets": "adaptive"},
    "kv_more_compressors": {"kv_more_compressors": "kivi"}, "kv_scores": {"kv_scores": "/", "kv_compressor": "kvzip"},
    "kv_predictor": {"kv_predictor": "/", "kv_compressor": "kvzap"}, "kv_online_compressor": {"kv_online_compressor": "sink-recent"},
    "kv_select": {"kv_select": 0.5}, "kv_select_every": {"kv_select_every": 2}, "kv_select_by": {"kv_select_by": "regressed"},
    "kv_cache_ranks": {"kv_cache_ranks": 1}, "kv_cache_rank_gpu": {"kv_cache_rank_gpu": 1}, "kv_pack_layers": {"kv_pack_layers": 6},
    "kv_cache_rank_gb": {"kv_cache_rank_gb": 8.0}, "kv_score_bits": {"kv_score_bits": 8}, "kv_draft_length": {"kv_draft_length": 8},
    "kv_max_burst": {"kv_max_burst": 4}, "kv_stream_pacing": {"kv_stream_pacing": "even"}, "kv_host_gb": {"kv_host_gb": 1.0},
    "kv_store": {"kv_store": "file:/store", "kv_host_gb": 1.0}, "kv_store_form": {"kv_store_form": "anchored"},
    "kv_full_tier": {"kv_full_tier": "auto"}, "kv_offload_draft_length": {"kv_offload_draft_length": 32}, "kv_reference": {"kv_reference": "int8"},
    "kv_link_gbps": {"kv_link_gbps": 1.0}, "kv_link_keys": {"kv_link_keys": "keys"}, "kv_bench_acceptance": {"kv_bench_acceptance": 0.9},
    "kv_bench_corrupt_loads": {"kv_bench_corrupt_loads": 7, "kv_host_gb": 1.0}, "kv_bench_codec": {"kv_bench_codec": CODEC},
    "kv_bench_timeline": {"kv_bench_timeline": "times"},
}  # fmt: skip
# By flag whose values are not in the table, arguments that are refused.
WRONG: dict[str, dict[str, object]] = {
    "kv_compressor": {"kv_compressor": "zip"}, "kv_more_compressors": {"kv_more_compressors": " , "}, "kv_scores": {"kv_scores": "/"},
    "kv_predictor": {"kv_predictor": "/"}, "kv_bits": {"kv_bits": 3, "kv_compressor": "kivi"},
    "kv_partition": {"kv_partition": 48, "kv_compressor": "hack"}, "kv_link_keys": {"kv_link_keys": "/", **DECODE},
    "kv_store": {"kv_store": "ftp://host", "kv_host_gb": 1.0},
    "kv_bench_codec": {"kv_bench_codec": "zip", **DECODE}, "kv_bench_timeline": {"kv_bench_timeline": "/proc/no-such/times", **DECODE},
}  # fmt: skip
# By flag, arguments that its conflicts refuse, in the order of the table.
CONFLICTING: dict[str, list[dict[str, object]]] = {
    "kv_compressor": [
        {"kv_compressor": "verify-guided", "kv_mode": "lossy"}, {"kv_compressor": "quest", "device": "xpu"},
        {"kv_compressor": "quest", "device": "cuda", "page_size": 8},
        {"kv_compressor": "quest", "device": "cuda", "page_size": 16, "disaggregation_mode": "decode"},
    ],
    "kv_budget": [{"kv_budget": 0.25, "kv_compressor": "spade", "kv_select": 256}],
    "kv_bits": [{"kv_bits": 4, "kv_compressor": "spade"}, {"kv_bits": 4, "kv_compressor": "quest"}, {"kv_bits": 4, "kv_compressor": "sink-recent"}],
    "kv_partition": [{"kv_partition": 64}],
    "kv_prefill": [
        {"kv_prefill": "quantized", "kv_mode": "lossy", "kv_compressor": "snapkv+hack"}, {"kv_prefill": "quantized", "kv_compressor": "hack"},
        {**RIGHT["kv_prefill"], "device": "npu"}, {**RIGHT["kv_prefill"], "device": "cpu", "disaggregation_mode": "decode"},
    ],
    "kv_head_budgets": [
        {"kv_head_budgets": "adaptive", "kv_more_compressors": "sink-recent"}, {"kv_head_budgets": "adaptive", "kv_compressor": "snapkv+kivi"},
        {"kv_head_budgets": "adaptive", "kv_compressor": "expected-attention"},
    ],
    "kv_cache_ranks": [
        {"kv_cache_ranks": 1, "kv_compressor": "spade", "tp_size": 2}, {"kv_cache_ranks": 1, "kv_compressor": "spade", "device": "xpu"}
    ],
    "kv_cache_rank_gpu": [{"kv_cache_rank_gpu": 1, "kv_cache_ranks": 1, "kv_compressor": "spade", "device": "cpu"}],
    "kv_pack_layers": [{"kv_pack_layers": 2, "kv_cache_ranks": 1, "kv_compressor": "spade", "device": "cuda"}],
    "kv_score_bits": [{"kv_score_bits": 4, "kv_compressor": "spade", "disaggregation_mode": "decode"}],
    "kv_host_gb": [{"kv_host_gb": 1.0, "disaggregation_mode": "decode"}, {"kv_host_gb": 1.0, "disable_radix_cache": True}],
    "kv_store": [
        {"kv_store": "file:/store", "disaggregation_mode": "decode"}, {"kv_store": "file:/store"},
        {"kv_store": "file:/store", "kv_host_gb": 1.0, **RIGHT["kv_prefill"]},
    ],
    "kv_full_tier": [
        {"kv_full_tier": "auto", "disaggregation_mode": "prefill"}, {"kv_full_tier": "host"},
        {"kv_full_tier": "host", "kv_host_gb": 1, "kv_mode": "lossy"},
        {"kv_full_tier": "host", "kv_host_gb": 1, "kv_compressor": "verify-guided"},
    ],
    "kv_bench_acceptance": [{"kv_bench_acceptance": 0.0, "kv_mode": "lossy"}],
    "kv_bench_corrupt_loads": [{"kv_bench_corrupt_loads": 7, "kv_host_gb": 1, "kv_mode": "lossy"}, {"kv_bench_corrupt_loads": 7}],
    "kv_bench_codec": [{"kv_bench_codec": CODEC, "kv_mode": "lossy", "kv_compressor": "kivi", **DECODE}],
    "kv_bench_timeline": [{"kv_bench_timeline": "times", "kv_cache_ranks": 1, "kv_compressor": "spade", "device": "cuda"}],
}  # fmt: skip
CONDITIONS = [
    (flag, condition)
    for flag in FLAGS
    for condition in (flag.scope, *flag.requires)
    if flag.name != "kv_mode" and condition is not ANY_MODE
]
CONFLICTS = [(flag, place) for flag in FLAGS if flag.name != "kv_mode" for place in range(len(flag.conflicts))]


def by_name(flag: object) -> str:
    """A flag's part of the id of a test."""
    return flag.name if isinstance(flag, Flag) else ""


def values_around(flag: Flag) -> Iterator[tuple[object, bool]]:
    """Values at the limits of a flag's ranges and beyond, each with whether the flag allows it."""
    yield from ((each, True) for each in flag.values if not isinstance(each, Range))
    yield from (("wrong", False), ([], False), (True, False), (math.nan, False))
    for each in flag.values:
        if isinstance(each, Range):
            yield each.minimum - 1, False
            yield each.minimum, not each.excludes_minimum
            yield each.minimum + 0.5, not each.integers_only
            yield (math.inf, False) if each.maximum == math.inf else (each.maximum, True)
            yield (each.minimum + 10, True) if each.maximum == math.inf else (each.maximum + 1, False)


# One range of --kv-select begins where the other ends.
BETWEEN = {
    "kv_select": [(0, False), (1e-9, True), (1, True), (1.5, False), (2, True), (2.0, True), (2.5, False), (math.inf, False), ("x", False)]
}  # fmt: skip


def test_each_field_has_an_entry_in_the_table() -> None:
    assert [flag.name for flag in FLAGS] == list(KVServerArgs.__annotations__)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.values], ids=by_name)
def test_a_value_out_of_range_is_refused_with_the_allowed_ones(flag: Flag) -> None:
    for value, allowed in BETWEEN.get(flag.name) or values_around(flag):
        args = arguments(**{flag.name: value})
        if allowed:
            flag.check_value(args)
            continue
        with pytest.raises(OptionError) as raised:
            flag.check_value(args)
        assert str(raised.value).startswith(f"{flag.option} is {value!r}; pass {one_of(flag.values)}")
        if flag.scope is IS_NOT_FULL_MODE:
            with pytest.raises(OptionError, match=f"^{flag.option} is "):
                flag_checks.check_flags(args)
    flag.check_value(arguments(**{flag.name: flag.default}))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.values], ids=by_name)
def test_a_value_that_a_function_checks_is_refused_by_name(flag: Flag) -> None:
    with pytest.raises(OptionError, match=f"^{flag.option}"):
        flag_checks.check_flags(arguments(**WRONG[flag.name]))


@pytest.mark.parametrize(("flag", "unmet"), CONDITIONS, ids=by_name)
def test_a_flag_is_named_if_a_condition_for_its_effect_is_not_met(flag: Flag, unmet: Condition, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, object] = {}
    for condition in (flag.scope, *flag.requires):
        if condition is unmet:
            break
        given |= MET[condition]
    args = arguments(**{**given, **RIGHT[flag.name], **UNMET[unmet]})
    with caplog.at_level(logging.WARNING):
        flag_checks.check_flags(args)
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage() and flag.option in record.getMessage()]
    assert len(lines) == 1 and f"no effect: {render_text(unmet.unmet, args)}. Remedy: {render_text(unmet.remedy, args)}, or leave " in lines[0]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.name != "kv_link_keys"], ids=by_name)
def test_a_flag_with_an_effect_is_not_named(flag: Flag, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, object] = {}
    for condition in (flag.scope, *flag.requires):
        given |= MET[condition]
    with caplog.at_level(logging.WARNING):
        flag_checks.check_flags(arguments(**{**given, **RIGHT[flag.name]}))
    assert "no effect" not in caplog.text
    assert (f"{flag.option} is" in caplog.text) == bool(flag.warning)


@pytest.mark.parametrize(("flag", "place"), CONFLICTS, ids=by_name)
def test_a_conflict_is_refused_with_reason_and_remedy(flag: Flag, place: int) -> None:
    given, conflict = CONFLICTING[flag.name][place], flag.conflicts[place]
    args = arguments(**given)
    with pytest.raises(OptionError) as raised:
        (flag_checks.check_device if conflict.needs_device else flag_checks.check_flags)(args)
    assert str(raised.value) == (
        f"{flag.option} {given[flag.name]} cannot be combined with {render_text(conflict.option, args)}: {render_text(conflict.why, args)}; "
        f"{render_text(conflict.remedy, args)}, or leave {flag.option} out."
    )


def test_each_conflict_has_an_example_and_each_flag_a_section() -> None:
    assert {flag.name: len(flag.conflicts) for flag in FLAGS if flag.conflicts and flag.name != "kv_mode"} == {
        name: len(examples) for name, examples in CONFLICTING.items()
    }
    assert {flag.group for flag in FLAGS} == set(GROUPS)


def test_help_names_values_and_needs() -> None:
    flags = {flag.name: flag for flag in FLAGS}
    assert flags["kv_draft_length"].help.endswith("Allowed: a whole number from 1 to 64, or auto. Needs --kv-mode verified.")
    assert flags["kv_mode"].choices == ["full", "lossy", "verified"]
