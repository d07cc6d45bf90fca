"""The pool is SGLang's own memory; what is none that can be moved is refused with what to use instead."""

import dataclasses

import pytest
import torch
from transfer_helpers import WatchedPool, make_pool

from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords, PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LinkError


def test_tensors_are_the_pools_own_memory():
    pool = make_pool(torch.bfloat16)
    pool.values[1][7] = 3.0
    assert (pool.args.tensors[3][7] == 3).all()
    assert [tensor.data_ptr() for tensor in pool.tensors] == pool.args.kv_data_ptrs


def test_addresses_of_tensors_are_there_before_another_stream_may_read_them(monkeypatch):
    pool, seen = make_pool(torch.bfloat16, kind=WatchedPool), []
    monkeypatch.setattr(PoolBuffers, "_by_kernel", lambda self, like: True)
    pool.watch(lambda kind: seen.append(dict(pool._parts)))
    parts = pool.parts(slice(0, 2))
    assert seen == [{}] and "table" in vars(parts)
    assert pool.parts(slice(0, 2)) is parts and len(seen) == 1


@pytest.mark.parametrize("change", [{"heads": 3}, {"key_dim": 8}, {"dtype": torch.float16}], ids=["heads", "dim", "dtype"])
def test_another_layout_than_the_models_is_refused(change):
    with pytest.raises(LinkError, match=r"4 buffers of \[64, 128\] bytes per token.*mooncake"):
        dataclasses.replace(make_pool(), **change)


def test_a_record_goes_from_row_to_row_and_only_whole():
    ours, theirs = AuxRecords(make_pool(seed=1).args), AuxRecords(make_pool(seed=2).args)
    record = theirs.read(2)
    ours.write(6, memoryview(record))
    assert ours.read(6) == record and ours.read(5) != record
    with pytest.raises(LinkError, match="75 bytes; here it has 76"):
        ours.write(6, memoryview(record)[1:])
