"""Flags that do nothing beside the others are named in the log; none is looked at where the mode is full."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.config import options
from sglang_ext.core import OptionError


def told(caplog: pytest.LogCaptureFixture, **given: object) -> str:
    """What the checks of these flags write to the log."""
    with caplog.at_level(logging.WARNING):
        flag_checks.check_flags(arguments(**given))
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("wrong", [{"kv_budget": 5.0}, {"kv_bench_acceptance": 0.9}, {"kv_compressor": "zip"}, {"kv_draft_length": 0}])
def test_a_flag_that_does_nothing_in_full_is_named_and_not_checked(caplog: pytest.LogCaptureFixture, wrong: dict[str, object]) -> None:
    flag = f"--{next(iter(wrong)).replace('_', '-')}"
    assert told(caplog, kv_mode="full", **wrong) == (
        f"sglang-ext: {flag} has no effect: --kv-mode is full, stock SGLang. Remedy: pass --kv-mode verified or lossy, or leave it out"
    )


def test_what_lossy_alone_serves_is_named_with_that_mode(caplog: pytest.LogCaptureFixture) -> None:
    found = told(caplog, kv_mode="full", kv_compressor="hack", kv_prefill="quantized")
    assert "--kv-compressor, --kv-prefill have no effect" in found and found.endswith("pass --kv-mode verified or lossy, or leave them out")


@pytest.mark.parametrize(("given", "words"), [
    ({"kv_mode": "lossy", "kv_draft_length": 8, "kv_max_burst": 4, "kv_offload_draft_length": 8},
     "--kv-draft-length, --kv-max-burst, --kv-offload-draft-length have no effect: --kv-mode is lossy, without drafts. Remedy: pass "
     "--kv-mode verified, or leave them out"),
    ({"kv_offload_draft_length": 8, "kv_host_gb": 1.0},
     "--kv-offload-draft-length has no effect: --kv-full-tier is device and --kv-host-gb 1. Remedy: pass --kv-full-tier auto"),
    ({"kv_draft_length": 8, "kv_max_burst": 10},
     "--kv-max-burst has no effect: a verification gives at most 9 tokens, fewer than 10. Remedy: pass at most 9, or leave it out"),
    ({"kv_compressor": "quest", "kv_select_by": "regressed", "kv_cache_ranks": 1},
     "--kv-select-by, --kv-cache-ranks have no effect: --kv-compressor is quest. Remedy: pass --kv-compressor spade"),
])  # fmt: skip
def test_flags_without_effect_are_named_once_for_each_reason(caplog: pytest.LogCaptureFixture, given: dict[str, object], words: str) -> None:
    found = told(caplog, **given)
    assert found.startswith(f"sglang-ext: {words}") and "\n" not in found


@pytest.mark.parametrize("given", [
    {}, {"kv_mode": "lossy"}, {"kv_mode": "lossy", "kv_budget": 0.5}, {"kv_draft_length": 8, "kv_max_burst": 9}, {"kv_max_burst": 4},
    {"kv_compressor": "kvzip", "kv_scores": "/", "kv_online_compressor": "sink-recent"},
    {"kv_compressor": "kvzap", "kv_predictor": "/", "kv_host_gb": 1.0, "kv_online_compressor": "sink-recent"},
    {"kv_full_tier": "auto", "kv_host_gb": 1.0, "kv_offload_draft_length": 8},
    {"kv_full_tier": "host", "kv_host_gb": 1.0, "kv_draft_length": 8, "kv_max_burst": 65},
    {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive", "kv_draft_length": 8, "kv_max_burst": 65},
])  # fmt: skip
def test_flags_that_do_something_are_not(caplog: pytest.LogCaptureFixture, given: dict[str, object]) -> None:
    assert told(caplog, **given) == ""


@pytest.mark.parametrize(("given", "words"), [
    ({"context_length": 128}, "--context-length is 128, and a context is compressed from 128 tokens on"),
    ({"max_total_tokens": 100}, "--max-total-tokens is 100, and a context is compressed from 128 tokens on"),
    ({"context_length": 129}, ""),
    ({"context_length": 301, "kv_compressor": "spade", "kv_select": 300}, "--context-length is 301, and a context is compressed from 301"),
    ({"context_length": 302, "kv_compressor": "spade", "kv_select": 300}, ""),
    ({"context_length": 129, "kv_compressor": "kivi"}, "--context-length is 129, and a context is compressed from "),
    ({"context_length": 129, "kv_compressor": "kivi", "kv_more_compressors": "snapkv"}, ""),
    ({"context_length": 132, "kv_compressor": "hack", "kv_partition": 128}, "--context-length is 132, and a context is compressed from 132"),
    ({"context_length": 129, "kv_compressor": "hack"}, ""),
    ({"context_length": 400, "kv_compressor": "hack", "page_size": 7}, "--context-length is 400, and a context is compressed from 452"),
    ({"context_length": 256, "page_size": 256}, "--context-length is 256, and a context is compressed from 256"),
])  # fmt: skip
def test_contexts_too_short_for_copies_are_told(caplog: pytest.LogCaptureFixture, given: dict[str, object], words: str) -> None:
    args = arguments(**given)
    flag_checks.check_flags(args)
    caplog.clear()
    flag_checks._warn_of_short_contexts(args)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == bool(words) and all(each.startswith(f"sglang-ext: {words}") for each in found)


@pytest.mark.parametrize(("begin", "context"), [(8192, 8192), (1_000_000, 8192), (129, 100)])
def test_copies_that_begin_where_no_context_reaches_are_refused(begin: int, context: int) -> None:
    args = arguments(kv_sparse_from=begin)
    args.get_model_config = lambda: SimpleNamespace(context_len=context)
    with pytest.raises(OptionError, match=f"--kv-sparse-from is {begin}, .* has {context} tokens, .*: pass a number below that, for example"):
        flag_checks._check_sparse_from(args)
    args.get_model_config = lambda: SimpleNamespace(context_len=begin + 1)
    flag_checks._check_sparse_from(args)


@pytest.mark.parametrize(
    ("page", "chunk", "remedy"),
    [(7, 2048, "2044, or --page-size 16"), (48, 40, "48, or --page-size 8"), (16, 2048, None), (7, -1, None)],
)
def test_pages_that_do_not_fill_chunks_of_prompts_are_refused_by_name(page: int, chunk: int, remedy: str | None) -> None:
    args = arguments(page_size=page, chunked_prefill_size=chunk)
    words = f"--page-size is {page}, .* chunks of {chunk} tokens, .*: pass --chunked-prefill-size {remedy}$"
    with nullcontext() if remedy is None else pytest.raises(OptionError, match=words):
        flag_checks._check_chunks(args)
    args.disaggregation_mode = "decode"
    flag_checks._check_chunks(args)


def test_a_short_context_is_not_blamed_on_a_flag_that_was_left_as_it_is() -> None:
    args = arguments()
    args.get_model_config = lambda: SimpleNamespace(context_len=100)
    flag_checks._check_sparse_from(args)


@pytest.mark.parametrize(
    "given, why",
    [
        ({}, None),
        ({"kv_mode": "verified"}, "verifications"),
        ({"kv_prefill": "quantized", "kv_compressor": "hack"}, None),
        ({"kv_host_gb": 1.0}, "host memory"),
        ({"disable_radix_cache": True}, "prefix tree"),
        ({"disaggregation_mode": "decode"}, "transferred"),
        ({"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "progressive"}, "transferred"),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive", "disable_radix_cache": True}, None),
        ({"enable_deterministic_inference": True, "device": "cuda"}, "deterministic"),
        ({"enable_deterministic_inference": True, "device": "cpu"}, None),
    ],
)
def test_where_lossy_keeps_full_kv_beside_copies_it_says_why(given, why):
    found = options.why_full_kv_stays(arguments(**{"kv_mode": "lossy", "kv_compressor": "int4", **given}))
    assert found is None if why is None else why in found
