"""Copies that hold all tokens take up new ones as soon as two blocks are there, in whole rounds: few tokens of an answer stay exact."""

import pytest
import torch
from lossy_helpers import Lossy, distinct

from sglang_ext.core import PLAIN_STEPS
from sglang_ext.mem_cache.compressed.compression_method import PACK_AFTER, CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import method


def method_of(name: str, page_size: int, partition: int | None = None) -> CompressionMethod:
    """What makes copies in pages of so many slots, of heads of 128 channels."""
    chosen = method(name, None, partition)
    buffers = KVBuffers((0,), (1.0,), *((torch.zeros(4, 1, 128),) for _ in "kv"))
    return CompressionMethod(chosen.compressor, 1.0, Packing.for_pool(chosen.quantizer, buffers, page_size), name, name)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("name", "partition"), [("int8", None), ("kivi", None), ("hack", 32), ("hack", 128)])
def test_new_blocks_are_packed_in_the_first_whole_round_in_which_they_are_there(name: str, partition: int | None, page_size: int) -> None:
    made = method_of(name, page_size, partition)
    for first in range(600, 600 + made.unit):
        reach = first
        for _ in range(3):
            covered, due = made.covered(reach), made.next_refresh(reach)
            assert (due - first) % PLAIN_STEPS == 0, "no round of others is cut"
            assert made.covered(due) == covered + made.pack_after, "both blocks are there"
            assert made.covered(due - PLAIN_STEPS) < made.covered(due) or due - PLAIN_STEPS < reach, "a round before they were not"
            # A copy covers what came before the newest ones; so many are exact as it is made.
            assert due + made.recent - covered <= made.max_exact_tail
            reach = due
    assert made.max_exact_tail < made.recent + made.pack_after + made.unit and made.pack_after >= PACK_AFTER


@pytest.mark.parametrize("name", ["int4", "hack", "kivi"])
def test_exact_tokens_after_a_copy_are_never_more_than_a_request_was_admitted_with(name: str) -> None:
    world, prompt, most = Lossy(name=name), 340, 0
    made, req = world.compressed_kv.methods[0], world.decoding(distinct(1, prompt))
    world.round(req)
    for length in range(prompt + PLAIN_STEPS, prompt + 400, PLAIN_STEPS):
        view = world.compressed_kv.get(req.req_pool_idx)
        most = max(most, req.length - view.covered)
        if req.length - made.recent >= view.refresh_after:
            assert world.compress(req)
            assert req.length - world.compressed_kv.get(req.req_pool_idx).covered < made.recent + PLAIN_STEPS, "less than a round is left"
        req.output_ids.extend(distinct(3, PLAIN_STEPS))
        assert world.extend(req, length)
        world.round(req)
    view = world.compressed_kv.get(req.req_pool_idx)
    assert view.covered > prompt + 2 * made.pack_after - made.recent, "it was packed more than twice"
    assert made.recent + made.pack_after <= most <= made.max_exact_tail
    world.check_owners()
    world.finish(req, is_insert=False)
    world.check_owners()
