"""Triton kernels on the GPU, against plain PyTorch and SGLang's own."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from check_names import CHECK_NAMES

CHECKS = Path(__file__).parents[1] / "kernels/kernel_checks.py"
# Of kernels whose warps wait for each other: one that waits for ever is ended with its process.
APART = ("specialized_prefill",)


@pytest.mark.parametrize("check", CHECK_NAMES)
def test_kernel_gives_what_pytorch_gives(check):
    if check in APART:
        subprocess.run([sys.executable, str(CHECKS), check], timeout=300, check=True)
        return
    # Imported here: where there is no GPU it asks Triton for its interpreter.
    importlib.import_module("kernel_checks").CHECKS[check]()


def test_a_plan_is_taken_before_the_next_is_written():
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from sglang_ext.managers.graph_capture import PLAN, unpin

    def pointers(*lengths):
        host = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        return host, host.cuda()

    def plan(how, host, device, **more):
        how(wrapper, device, indices, last, 9, 3, 64, 1, data_type=torch.bfloat16, q_data_type=torch.bfloat16, **more)
        # In the stream's order: what kernels after this plan read.
        return wrapper._int_workspace_buffer[:512].clone()

    def plan_ahead(lengths):
        return plan(fast_decode_plan, *lengths, global_override_indptr_cpu=lengths[0])

    uneven, even = pointers(700, 7900, 900, 800), pointers(7900, 7901, 7902, 7903)
    indices = torch.zeros(40000, dtype=torch.int32, device="cuda")
    last = torch.ones(4, dtype=torch.int32, device="cuda")
    space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        space, "NHD", use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros(5, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
    )
    backend = AttentionBackend()
    backend.decode_cuda_graph_metadata = {4: [wrapper]}
    assert getattr(wrapper, PLAN).is_pinned() and unpin(backend) == 1
    plan(BatchDecodeWithPagedKVCacheWrapper.plan, *even)
    expected = [plan_ahead(lengths) for lengths in (even, uneven)]
    torch.cuda.synchronize()
    assert not expected[0].equal(expected[1])
    torch.cuda._sleep(1 << 30)
    found = [plan_ahead(lengths) for lengths in (even, uneven, even)]
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    assert [f.equal(e) for f, e in zip(found, [*expected, expected[0]])] == [True] * 3
