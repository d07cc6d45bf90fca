"""The methods that a server offers: how flags name them, which serve together, and how a request names one."""

from types import SimpleNamespace

import pytest

from sglang_ext.config import method_options, request_params
from sglang_ext.config.method_options import OfferedMethod, method_specs, offered_methods, method_index
from sglang_ext.core import OptionError, RequestState
from sglang_ext.hooks import frontend
from sglang_ext.managers import served_methods
from sglang_ext.managers.spec_decode.request_states import write_counters
from sglang_ext.mem_cache.compressed.layouts.base import PlainSlots
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.integer_quantizers import Hack


def resolved(**change):
    """Arguments of a server with these flags, budgets set."""
    args = SimpleNamespace(
        kv_compressor="snapkv", kv_more_compressors=None, kv_budget=None, kv_bits=None, kv_partition=None, kv_scores=None, kv_predictor=None,
        kv_online_compressor="snapkv", kv_host_gb=0, kv_bench_acceptance=None, kv_sparse_from=128,
    )
    vars(args).update(change)
    method_options.resolve_methods(args)
    return args


def test_further_methods_are_named_with_their_budgets_or_have_their_defaults():
    found = offered_methods(resolved(kv_more_compressors="snapkv:0.125, kivi,sink-recent,snapkv+kivi:.5", kv_budget=0.5))
    assert found == (
        OfferedMethod("snapkv", "snapkv", 0.5),
        OfferedMethod("snapkv:0.125", "snapkv", 0.125),
        OfferedMethod("kivi", "kivi", 1.0),
        OfferedMethod("sink-recent", "sink-recent", 0.25),
        OfferedMethod("snapkv+kivi:.5", "snapkv+kivi", 0.5),
    )
    assert [offer.suffix for offer in found] == ["", ":0.125", "", "", ":.5"]
    assert offered_methods(resolved()) == (OfferedMethod("snapkv", "snapkv", 0.25),)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_compressor": "hack4"}, ["'hack4'", "Pass --kv-compressor hack --kv-bits 4."]),
        ({"kv_compressor": "snapkv+kivi:2"}, ["'snapkv+kivi:2'", "Pass --kv-compressor snapkv+kivi --kv-bits 2."]),
        ({"kv_compressor": "snap4"}, ["'snap4'", "Pass one of these."]),
        ({"kv_more_compressors": ""}, ["--kv-more-compressors is ''", "names no method", "snapkv:0.125,kivi, or leave it out"]),
        ({"kv_more_compressors": " ,"}, ["--kv-more-compressors is ' ,'", "names no method"]),
        ({"kv_more_compressors": "zip"}, ["--kv-more-compressors is 'zip'", "snapkv, expected-attention", "snapkv+kivi"]),
        ({"kv_more_compressors": "snapkv:half"}, ["'snapkv:half'", "'half' is no number", "as in snapkv:0.125,kivi"]),
        ({"kv_more_compressors": "snapkv:"}, ["'snapkv:'", "'' is no number"]),
        ({"kv_more_compressors": "snapkv:1.5"}, ["'snapkv:1.5'", "1.5", "above 0 and at most 1"]),
        ({"kv_more_compressors": "snapkv:nan"}, ["'snapkv:nan'", "above 0 and at most 1"]),
        ({"kv_more_compressors": "kivi:0.5"}, ["'kivi:0.5'", "keeps all tokens", "--kv-more-compressors snapkv+kivi"]),
        ({"kv_more_compressors": "snapkv"}, ["'snapkv'", "again", "budget of 0.25", "snapkv:0.125"]),
        ({"kv_more_compressors": "kivi,kivi:1"}, ["'kivi:1'", "'kivi' again", "a budget of 1: leave it out"]),
        ({"kv_more_compressors": "kivi,snapkv+int4"}, ["'snapkv+int4' together with kivi", "one method that", "a server for each"]),
        ({"kv_compressor": "int8", "kv_more_compressors": "snapkv,kivi"}, ["'kivi' together with int8", "Leave kivi or int8 out"]),
        ({"kv_more_compressors": "kivi", "kv_bits": 8}, ["--kv-bits is 8", "4 or 2 bits"]),
        ({"kv_more_compressors": "verify-guided"}, ["makes verify-guided one of 2 methods", "Use it alone", "snapkv, expected-attention"]),
        ({"kv_compressor": "verify-guided", "kv_more_compressors": "kivi"}, ["makes verify-guided one of 2", "Use it alone"]),
        ({"kv_more_compressors": "kvzip"}, ["--kv-more-compressors has 'kvzip'", "--kv-scores FOLDER"]),
    ],
)
def test_what_cannot_serve_together_is_refused(flags, words):
    with pytest.raises(OptionError) as raised:
        resolved(**flags)
    assert all(word in str(raised.value) for word in words)


def test_the_bits_are_those_of_the_method_that_packs_and_scores_are_read_by_any(tmp_path):
    found = resolved(kv_more_compressors="kivi,kvzip:0.1", kv_bits=2, kv_scores=str(tmp_path))
    assert [offer.quant_method for offer in offered_methods(found)] == [None, "kivi", None]


