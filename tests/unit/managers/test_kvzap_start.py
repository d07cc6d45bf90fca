"""A server with ``--kv-compressor kvzap`` reads the predictor's file, and each rank takes what belongs to its heads."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.core import OptionError
from sglang_ext.managers import served_methods
from sglang_ext.mem_cache.compressors.kvzip import KVzap
from sglang_ext.mem_cache.scores import FitRecord, Predictor, model_key


def arguments(folder, model, **others):
    config = SimpleNamespace(num_hidden_layers=2, get_total_num_kv_heads=lambda: 2, hidden_size=64)
    flags = {"kv_compressor": "kvzap", "kv_more_compressors": None, "kv_budget": 0.25, "tp_size": 1, "revision": None, **others}
    return SimpleNamespace(kv_predictor=str(folder), model_path=str(model), get_model_config=lambda: config, **flags)


def store(folder, tiny, heads=2, hidden=64):
    outer = torch.arange(2.0 * heads * hidden).view(2, heads, hidden)
    Predictor(outer, torch.zeros(2, heads), FitRecord(model_key(tiny), "{}", 1, 1, (0.0,) * 2, (0.0,) * 2)).write(folder)
    return outer


@pytest.mark.parametrize(("heads", "ranks", "first"), [(4, 2, [0, 2]), (2, 4, [0, 0, 1, 1])])
def test_each_rank_scores_the_heads_that_it_has(tiny, tmp_path, heads, ranks, first):
    outer, args = store(tmp_path, tiny, heads), arguments(tmp_path, tiny, tp_size=ranks)
    local = max(1, heads // ranks)
    for rank, begin in enumerate(first):
        found = served_methods.load_slot_scores(args, (0, 1), local, rank)
        assert torch.equal(found.predictor.outer, outer[:, begin : begin + local])


def test_a_predictor_of_other_sizes_than_the_model_is_refused_before_the_model_is_loaded(tiny, tmp_path):
    store(tmp_path, tiny)
    served_methods.check_files(arguments(tmp_path, tiny))
    store(tmp_path, tiny, hidden=32)
    with pytest.raises(OptionError, match=r"\(2, 2, 32\).*the model \(2, 2, 64\)"):
        served_methods.check_files(arguments(tmp_path, tiny))


@pytest.mark.parametrize(("host", "online"), [(0, None), (4, "expected-attention")])
def test_the_online_method_is_there_where_kv_can_come_from_the_host(host, online):
    args = SimpleNamespace(
        kv_compressor="kvzap+kivi", kv_more_compressors=None, kv_budget=0.25, kv_bits=2, kv_partition=None, kv_host_gb=host,
        kv_online_compressor="expected-attention",
    )
    (found,) = served_methods.methods_of(args, 2, 2, 0, None)
    assert isinstance(found.compressor, KVzap) and found.quantizer.bits == 2
    assert (found.compressor.online and found.compressor.online.name) == online
