"""Codes beside the pool: they are those of the keys that are in their slots, and what is chosen by them is what they say."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_pointer_layout import guided_views, led_to
from test_compressed_kv import HEADS, LAYERS

from sglang_ext.core import RequestState
from sglang_ext.mem_cache.compressed.key_derived_data import SlotCodes
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv
from sglang_ext.mem_cache.compressed.queries import record_queries, set_key_write_callback
from sglang_ext.mem_cache.compressors import top_positions
from sglang_ext.mem_cache.compressors.step_selectors import Spade, attention
from sglang_ext.mem_cache.selection.scoring import mark_always
from sglang_ext.mem_cache.selection.scoring_keys import CODED_AT_ONCE, KeySpec, QuantizedKeys

BITS = pytest.mark.parametrize("bits", [8, 4])


def pool(layers=3, slots=40, heads=2, dim=64, seed=0):
    """Keys of layers."""
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(slots, heads, dim, generator=noise) for _ in range(layers)]


def as_held(keys, bits):
    """What cache ranks would hold of the keys of all slots."""
    held = QuantizedKeys(KeySpec(len(keys), *keys[0].shape[1:], keys[0].dtype, bits), len(keys[0]))
    held.write(torch.arange(len(keys[0])), torch.stack(tuple(keys)))
    return held


def forward(slots, layer_ids, idle=False):
    """What a forward that writes to these slots calls of each layer's attention; the layers whose original was called."""
    mode, called = SimpleNamespace(is_idle=lambda: idle), []
    batch = SimpleNamespace(forward_mode=mode, out_cache_loc=None if idle else torch.tensor(slots, dtype=torch.int64))
    for layer_id in layer_ids:
        layer = SimpleNamespace(layer_id=layer_id, tp_q_head_num=1, qk_head_dim=1)
        record_queries(lambda *args, **kwargs: called.append(layer_id), None, torch.zeros(1, 1), None, None, layer, batch, True)
    return called


@BITS
def test_a_forward_codes_what_it_wrote_in_all_layers_once_the_last_has_attended(bits):
    keys = pool()
    codes, every = SlotCodes(keys, (4, 5, 7), bits), torch.arange(40)
    before = [part.clone() for part in (codes.held.codes, codes.held.words)]
    set_key_write_callback(codes.on_keys_written)
    try:
        assert forward([3, 9, 21], (4, 5)) == [4, 5]
        assert all(map(torch.equal, before, (codes.held.codes, codes.held.words))), "the last layer writes yet"
        forward([3, 9, 21], (7,))
        forward([], (4, 5, 7), idle=True)
        forward([], (4, 5, 7))
        wrote = torch.tensor([3, 9, 21])
        for layer in range(3):
            assert torch.equal(codes.held.read(layer, wrote), as_held(keys, bits).read(layer, wrote))
        others = torch.ones(40, dtype=torch.bool).index_fill(0, wrote, False)
        assert torch.equal(codes.held.codes[:, others], before[0][:, others])
        # Another request's token takes a slot, a draft's exact key that of the draft.
        for layer, changed in enumerate(pool(seed=1)):
            keys[layer][9:12] = changed[9:12]
        forward([11, 9, 10], (4, 5, 7))
        assert torch.equal(codes.held.read(1, every[[3, 9, 10, 11]]), as_held(keys, bits).read(1, every[[3, 9, 10, 11]]))
    finally:
        set_key_write_callback(None)
    keys[0][21] = 7.0
    forward([21], (4, 5, 7))
    assert not torch.equal(codes.held.read(0, wrote), as_held(keys, bits).read(0, wrote)), "nobody is told any more"


def test_keys_are_coded_in_pieces_as_they_are_at_once():
    keys, slots = pool(slots=12000), torch.randperm(12000)[:11500]
    assert len(keys) * keys[0][slots].numel() > CODED_AT_ONCE, "in two pieces"
    codes, whole = SlotCodes(keys, range(3), 4), as_held(keys, 4)
    codes.write(slots)
    for one, other in zip((whole.codes, whole.words), (codes.held.codes, codes.held.words)):
        assert torch.equal(one[:, slots], other[:, slots])
    assert torch.equal(codes.held.read(2, slots), whole.read(2, slots))


@BITS
def test_copies_lead_to_what_is_chosen_by_the_codes_of_a_rank_when_made_and_between_steps(bits):
    compressed_kv, keep = guided_views(Spade())
    codes = SlotCodes(compressed_kv.buffers.keys, range(LAYERS), bits)
    codes.write(torch.arange(len(compressed_kv.buffers.keys[0])))
    compressed_kv.buffers = replace(compressed_kv.buffers, codes=codes.held)
    held, method = as_held(compressed_kv.buffers.keys, bits), compressed_kv.methods[0]
    for keys in compressed_kv.buffers.keys:
        # Not read any more.
        keys.copy_(keys.flip(0))

    def expected(end, by):
        view = compressed_kv.get(1)
        slots, (queries, positions) = compressed_kv.token_table[1, : view.covered].long(), compressed_kv.queries.get(1, end, 1)
        predicted = method.compressor.predictor.predict(queries.transpose(1, 2)[None], positions[None], compressed_kv.rotary)
        scores = [attention(predicted[:, i], by(i, slots), compressed_kv.buffers.scaling[i]) for i in range(LAYERS)]
        return [slots[each].tolist() for each in top_positions(mark_always(torch.stack(scores), *method.compressor.always(None)), view.own_tokens)]

    keep(range(149, 150), 1)
    assert ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), RequestState(rid="r", row=1, seed=0), 150, 0) == 0
    assert led_to(compressed_kv) == expected(150, held.read)
    keep(range(150, 151), 2)
    compressed_kv.reselect(1, 151, 1)
    assert led_to(compressed_kv) == expected(151, held.read)
    assert led_to(compressed_kv) != expected(151, lambda layer, slots: compressed_kv.buffers.keys[layer][slots])
    assert len(led_to(compressed_kv)[0]) == HEADS


def test_layers_are_read_as_they_are_without_codes():
    compressed_kv, _ = guided_views(Spade())
    slots = torch.tensor([5, 2])
    assert torch.equal(compressed_kv.buffers.scoring_keys(1, slots), compressed_kv.buffers.keys[1][slots])
    compressed_kv.buffers = replace(compressed_kv.buffers, codes=SlotCodes(compressed_kv.buffers.keys, range(LAYERS), 8).held)
    assert compressed_kv.buffers.of_layers(slice(0, 1)).codes is None
