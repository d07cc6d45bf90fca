"""The doctor names GPU, shape and kernels."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs import model_config
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_ext.doctor import checks
from sglang_ext.doctor.__main__ import checks_for
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.level_quantizers import lloyd_max


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


@pytest.fixture
def gpu(monkeypatch):
    """Lets this machine have a GPU of a compute capability. Its tensors have no memory."""

    def has(major, minor, name="NVIDIA L40S"):
        found = SimpleNamespace(name=name, major=major, minor=minor, shared_memory_per_block_optin=101_376)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)

    # Computed once in a process: they must be real, for other tests too.
    for dim in (96, 128):
        lloyd_max(dim, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield has


def test_kernels_are_named_by_what_they_take(gpu):
    gpu(8, 0)
    found = checks.packed_kernels(128, 16, torch.bfloat16)
    assert found["read by Gluon, packed by a kernel"] == ["int4", "int8", "kivi", "rotatekv"]
    assert found["read by Triton, packed by a kernel"] == ["hack", "lynx", "turboquant"]
    found = checks.packed_kernels(96, 1, torch.float16)
    plain = [name for name in catalogue.on_gpu() if name != "hack"]
    assert found == {"read by Triton, packed by PyTorch": plain, "not for such heads": ["hack"]} and "kvquant" not in plain


def test_what_does_not_compile_for_a_gpu_is_named(gpu):
    gpu(7, 5)
    found = checks.packed_kernels(128, 4, torch.float16)
    assert found["not on this GPU"] == ["hack"] and not any("Gluon" in kernels for kernels in found)


@pytest.mark.parametrize("dim", [8, 320])
def test_heads_that_a_server_refuses_are_served_by_no_kernel(dim):
    assert checks.packed_kernels(dim, 4, torch.bfloat16) == {"not for such heads": list(catalogue.on_gpu())}


def test_the_line_names_gpu_and_shape(folder, gpu):
    model = checks.read_model(folder)
    gpu(8, 9)
    (check,) = checks.check_kernels(model)
    assert check.ok and check.found == (
        "NVIDIA L40S (sm_89, 99 KiB of shared memory); 128 channels a head, 4 query heads a KV head, bfloat16: "
        "Triton for scores and compressed KV; in few bits: hack, lynx, turboquant read by Triton, packed by a kernel; "
        "int4, int8, kivi, rotatekv read by Gluon, packed by a kernel"
    )


def test_a_model_that_sglang_computes_in_another_dtype_than_it_is_stored_in_is_told_with_both(folder):
    """The demo model, which is stored in float32, and which make serve gives another --dtype."""
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    (check,) = checks.check_kernels(checks.read_model(folder))
    assert check.found.endswith("KV head, float16 unless --dtype is set (stored: float32): PyTorch")


def test_without_a_gpu_and_without_a_model(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (check,) = checks.check_kernels(checks.read_model(folder))
    assert check.found == "no GPU; 128 channels a head, 4 query heads a KV head, bfloat16: PyTorch"
    assert checks.check_kernels(checks.read_model(str(tmp_path / "none"))) == []


def test_a_model_is_read_once_for_all_checks(folder, monkeypatch):
    read, config = [], model_config.ModelConfig
    monkeypatch.setattr(model_config, "ModelConfig", lambda path, **how: read.append(path) or config(path, **how))
    made = checks_for(folder, "0.5.17", "2.13.0")
    assert made["model"]().ok and made["kernels"]()
    assert read == [folder]
