"""Slots that SGLang takes ahead of a request end where its answer does."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative import eagle_utils

from sglang_ext.hooks import rounds

RESERVE, WIDTH = 12, 64


class Pool:
    """Slots one after another, from 1 on."""

    def __init__(self, size, page_size):
        self.page_size = page_size
        self.slots = list(range(page_size, page_size + size))

    def take(self, count):
        if count > len(self.slots):
            raise RuntimeError("out of memory")
        taken, self.slots = self.slots[:count], self.slots[count:]
        return torch.tensor(taken, dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch):
    monkeypatch.setattr("sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode", lambda server_args: RESERVE // 2)
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=1))

    def take(tree_cache, rows, *, reqs, nxt_kv_lens_cpu, num_needed_tokens, batch, **more):
        for req, end in zip(reqs, nxt_kv_lens_cpu.tolist()):
            begin = req.kv.kv_allocated_len
            rows.req_to_token[req.req_pool_idx, begin:end] = batch.token_to_kv_pool_allocator.take(end - begin)
            req.kv.kv_allocated_len = end

    monkeypatch.setattr(eagle_utils, "alloc_for_spec_decode", lambda tree, rows, **more: take(tree, rows, **more))


def request(row, prompt, wanted, given, page_size):
    allocated = -(-(prompt + given) // page_size) * page_size
    return SimpleNamespace(
        req_pool_idx=row, origin_input_ids=range(prompt), kv_committed_len=prompt + given, decode_batch_idx=0,
        sampling_params=SimpleNamespace(max_new_tokens=wanted), kv=SimpleNamespace(kv_allocated_len=allocated),
    )


def batch_of(reqs, size, page_size):
    table = torch.full((len(reqs), WIDTH), 999, dtype=torch.int32)
    return SimpleNamespace(
        reqs=reqs, batch_size=lambda: len(reqs), maybe_evict_swa=lambda: None, device="cpu", tree_cache=None,
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        token_to_kv_pool_allocator=Pool(size, page_size), req_to_token_pool=SimpleNamespace(req_to_token=table),
        req_pool_indices=torch.arange(len(reqs)),
    )


asked = st.tuples(st.integers(1, 12), st.integers(1, 24), st.integers(0, 23)).filter(lambda each: each[2] < each[1])


@given(st.lists(asked, min_size=1, max_size=4), st.sampled_from([1, 4]))
def test_slots_reach_as_far_as_before_or_to_the_end_and_rows_lead_to_padding_beyond(requests, page_size):
    reqs = [request(row, *each, page_size) for row, each in enumerate(requests)]
    batch = batch_of(reqs, 400, page_size)
    with rounds.capped_committed_lens(reqs):
        needed = ScheduleBatch._new_tokens_required_next_decode_spec_v2(batch, reqs, page_size)
    before = len(batch.token_to_kv_pool_allocator.slots)
    rounds.cap_slot_reservation(eagle_utils.eagle_prepare_for_decode, batch)
    assert before - len(batch.token_to_kv_pool_allocator.slots) == needed
    for (prompt, wanted, given), req in zip(requests, reqs):
        assert req.kv_committed_len == prompt + given
        wants, end = prompt + given + RESERVE, prompt + wanted - 1
        assert req.kv.kv_allocated_len == -(-min(wants, end) // page_size) * page_size
        beyond = batch.req_to_token_pool.req_to_token[req.req_pool_idx, req.kv.kv_allocated_len : wants]
        assert not beyond.any()


def test_a_prompt_whose_answer_just_fits_has_room():
    req = request(0, 10, 9, 0, 1)
    batch = batch_of([req], 8, 1)
    rounds.cap_slot_reservation(eagle_utils.eagle_prepare_for_decode, batch)
    assert req.kv.kv_allocated_len == 18 and batch.token_to_kv_pool_allocator.slots == []
