"""The host may plan a forward before the device has taken the plan of the one before."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_ext.managers.graph_capture import unpin


class Backend(AttentionBackend):
    """As SGLang's backends keep FlashInfer's wrappers, among much else."""

    def __init__(self, **kept):
        vars(self).update(kept)


def wrapper():
    return SimpleNamespace(_pin_memory_int_workspace_buffer=torch.zeros(64, dtype=torch.uint8))


def memory(planned):
    return planned._pin_memory_int_workspace_buffer


def test_no_wrapper_of_a_backend_keeps_pinned_memory():
    graphs, verifications = {1: [wrapper()], 8: [wrapper()]}, {8: [wrapper()]}
    eager, ragged = [wrapper()], wrapper()
    backend = Backend(
        # SGLang's FlashInfer backend has a string under this name, its hybrid one another backend.
        decode_backend="fa2",
        decode_cuda_graph_metadata=graphs,
        prefill_cuda_graph_metadata=verifications,
        decode_wrappers=eager,
        prefill_wrapper_ragged=ragged,
        full_cg_prefill_wrappers=None,
    )
    wrappers = [graphs[1][0], graphs[8][0], verifications[8][0], eager[0], ragged]
    before = [memory(planned) for planned in wrappers]
    assert unpin(backend) == len(wrappers)
    for planned, old in zip(wrappers, before):
        assert memory(planned) is not old and memory(planned).shape == (64,) and not memory(planned).is_pinned()
    assert len({memory(planned).data_ptr() for planned in wrappers}) == len(wrappers)


def test_backends_within_backends_are_found_and_those_that_plan_on_the_device_left_alone():
    inner, planned_there = wrapper(), SimpleNamespace(page_table=torch.zeros(3))
    hybrid = Backend(
        decode_backend=Backend(decode_cuda_graph_metadata={8: planned_there}),
        prefill_backend=Backend(decode_wrappers=[inner]),
    )
    hybrid.itself = hybrid
    before = memory(inner)
    assert unpin(hybrid) == 1 and memory(inner) is not before
    assert unpin(Backend(decode_cuda_graph_metadata={8: planned_there})) == 0
