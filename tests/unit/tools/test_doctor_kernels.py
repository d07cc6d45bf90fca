"""The doctor names GPU, shape and kernels."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs import model_config

from sglang_ext.doctor import checks
from sglang_ext.layers.kernels import gpu_launch
from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.mem_cache.compressors import catalogue


@pytest.fixture
def folder(tmp_path):
    """A Llama with 4 query heads a KV head of 128 channels."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 64,
        "max_position_embeddings": 64, "torch_dtype": "bfloat16", "head_dim": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_kernels_are_named_by_what_they_take(monkeypatch):
    monkeypatch.setattr(packed_decode, "has_tensor_cores", lambda keys: True)
    found = checks.packed_kernels(128, 16, torch.bfloat16, device="cpu")
    assert found["read by Gluon, packed by a kernel"] == ["int4", "int8", "kivi", "rotatekv"]
    assert found["read by Triton, packed by a kernel"] == ["hack", "lynx", "turboquant"]
    found = checks.packed_kernels(96, 1, torch.float16, device="cpu")
    plain = [name for name in catalogue.on_gpu() if name != "hack"]
    assert found == {"read by Triton, packed by PyTorch": plain, "not for such heads": ["hack"]} and "kvquant" not in plain


def test_what_does_not_compile_for_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(gpu_launch, "capability", lambda keys: (7, 5))
    found = checks.packed_kernels(128, 4, torch.float16, device="cpu")
    assert found["not on this GPU"] == ["hack"] and not any("Gluon" in kernels for kernels in found)


@pytest.mark.parametrize("dim", [8, 320])
def test_heads_that_a_server_refuses_are_served_by_no_kernel(dim):
    assert checks.packed_kernels(dim, 4, torch.bfloat16, device="cpu") == {"not for such heads": list(catalogue.on_gpu())}


def test_the_line_names_gpu_and_shape(folder, monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA L40S", major=8, minor=9, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(checks, "packed_kernels", lambda *shape: {"read by Triton, packed by PyTorch": ["kivi", "int8"]})
    (check,) = checks.check_kernels(folder)
    assert check.ok and check.found == (
        "NVIDIA L40S (sm_89, 99 KiB of shared memory); 128 channels a head, 4 query heads a KV head, bfloat16: "
        "Triton for scores and compressed KV; in few bits: kivi, int8 read by Triton, packed by PyTorch"
    )


def test_a_model_that_sglang_computes_in_another_dtype_than_it_is_stored_in_is_told_with_both(folder):
    """The demo model, which is stored in float32, and which make serve gives another --dtype."""
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    checks.read_model.cache_clear()
    (check,) = checks.check_kernels(folder)
    assert check.found.endswith("KV head, float16 unless --dtype is set (stored: float32): PyTorch")


def test_without_a_gpu_and_without_a_model(folder, tmp_path):
    (check,) = checks.check_kernels(folder)
    assert check.found == "no GPU; 128 channels a head, 4 query heads a KV head, bfloat16: PyTorch"
    assert checks.check_kernels(str(tmp_path / "none")) == []


def test_a_model_is_read_once_for_all_checks(folder, monkeypatch):
    read, config = [], model_config.ModelConfig
    monkeypatch.setattr(model_config, "ModelConfig", lambda path, **how: read.append(path) or config(path, **how))
    assert checks.check_model(folder).ok and checks.check_kernels(folder)
    assert read == [folder]
