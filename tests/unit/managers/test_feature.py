"""Features plug into the worker, and servers import the features that their flags enable."""

import pkgutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_ext.managers.feature import FEATURES, Feature, create_full_kv_provider, create_selector, load_features
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider

# Source of a process: the modules of this project that a scheduler with --kv-mode verified and --kv-compressor snapkv imports.
PLAIN_SERVER = """
import sys
import sglang_ext.arguments, sglang_ext.managers.worker, sglang_ext.mem_cache.prefix_cache.tiered_radix_cache
from sglang_ext.hooks.algorithm import KVVerifiedAlgorithm
from sglang_ext.mem_cache.compressors.catalogue import method
method("snapkv")
print("\\n".join(name for name in sys.modules if name.startswith("sglang_ext.")))
"""
# Folders and modules that only features need.
OF_FEATURES = (
    *("managers.kv_transfer", "managers.kv_offload", "managers.cache_rank", "managers.quantized_attention", "managers.sparse_attention"),
    *("mem_cache.host_tier", "mem_cache.selection.on_gpu", "mem_cache.compressed.async_selector"),
    *("mem_cache.prefix_cache.quantized_only", "mem_cache.prefix_cache.remote_only", "mem_cache.prefix_cache.residency"),
    *("layers.attention.packed", "layers.attention.per_head", "layers.kernels.packed", "layers.kernels.gluon", "layers.kernels.lynx"),
)


def arguments(**flags):
    plain = {"kv_mode": "verified", "kv_compressor": "snapkv", "kv_more_compressors": None, "kv_budget": 0.25, "kv_prefill": "exact"}
    off = {"kv_host_gb": None, "kv_store": None, "kv_cache_ranks": 0, "disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake"}
    resolved = {"enable_deterministic_inference": False, "disable_radix_cache": False, "device": "cpu"}
    return SimpleNamespace(**plain | off | resolved | flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, []),
        ({"kv_mode": "lossy"}, []),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive"}, ["KVTransfer"]),
        ({"kv_host_gb": 1.0}, ["HostOffload"]),
        ({"kv_host_gb": 1.0, "kv_store": "file:/store"}, ["HostOffload", "PrefixStorage"]),
        ({"kv_store": "file:/store"}, []),
        ({"kv_mode": "lossy", "kv_compressor": "kivi", "kv_budget": 1.0}, ["QuantizedAttention"]),
        ({"kv_mode": "lossy", "kv_compressor": "hack", "kv_host_gb": 1.0, "kv_prefill": "quantized"}, ["HostOffload", "QuantizedAttention"]),
        ({"kv_compressor": "quest"}, ["SparseAttention"]),
        ({"kv_compressor": "spade", "kv_cache_ranks": 1}, ["CacheRanks", "SparseAttention"]),
    ],
)
def test_flags_enable_features(flags, expected):
    assert [type(feature).__name__ for feature in load_features(arguments(**flags))] == expected


def test_a_server_without_features_imports_none():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PLAIN_SERVER], capture_output=True, text=True, check=True)
    names = [name.removeprefix("sglang_ext.") for name in done.stdout.split()]
    assert "managers.worker" in names
    assert not [name for name in names if name.startswith(OF_FEATURES)]


def test_each_method_of_the_interface_serves_several_features():
    classes = [pkgutil.resolve_name(name) for name in FEATURES]
    assert all(issubclass(each, Feature) for each in classes)
    methods = [name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")]
    assert methods and not [name for name in methods if sum(name in vars(each) for each in classes) < 2]


def test_the_first_selector_and_the_only_provider_serve():
    class Selecting(Feature):
        def selector(self, worker, method):
            return self.args, method

    class Freeing(Feature):
        def full_kv_provider(self, worker, tree_cache):
            return tree_cache

    worker = SimpleNamespace(features=(Feature("none"), Selecting("first"), Freeing("none"), Selecting("second")))
    assert create_selector(worker, "method") == ("first", "method")
    assert create_full_kv_provider(worker, "tree") == "tree"
    worker.features = (Feature("none"),)
    assert create_selector(worker, "method") is None and isinstance(create_full_kv_provider(worker, "tree"), FullKVProvider)
