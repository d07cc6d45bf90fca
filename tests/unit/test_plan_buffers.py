"""FlashInfer's plans are not overwritten before the device has them."""

from types import SimpleNamespace

import torch

from sglang_ext.layers.attention.plan_buffers import PlanBuffers


class Event:
    """Notes when it is waited for."""

    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def synchronize(self):
        self.waits.append(self.name)


def backend(graphs=2):
    wrappers = [SimpleNamespace(_pin_memory_int_workspace_buffer=torch.zeros(4)) for _ in range(graphs)]
    return SimpleNamespace(decode_cuda_graph_metadata={i: [w] for i, w in enumerate(wrappers)}), wrappers


def test_a_plan_waits_only_for_the_one_whose_memory_it_takes():
    owner, (first, second) = backend()
    plans, waits, memories = PlanBuffers(list([first, second]), count=3), [], []
    for step in range(5):
        plans.next()
        assert first._pin_memory_int_workspace_buffer is second._pin_memory_int_workspace_buffer
        memories.append(first._pin_memory_int_workspace_buffer.data_ptr())
        plans.written(Event(step, waits))
    assert waits == [0, 1], "two steps ahead of the device"
    assert len(set(memories)) == 3 and memories[:2] == memories[3:]


def test_only_graphs_that_are_planned_on_the_host_have_such_memory():
    owner, _ = backend()
    assert PlanBuffers.of(owner) is not None
    assert PlanBuffers.of(SimpleNamespace(decode_backend=owner)) is not None
    by_batch = {8: SimpleNamespace(page_table=None)}
    for kept in (None, {}, "triton", by_batch):
        assert PlanBuffers.of(SimpleNamespace(decode_cuda_graph_metadata=kept)) is None
    assert PlanBuffers.of(SimpleNamespace()) is None
