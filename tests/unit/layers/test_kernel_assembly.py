"""Assembly of NVIDIA's is for NVIDIA's GPUs alone, where PyTorch calls AMD's "cuda", too."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.layers.kernels.gpu_launch import pdl_options
from sglang_ext.layers.kernels.packed import packed_decode

BUFFER = SimpleNamespace(is_cuda=True, device=None, element_size=lambda: 2)


@pytest.mark.parametrize(("hip", "spoken"), [(None, True), ("6.3.42131", False)])
def test_kernels_have_assembly_for_nvidia_alone(hip, spoken, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert packed_decode.has_ptx(BUFFER) == spoken


@pytest.mark.parametrize(
    ("hip", "capability", "early"), [(None, (9, 0), True), (None, (8, 9), False), ("6.3.42131", (9, 4), False)]
)
def test_kernels_are_launched_early_on_nvidias_gpus_that_can_alone(hip, capability, early, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pdl_options(BUFFER) == ({"EARLY": True, "launch_pdl": True} if early else {"EARLY": False})
