"""SGLang's kernel for new slots is compiled in each form before requests need it."""

import torch
from sglang.srt.mem_cache import allocation

from sglang_ext.managers import graph_capture


def test_each_batch_size_and_alignment_is_run_once_and_writes_nothing(monkeypatch):
    forms = set()

    def assign(rows, table, start, end, slots, batch):
        assert len(rows) == len(start) == len(end) == batch and (start == end).all() and start.dtype == torch.int32
        forms.add((batch, slots.data_ptr() % 16 == 0))

    monkeypatch.setattr(allocation, "assign_req_to_token_pool_func", assign)
    graph_capture.compile_slot_kernel(torch.zeros(3, 8, dtype=torch.int32), 24)
    assert forms == {(batch, aligned) for batch in (1, 2, 4, 8, 16, 32) for aligned in (True, False)}
