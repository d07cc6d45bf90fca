"""SGLang creates the prefix tree, and it is complete before a request comes: with the worker's compressed KV, or in mode full with a store."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from tiered_helpers import PAGE, TokenTable

from sglang_ext import plugin
from sglang_ext.managers.worker import KVWorker
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

SLOTS, LAYERS = 160, 2


def context(worker, **flags):
    """What SGLang passes to the factory of a tree."""
    allocator = TorchPagedAllocator(SLOTS, PAGE, torch.float32, "cpu", None, need_sort=False)
    params = CacheInitParams(False, TokenTable(), allocator, PAGE)
    return SimpleNamespace(server_args=SimpleNamespace(**flags), params=params, tp_worker=worker)


@pytest.fixture
def stock(tmp_path):
    """A model runner of a stock server, and its flags."""
    (tmp_path / "config.json").write_text("{}")
    model = torch.nn.Module()
    for layer in range(LAYERS):
        attention = RadixAttention.__new__(RadixAttention)
        torch.nn.Module.__init__(attention)
        attention.layer_id, attention.scaling = layer, 1.0
        model.add_module(str(layer), attention)
    buffers = [torch.zeros(SLOTS + PAGE, 2, 8) for _ in range(2 * LAYERS)]
    pool = SimpleNamespace(get_key_buffer=buffers.__getitem__, get_value_buffer=lambda layer: buffers[LAYERS + layer])
    runner = SimpleNamespace(tp_group=SimpleNamespace(world_size=1), token_to_kv_pool=pool, model=model, forward_stream=None)
    flags = {
        "kv_mode": "full", "kv_host_gb": 1e-3, "kv_store": None, "kv_store_form": "raw", "kv_full_tier": "device", "kv_compressor": "snapkv",
        "page_size": PAGE, "tp_size": 1, "model_path": str(tmp_path), "revision": None, "dtype": "float32", "quantization": None,
        "torchao_config": None, "json_model_override_args": "{}", "enable_metrics": False, "served_model_name": "m",
    }  # fmt: skip
    return SimpleNamespace(model_runner=runner), flags


def test_the_worker_gets_its_tree():
    bound = []
    tree = plugin.create_tree(context(SimpleNamespace(kv_worker=SimpleNamespace(bind_tree_cache=bound.append)), kv_mode="verified"))
    assert bound == [tree]


@pytest.mark.parametrize("stores", [False, True])
def test_in_mode_full_the_tree_has_host_memory_and_its_store(stock, tmp_path, stores):
    worker, flags = stock
    tree = plugin.create_tree(context(worker, **flags | ({"kv_store": f"file:{tmp_path / 'store'}"} if stores else {})))
    pool = tree.host.tier.pool
    assert pool.kv.shape[:2] == (2, LAYERS) and pool.page_size == PAGE and tree.compressed_kv is None
    assert (tree.stored is not None) == stores


@pytest.mark.parametrize("drafts", [False, True], ids=["full", "verified"])
@pytest.mark.parametrize("source", ["disk", "distributed", "tensor", "ipc"])
def test_sglang_is_told_that_new_weights_are_refused_beside_a_store(stock, tmp_path, monkeypatch, source, drafts):
    worker, flags = stock
    plugin.create_tree(context(worker, **flags | {"kv_store": f"file:{tmp_path / 'store'}"}))
    drafter = object.__new__(KVWorker) if drafts else None
    if drafts:
        drafter._target_worker = worker
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    updater = SchedulerWeightUpdaterManager(
        tp_worker=worker, draft_worker=drafter, tp_cpu_group=None, memory_saver_adapter=None, flush_cache=None, is_fully_idle=None
    )
    answer = getattr(updater, f"update_weights_from_{source}")(SimpleNamespace(disable_draft_model=False))
    assert not answer.success and "--kv-store" in answer.message


def test_a_store_that_cannot_be_opened_ends_the_scheduler_with_one_line(stock, tmp_path, capsys):
    worker, flags = stock
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as raised:
        plugin.create_tree(context(worker, **flags | {"kv_store": f"file:{tmp_path / 'file'}"}))
    assert raised.value.code == 2 and capsys.readouterr().err.startswith("sglang-ext: error: prefix store ")
