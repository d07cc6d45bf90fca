"""Heads that share one budget: who may, and what they keep, the best of all and of each what is kept in any case."""

from types import SimpleNamespace

import pytest
import torch
from head_helpers import Given, context, scores_of, sets
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.config import method_options
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import ContextKV, Part, catalogue
from sglang_ext.mem_cache.compressors.catalogue import create
from sglang_ext.mem_cache.compressors.kvzip import KVzap, StoredScores
from sglang_ext.mem_cache.compressors.attention_scores import SinkRecent

UNSET_BACKENDS = {"attention_backend": None, "prefill_attention_backend": None, "decode_attention_backend": None}
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))


@given(SHAPES, st.integers(0, 99), st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_what_scores_best_over_all_layers_and_heads_is_kept_and_bounds_partition_it(shape, seed, budget):
    scores, count = scores_of(*shape, seed), max(1, int(budget * shape[2]))
    kept = Given(scores).select_ragged(context(*shape), Part(0, shape[2], count))
    threshold = scores.flatten().sort(descending=True).values[count * shape[0] * shape[1] - 1]
    assert sets(kept) == [(head >= threshold).nonzero().flatten().tolist() for head in scores.flatten(0, 1)]
    assert kept.bounds.dtype == torch.int32 and kept.bounds[0] == 0 and kept.bounds[-1] == count * shape[0] * shape[1]


@given(SHAPES, st.integers(0, 99), st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_each_head_keeps_what_is_kept_in_any_case_as_far_as_the_budget_goes(shape, seed, always, count):
    layers, heads, tokens = shape
    always, count = min(always, tokens), min(count, tokens)
    scores = scores_of(*shape, seed)
    scores[..., -always:] = float("inf")
    found = sets(Given(scores).select_ragged(context(*shape), Part(0, tokens, count)))
    for head in found:
        assert len(set(head) & set(range(tokens - always, tokens))) >= min(always, count)
        assert len(head) == count or count > always


def test_scores_that_do_not_compare_over_heads_give_equal_numbers():
    shape = (2, 3, 30)
    even = Given(scores_of(*shape, 0))
    even.comparable = False
    kept = even.select_ragged(context(*shape), Part(0, 30, 7))
    (expected,) = even.select(context(*shape), [Part(0, 30, 7)])
    assert kept.tokens.view(2, 3, 7).equal(expected)


def test_a_document_and_what_follows_it_keep_their_shares_and_heads_compete_in_each():
    stored = scores_of(2, 2, 40, 3).half()
    stored[..., :4] = float("inf")
    method = StoredScores(stored, SinkRecent(sinks=0))
    kept = method.select_ragged(context(2, 2, 60), Part(0, 60, 15))
    (equal,) = method.select(context(2, 2, 60), [Part(0, 60, 15)])
    of_document = [[token for token in head if token < 40] for head in sets(kept)]
    assert sum(map(len, of_document)) == int((equal < 40).sum()) < len(kept.tokens)
    worst = min(stored.flatten(0, 1)[head, token] for head, tokens in enumerate(of_document) for token in tokens)
    assert int((stored > worst).sum()) < sum(map(len, of_document)) <= int((stored >= worst).sum())
    assert len(set(map(len, of_document))) > 1


def test_methods_that_gain_by_sharing_one_budget_may():
    assert StoredScores(torch.empty(0), SinkRecent()).comparable
    assert set(catalogue.better_uneven()) == {"kvzip", "kvzap"} < set(catalogue.comparable()) == {"kvzip", "kvzap", "snapkv"}


ON_GPU = {"device": "cuda", "attention_backend": "flashinfer"}


def adaptive_args(**change):
    """Resolved arguments for uneven heads on a CPU."""
    args = SimpleNamespace(
        device="cpu", kv_compressor="snapkv", kv_more_compressors=None, kv_budget=0.25, kv_head_budgets="adaptive",
        kv_mode="verified",
        kv_full_tier="device", kv_host_gb=0, disable_radix_cache=False,
        enable_deterministic_inference=False, **UNSET_BACKENDS,
    )  # fmt: skip
    vars(args).update(change)
    return args


@pytest.mark.parametrize(
    ("compressor", "asked", "change", "found"),
    [
        ("kvzip", "auto", {}, "adaptive"),
        ("kvzip", "equal", {}, "equal"),
        ("kvzip", "auto", {"device": "cuda"}, "adaptive"),
        ("kvzap", "auto", ON_GPU, "adaptive"),
        ("kvzap", "auto", {**ON_GPU, "enable_deterministic_inference": True, "attention_backend": "triton"}, "equal"),
        ("kvzip", "auto", {"enable_deterministic_inference": True}, "adaptive"),
        ("snapkv", "auto", ON_GPU, "equal"),
        ("kvzip", "auto", {"attention_backend": "triton"}, "equal"),
        ("kvzip", "auto", {"kv_more_compressors": "snapkv"}, "equal"),
        ("kvzap", "auto", {}, "adaptive"),
        ("kvzip+int8", "auto", {}, "equal"),
        ("snapkv", "auto", {}, "equal"),
        ("snapkv", "adaptive", {}, "adaptive"),
    ],
)
def test_heads_share_a_budget_where_it_is_better_and_can_be(compressor, asked, change, found):
    args = adaptive_args(kv_compressor=compressor, kv_head_budgets=asked, **change)
    method_options.resolve_head_budgets(args)
    assert args.kv_head_budgets == found
    # As SGLang then chooses.
    args.attention_backend = args.attention_backend or ("torch_native" if args.device == "cpu" else "fa3")
    method_options.check_head_budgets(args)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"attention_backend": "triton"}, "--device is cpu and --attention-backend triton; .* cpu with torch_native, .* cuda with"),
        ({**ON_GPU, "decode_attention_backend": "torch_native"}, "--device is cuda and --attention-backend flashinfer, torch_"),
        (
            {**ON_GPU, "kv_full_tier": "host", "kv_host_gb": 1, "enable_deterministic_inference": True},
            "--kv-full-tier is 'host' with --enable-deterministic-inference; .* Pass --kv-full-tier device",
        ),
    ],
)
def test_uneven_heads_are_refused_where_attention_cannot_read_them(change, found):
    args = adaptive_args(**change)
    with pytest.raises(OptionError, match=f"{found}.* or --kv-head-budgets equal"):
        method_options.check_head_budgets(args)
    args.kv_head_budgets = "equal"
    method_options.check_head_budgets(args)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "fa3"])
