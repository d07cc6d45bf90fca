"""Assembly of NVIDIA's is for NVIDIA's GPUs alone, where PyTorch calls AMD's "cuda", too."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.layers.kernels.packed import packed_decode

BUFFER = SimpleNamespace(is_cuda=True, element_size=lambda: 2)


@pytest.mark.parametrize(("hip", "spoken"), [(None, True), ("6.3.42131", False)])
def test_kernels_have_assembly_for_nvidia_alone(hip, spoken, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert packed_decode.speaks_ptx(BUFFER) == spoken
