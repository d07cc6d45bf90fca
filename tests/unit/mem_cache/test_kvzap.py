"""Predicted scores: written where the KV is written, found by whoever reads it, unknown where the KV came from elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from test_compressed_kv import make_views
from tiered_helpers import World

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores, attention_owners
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.kvzip import KVzap
from sglang_ext.mem_cache.compressors.attention_scores import SinkRecent
from sglang_ext.mem_cache.scores import FitRecord, Predictor

LAYERS, HEADS, HIDDEN, SLOTS = 2, 2, 6, 400
UNKNOWN = FitRecord("m", "{}", 1, 1, (0.0,) * LAYERS, (0.0,) * LAYERS)


class Attention(torch.nn.Module):
    """The module of a layer in SGLang's models, as far as hidden states are concerned."""

    def __init__(self, layer_id):
        super().__init__()
        self.attn = RadixAttention(4, 8, 0.5, HEADS, layer_id)

    def forward(self, positions, hidden_states, forward_batch):
        return hidden_states


class Model(torch.nn.Module):
    """Its layers get the same states, times their index plus 1; called as SGLang's models do, in both ways."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(layer) for layer in range(layers))

    def forward(self, states, slots):
        batch = SimpleNamespace(out_cache_loc=torch.tensor(slots))
        self.layers[0](None, states, batch)
        self.layers[1](positions=None, hidden_states=2 * states, forward_batch=batch)


@pytest.fixture
def predictor():
    generator = torch.Generator().manual_seed(0)
    outer, bias = (torch.randn(LAYERS, HEADS, *size, generator=generator) for size in ((HIDDEN,), ()))
    return Predictor(outer, bias, UNKNOWN)


@pytest.fixture
def scores(predictor):
    made = SlotScores(predictor, range(LAYERS))
    made.allocate(SLOTS, "cpu", torch.float32)
    return made


def states(count, seed=0):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def expected(predictor, given):
    """Scores as they are kept: float32 [layers, kv_heads, tokens]."""
    return torch.stack([predictor(layer, (layer + 1) * given).t() for layer in range(LAYERS)]).half().float()


def same(found, wanted):
    return torch.allclose(found, wanted, atol=1e-2)


def test_each_token_of_prefill_chunks_and_verifications_leaves_its_score_at_its_slot(scores, predictor):
    model = Model()
    scores.watch(model)
    prompt, checked, again = states(20), states(4, seed=1), states(3, seed=2)
    model(prompt[:12], list(range(50, 62)))
    model(prompt[12:], list(range(7, 15)))
    slots = torch.tensor([*range(50, 62), *range(7, 15)])
    assert same(scores.read(slots), expected(predictor, prompt))
    # Of a verification the last drafts are rejected, and the next one brings other tokens to their slots.
    model(checked, [80, 81, 82, 83])
    model(again, [82, 83, 84])
    assert same(scores.read(torch.tensor([80, 81, 82, 83, 84])), expected(predictor, torch.cat([checked[:2], again])))
    assert same(scores.read(slots), expected(predictor, prompt)), "others stay"
    untouched = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, torch.cat([slots, torch.arange(80, 85)]), False)
    assert scores.table[..., untouched].isnan().all()


def test_tokens_that_pad_a_forward_harm_only_slot_0(scores, predictor):
    model = Model()
    scores.watch(model)
    model(states(5), [9, 8, 0, 0, 0])
    assert same(scores.read(torch.tensor([9, 8])), expected(predictor, states(5)[:2]))


def test_a_prefix_hit_finds_the_scores_whatever_request_computed_them(scores, predictor):
    compressed_kv, model = make_views(compressor=KVzap(scores, SinkRecent(), recent=5)), Model()
    scores.watch(model)
    prompt = states(100)
    model(prompt, compressed_kv.token_table[1, :100].tolist())
    compressed_kv.token_table[2, :100] = compressed_kv.token_table[1, :100]
    assert compressed_kv.compress(2, 100) and compressed_kv.get(2).method == "kvzap"
    wanted = expected(predictor, prompt)
    wanted[..., [*range(4), *range(95, 100)]] = float("inf")
    kept = wanted.topk(25).indices.sort().values
    for layer in range(LAYERS):
        source = compressed_kv.token_table[1, :100].long()[kept[layer]]
        keys = compressed_kv.buffers.keys[layer]
        for head in range(HEADS):
            assert torch.equal(keys[compressed_kv.get(2).own, head], keys[source[head], head])


def test_a_context_with_unknown_slots_is_compressed_by_the_online_method_until_they_are_computed_again(scores):
    compressed_kv, model = make_views(compressor=KVzap(scores, SinkRecent())), Model()
    scores.watch(model)
    slots = compressed_kv.token_table[1, :100].tolist()
    model(states(100), slots)
    scores.forget(torch.tensor(slots[40:50]))
    assert compressed_kv.compress(1, 100) and compressed_kv.get(1).method == "sink-recent"
    assert compressed_kv.compress(1, 40) and compressed_kv.get(1).method == "kvzap", "those before are known"
    model(states(10), slots[40:50])
    assert compressed_kv.compress(1, 100) and compressed_kv.get(1).method == "kvzap"
    assert compressed_kv.num_compressions == {"sink-recent": 1, "kvzap": 2}


def test_a_load_from_the_host_says_which_slots_it_is_about_to_write():
    world, tokens, told = World(host=False), list(range(8)), []

    def forget(slots):
        assert not world.kv[slots].any(), "not loaded yet"
        told.append(slots.clone())

    world.cache.use_host(world.tier, on_load_start=forget)
    world.finish(world.start(tokens))
    world.offload(world.node(tokens))
    world.kv.zero_()
    request = world.start([*tokens, 9])
    row = world.table.req_to_token[request.req_pool_idx, : len(tokens)].long()
    assert len(told) == 1 and torch.equal(told[0], row) and world.kv[row].all()
    world.finish(request)
    world.finish(world.start([*tokens, 9]))
    assert len(told) == 1, "what is on the device was not loaded"


@pytest.mark.parametrize("count", [4, 9, 30])
def test_the_first_and_the_newest_tokens_are_kept_whatever_the_scores(scores, count):
    scores.table.fill_(9.0)
    keys = tuple(torch.randn(60, HEADS, 4) for _ in range(LAYERS))
    context = ContextKV(KVBuffers((0, 1), (1.0, 1.0), keys, keys), torch.arange(60), *[torch.empty(0)] * 2)
    (kept,) = KVzap(scores, recent=16).select(context, [Part(0, 60, count)])
    always = [0, 1, 2, 3, *range(60 - min(count - 4, 16), 60)]
    assert all(set(always) <= set(head) for head in kept.flatten(0, 1).tolist())


def test_without_host_memory_no_queries_are_kept_and_nothing_is_unknown(scores):
    alone, beside = KVzap(scores, None), KVzap(scores)
    assert (alone.window, alone.needs_rotary) == (0, False) and beside.window == 32
    assert alone.for_context(SimpleNamespace(slots=torch.tensor([1]))) is alone
    assert alone.held_bytes == LAYERS * HEADS * (SLOTS * 2 + HIDDEN * 4 + 4)


def test_a_model_that_does_not_show_what_enters_its_attention_is_refused():
    class Bare(Attention):
        """Called in another way."""

        def forward(self, x, forward_batch):
            return x

    model = Model()
    model.layers[1] = Bare(1)
    with pytest.raises(OptionError, match="layer 1 belongs to Bare, called with x, forward_batch. Use --kv-compressor snapkv"):
        attention_owners(model, range(LAYERS))
    with pytest.raises(OptionError, match="layer 2 belongs to no module"):
        attention_owners(Model(), range(3))