def test_each_method_makes_copies_in_its_own_way_and_equal_ones_share_what_they_read():
    args = resolved(kv_more_compressors="kivi,snapkv+kivi:0.5", kv_bits=2)
    made = served_methods.methods_of(args, 2, 2, 0, None)
    rows = QuantizedLayout(SimpleNamespace(recent=128), None)
    plain, packed, both = served_methods.copy_methods(args, made, 16, rows)
    assert plain.packing == PlainSlots(16) and packed.packing is both.packing is rows.layout
    assert made[1].quantizer == made[2].quantizer and made[1].quantizer.bits == 2
    assert plain.compressor is both.compressor and (plain.budget, packed.budget, both.budget) == (0.25, 1.0, 0.5)
    assert [method.full_name(method.compressor) for method in (plain, packed, both)] == ["snapkv", "kivi", "snapkv+kivi:0.5"]


NAMES = offered_methods(resolved(kv_more_compressors="snapkv:0.125,kivi"))


@pytest.mark.parametrize(
    ("custom_params", "place"),
    [
        (None, 0), ({}, 0), ({"kv_acceptance": 0.9}, 0), ({"kv_compressor": None}, 0), ({"kv_compressor": "snapkv"}, 0),
        ({"kv_compressor": "snapkv:0.125"}, 1), ({"kv_compressor": "kivi"}, 2), ({"kv_compressor": "KIVI"}, None),
        ({"kv_compressor": ["kivi"]}, None), ({"kv_compressor": 1}, None), ("kivi", 0),
    ],
)  # fmt: skip
def test_a_request_names_a_method_as_the_flags_do_or_gets_the_first(custom_params, place):
    assert method_index(NAMES, custom_params) == place


def asking(name):
    """Sampling parameters of a request for that method; for no method without a name."""
    return {"custom_params": {"kv_compressor": name}} if name else {}


@pytest.mark.parametrize(("asked", "refused"), [
    ("kivi", False), ("", False), ("snapkv:.125", False), ("snapkv:0.1250", False), ("snapkv:0.25", False), ("snapkv:12.5e-2", False),
    ("int4", True), ("snapkv:", True), ("snapkv:0.5", True), ("kivi:x", True), (5, True), (["kivi"], True),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_those_that_there_are(asked, refused):
    args = resolved(kv_more_compressors="snapkv:0.125,kivi")
    params = asking(asked).get("custom_params")
    if not refused:
        request_params.check_params(args, params)
        return
    with pytest.raises(ValueError, match="this server compresses with snapkv, snapkv:0.125, kivi: ask for") as raised:
        request_params.check_params(args, params)
    assert repr(asked) in str(raised.value)


@pytest.mark.parametrize(
    ("forced", "words"), [(None, "is 2, and on this server verification decides"), (0.9, "is 2; pass a number from 0 to 1")]
)
def test_an_acceptance_that_cannot_be_forced_is_refused(forced, words):
    with pytest.raises(ValueError, match=f"kv_acceptance in custom_params {words}"):
        request_params.check_params(resolved(kv_bench_acceptance=forced), {"kv_acceptance": 2})


def test_meta_info_names_the_method_as_it_was_asked_for():
    args = resolved(kv_more_compressors="snapkv:0.125,kivi,sink-recent:.5")
    for place, name in enumerate(("snapkv", "snapkv:0.125", "kivi", "sink-recent:.5")):
        req, state = SimpleNamespace(spec_cap_lens_histogram=[]), RequestState("r", 1, 0, method=place)
        for served in ("", name):
            state.compressor, fields = catalogue.number(served.partition(":")[0]), {}
            write_counters(req, state)
            told = SimpleNamespace(spec_cap_lens_histogram=[req.spec_cap_lens_histogram])
            frontend.add_kv_fields(None, SimpleNamespace(server_args=args), fields, told, 0)
            assert fields["kv_compressor"] == (served or None)


def test_partitions_are_those_of_what_packs():
    args = resolved(kv_compressor="snapkv+hack", kv_more_compressors="hack,snapkv", kv_bits=2, kv_partition=32)
    assert [each.quantizer for each in method_specs(args)] == [Hack(2, partition=32), Hack(2, partition=32), None]
    assert method_specs(resolved(kv_compressor="hack"))[0].quantizer == Hack(4, partition=64)


@pytest.mark.parametrize(("value", "refused"), [("even", False), ("burst", False), (None, False), ("smooth", True), (True, True), (["even"], True)])
def test_a_request_chooses_how_its_stream_is_paced(value, refused):
    params = {"kv_stream_pacing": value}
    if not refused:
        request_params.check_params(resolved(), params)
        return
    with pytest.raises(ValueError, match="kv_stream_pacing is .*; pass 'burst' or 'even', or leave it out"):
        request_params.check_params(resolved(), params)