@pytest.mark.parametrize("method", catalogue.comparable())
def test_on_a_gpu_uneven_heads_are_served(backend, method):
    args = adaptive_args(device="cuda", attention_backend=backend, kv_compressor=method)
    method_options.resolve_head_budgets(args)
    assert args.kv_head_budgets == "adaptive"
    method_options.check_head_budgets(args)
    vars(args).update(kv_full_tier="host", kv_host_gb=1)
    method_options.check_head_budgets(args)


def on_no_device(layers, heads, tokens, window):
    """A context whose numbers nobody can read: an operation that needs one on the host fails."""
    zeros = tuple(torch.zeros(tokens, heads, 16, device="meta") for _ in range(layers))
    buffers = KVBuffers(tuple(range(layers)), (1.0,) * layers, zeros, zeros)
    queries = torch.zeros(layers, window, 2 * heads, 16, device="meta")
    return ContextKV(buffers, torch.arange(tokens, device="meta"), queries, torch.arange(tokens, device="meta")[-window:])


@pytest.mark.parametrize(
    "method",
    [
        create("snapkv"),
        KVzap(SimpleNamespace(read=lambda slots: torch.zeros(2, 3, len(slots), device=slots.device))),
        StoredScores(torch.rand(2, 3, 200).half(), create("snapkv")),
        StoredScores(torch.rand(2, 3, 256).half(), create("sink-recent")),
    ],
    ids=lambda method: method.name,
)
def test_choosing_what_heads_keep_waits_for_no_device(method):
    part = Part(0, 256, 64)
    found = on_no_device(2, 3, 256, 32)
    kept = method.select_ragged(found, part)
    assert kept.tokens.shape == (64 * 6,) and kept.bounds.shape == (7,)
    assert [chosen.shape for chosen in method.select(found, [part])] == [(2, 3, 64)]
