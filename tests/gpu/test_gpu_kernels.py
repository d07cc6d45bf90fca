"""Triton kernels on the GPU, against plain PyTorch and SGLang's own."""

import importlib

import pytest

CHECKS = ("window_scores", "gather_kept", "verify_attention", "verify_attention_is_decode", "verify_backend")


@pytest.mark.parametrize("check", CHECKS)
def test_kernel_gives_what_pytorch_gives(check):
    # Imported here: where there is no GPU it asks Triton for its interpreter.
    checks = importlib.import_module("kernel_checks").CHECKS
    assert set(checks) == set(CHECKS)
    checks[check]()
