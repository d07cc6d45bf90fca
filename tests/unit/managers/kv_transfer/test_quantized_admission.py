"""Prompts that a decode server receives as quantized KV: their admission, their slots, and that all slots are freed."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from tiered_helpers import TokenTable, World, release

from sglang_ext.hooks import transfer as hooks
from sglang_ext.managers.kv_transfer.feature import KVTransfer
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPromptAllocator
from sglang_ext.managers.worker import KVWorker
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, QuantizedLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import retract_lost
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

SLOTS, ROWS, WIDTH = 2048, 6, 2048


class Decode:
    """A decode server's pool, whose prefix tree is off, and SGLang's way to take slots."""

    def __init__(self, page, name="int4"):
        self.page, self.allocator = page, TorchPagedAllocator(SLOTS, page, torch.float32, "cpu", None, need_sort=False)
        self.table = TokenTable()
        self.table.req_to_token = torch.zeros(2 * ROWS, WIDTH, dtype=torch.int32)
        self.cache = TieredRadixCache(CacheInitParams(True, self.table, self.allocator, page))
        buffers = KVBuffers((0,), (1.0,), *((torch.zeros(SLOTS + page, 2, 64),) for _ in "kv"))
        made = method(name)
        packing = Packing.for_pool(made.quantizer, buffers, page)
        self.method = CompressionMethod(made.compressor, 1.0, packing, name, name)
        self.compressed_kv = CompressedKVCache(
            methods=(self.method,), token_table=self.table.req_to_token, rows=ROWS, buffers=buffers, allocator=self.allocator,
            tree_cache=self.cache, queries=QueryWindows(0, (0,), 0), layout=QuantizedLayout.for_table(packing, self.table.req_to_token),
        )  # fmt: skip
        self.codes = QuantizedOnlyKV(self.cache.nodes, self.compressed_kv, packing, lambda req: self.method, recomputes=False)
        self.cache.bind(self.compressed_kv, inserts_outputs=False, freed_full_kv=self.codes)
        admitted = SimpleNamespace(method_of=lambda req: 0, admit=lambda req, matched: None)
        self.prompts = QuantizedPromptAllocator(self.compressed_kv, self.codes, admitted)
        worker, feature = KVWorker.__new__(KVWorker), KVTransfer(SimpleNamespace())
        feature.quantized_prompt_allocator = lambda tree: self.prompts
        worker.features = (feature,)
        self.queue = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker), tree_cache=self.cache)
        self.rows = list(range(1, ROWS))

    def request(self, tokens, **changed):
        sampling = SimpleNamespace(min_p=0, custom_params=None, max_new_tokens=8)
        plain = {"grammar": None, "custom_logit_processor": None, "return_hidden_states": False, "lora_id": None}
        embeds = {"multimodal_inputs": None, "input_embeds": None, "positional_embed_overrides": None}
        more = {**embeds, "extra_key": None, "req_pool_idx": None, "cache_protected_len": 0}
        ids = {"origin_input_ids": array("q", range(tokens)), "output_ids": array("q"), "rid": str(tokens)}
        return SimpleNamespace(sampling_params=sampling, **plain | more | ids | changed)

    def stocks(self, queue, req, prefix_indices=None, prefix_len=None, total_prefix_len=None):
        """As SGLang's ``_pre_alloc``: a row, and slots of all tokens after a prefix."""
        begin, tokens = prefix_len or 0, hooks.count_prompt_slots(lambda req: len(req.origin_input_ids), req)
        req.req_pool_idx = self.rows.pop()
        slots = self.allocator.alloc(-(-(tokens - begin) // self.page) * self.page)[: tokens - begin]
        if begin:
            self.table.write((req.req_pool_idx, slice(0, begin)), prefix_indices)
        self.table.write((req.req_pool_idx, slice(begin, tokens)), slots)
        return slots

    def admit(self, req):
        """What pop_preallocated does: charged, and slots taken; both counts."""
        planned = self.prompts.plan(req, len(req.origin_input_ids))
        if planned is not None:
            setattr(req, hooks.PLANNED, planned)
        charged, free = hooks.count_prompt_slots(lambda req: len(req.origin_input_ids), req), self.allocator.available_size()
        slots = hooks.pre_alloc(self.stocks, self.queue, req)
        return planned, charged, free - self.allocator.available_size(), slots

    def end(self, req, tokens):
        req.kv = ReqKvInfo(kv_allocated_len=tokens, swa_evicted_seqlen=0)
        release(self.cache, req, False, tokens)


@settings(max_examples=60, deadline=None)
@given(
    page=st.sampled_from([1, 16, 64]), lengths=st.lists(st.integers(10, 900), min_size=1, max_size=5),
    name=st.sampled_from(["int4", "hack"]),
)  # fmt: skip
def test_a_prompt_takes_what_it_is_charged_and_gives_all_of_it_back(page, lengths, name):
    decode, running = Decode(page, name), []
    for tokens in lengths:
        req = decode.request(tokens)
        if decode.allocator.available_size() < tokens + page:
            break
        planned, charged, taken, slots = decode.admit(req)
        running.append((req, tokens))
        assert (planned is None) == (tokens < decode.method.min_context)
        if planned is None:
            assert charged == tokens and taken == -(-tokens // page) * page
            continue
        view, row = decode.compressed_kv.get(req.req_pool_idx), decode.table.req_to_token
        assert taken == charged == planned.slots and view.has_all_tokens
        assert view.covered == planned.covered == decode.method.covered(tokens - decode.method.recent)
        # To SGLang's padding page, then to the tokens that are not packed.
        assert (row[req.req_pool_idx, : view.covered] < page).all()
        assert torch.equal(row[req.req_pool_idx, view.covered : tokens].long(), slots) and (slots >= page).all()
        assert torch.equal(row[req.req_pool_idx + ROWS, : view.num_slots].long(), view.slots)
        where = decode.prompts.slots(req, planned)
        assert len(where.sinks) == where.begin == view.sinks and torch.equal(where.tail, slots)
        assert torch.equal(where.blocks, view.own[view.sinks :][: view.own_packed])
    decode.codes.free_full_kv([], {row: (decode.cache.root_node, view.covered) for row, view in decode.compressed_kv.items()})
    for req, tokens in running:
        decode.end(req, tokens)
    assert decode.allocator.available_size() == SLOTS and decode.codes.own_tokens == 0 and not decode.compressed_kv.items()


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_id": "adapter"}, {"input_embeds": [0.0]}, {"positional_embed_overrides": object()}, {"multimodal_inputs": object()},
        {"return_hidden_states": True},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_who_cannot_be_prefilled_again_by_tokens_or_reads_full_kv_gets_full_kv(changed):
    decode = Decode(1)
    req = decode.request(500, **changed)
    planned, charged, taken, _ = decode.admit(req)
    assert planned is None and charged == taken == 500


def test_who_is_retracted_is_prefilled_again_and_not_brought_back_from_the_host():
    decode, again = Decode(1), []
    coded, short = decode.request(500), decode.request(60)
    for req in (coded, short):
        decode.admit(req)
    coded.output_ids.extend([7, 8, 9])

    def add(req, is_rebootstrap):
        again.append((req.rid, is_rebootstrap, [*req.output_ids], req.pd_rebootstrap_forced_output_id))

    decode.queue.add = add
    batch = SimpleNamespace(reqs=[coded, short], tree_cache=decode.cache)

    def retract(batch, args):
        for req in batch.reqs:
            req.kv_cache_cpu, req.time_stats = "on the host", SimpleNamespace(set_retract_time=lambda: None)
            decode.end(req, len(req.origin_input_ids))
        return batch.reqs, 0.5, []

    assert retract_lost(retract, batch, None) == ([short], 0.5, [])
    assert again == [("500", True, [7, 8], 9)] and not hasattr(coded, "kv_cache_cpu") and short.kv_cache_cpu
    # With what it answered, but for the token that waits to be computed.
    assert decode.prompts.plan(coded, 502).tokens == 502


def test_codes_of_a_request_that_nobody_could_send_again_do_not_take_its_full_kv():
    decode = Decode(1)
    req = decode.request(500, lora_id="adapter")
    decode.admit(req)
    row = req.req_pool_idx
    assert decode.compressed_kv.compress(row, 500)
    running = {row: (decode.cache.root_node, decode.compressed_kv.get(row).covered)}
    decode.codes.free_full_kv([], running)
    assert decode.codes.own_tokens == 0 and not decode.codes.can_lack_full_kv(row)
    decode.prompts.enable_recompute(decode.request(500, req_pool_idx=row), None)
    decode.codes.free_full_kv([], running)
    assert decode.codes.own_tokens == decode.compressed_kv.get(row).covered and decode.codes.can_lack_full_kv(row)


class Sender(ProgressiveSender):
    """One that only remembers what it was asked to pack."""

    def __init__(self, takes):
        self.takes, self.packed = takes, []

    @property
    def is_waiting_packed(self):
        return bool(self.packed)

    def pack_early(self, begin, end, slots):
        self.packed += [(begin, end, slots.tolist())] if self.takes else []
        return self.takes


@pytest.mark.parametrize(("pending", "takes", "plans"), [(True, True, True), (True, False, True), (True, True, False), (False, True, True)])
def test_a_prompt_without_room_elsewhere_is_packed_once_and_others_may_take_its_kv(pending, takes, plans):
    world = World(slots=40, host=False)
    req = world.start(list(range(20)))
    req.rid, req.pending_bootstrap, req.disagg_kv_sender = "waits", pending, Sender(takes)
    worker, feature = KVWorker.__new__(KVWorker), KVTransfer(SimpleNamespace())
    worker.features = (feature,)
    planned = SimpleNamespace(tokens=20, covered=16, method=SimpleNamespace(sinks=4))
    feature.plan_early_packing = lambda req: planned if plans else None
    scheduler = SimpleNamespace(
        draft_worker=worker, tree_cache=world.cache, req_to_token_pool=world.table, disagg_prefill_inflight_queue=[req]
    )
    slots = world.table.req_to_token[req.req_pool_idx, :20].tolist()
    for _ in range(2):
        assert hooks.pack_ahead(lambda scheduler, rids: (scheduler, rids), scheduler, None) == (scheduler, None)
    goes = pending and takes and plans
    assert req.disagg_kv_sender.packed == ([(4, 16, slots)] if goes else [])
    assert world.cache.evictable_size() == (20 if goes else 0)
    # Another prompt takes its slots where it may.
    assert (world.start(list(range(100, 136))) is not None) == goes
    world.cache.check_integrity()
    world.finish(req, is_insert=False)
    for other in list(world.running):
        world.finish(other)
    world.cache.check_integrity()
    assert world.allocator.available_size() + world.cache.evictable_size() == 40
