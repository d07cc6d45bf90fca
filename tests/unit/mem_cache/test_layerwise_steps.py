"""Compressed KV whose tokens a cache rank chooses by packs of layers: what its pointers lead to, step by step, and when full KV is read."""

from types import SimpleNamespace

import torch
from rank_helpers import ScriptedRank
from test_pointer_layout import guided_views, led_to
from test_compressed_kv import DIM, HEADS, LAYERS

from sglang_ext.core import FALLBACK_REASONS, RequestState
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.layerwise_client import LayerwiseClient
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.managers.integrity import check_compressed
from sglang_ext.mem_cache.compressed.policy import ensure_compressed_kv
from sglang_ext.mem_cache.compressed.queries import RecordedRows
from sglang_ext.mem_cache.compressed.policy import observe_step
from sglang_ext.mem_cache.compressors.step_selectors import Spade

COVERED = 150


def ranked_views():
    """Views of a request in row 1 with queries of 50 tokens, a client of a rank that answers as told, and that rank."""
    compressed_kv, keep = guided_views(Spade(each_round=False))
    keys, (frequencies, interleaved) = compressed_kv.buffers.keys[0], (compressed_kv.rotary.frequencies, compressed_kv.rotary.interleaved)
    dtype = str(keys.dtype).removeprefix("torch.")
    shape = protocol.BufferShape(LAYERS, HEADS, keys.shape[1], DIM, dtype, 1, lanes=2, most=64, places=8, packs=LAYERS)
    rotary = protocol.RotaryParameters(tuple(frequencies.tolist()), interleaved)
    attach = protocol.Attach(protocol.VERSION, 1, shape, 16, compressed_kv.buffers.scaling, "current", 4, 32, rotary)
    link = RankLink(attach, ExchangeBuffer(shape, torch.device("cpu"), "cpu"), pack=1)
    link._start_process = ScriptedRank
    client = LayerwiseClient([link], compressed_kv.methods[0], compressed_kv.token_table, compressed_kv.buffers, compressed_kv.queries)
    client.max_wait_seconds = 0.0
    compressed_kv.async_selector = client
    keep(range(100, COVERED), 1)
    return compressed_kv, client, link


def ready(client, link):
    """The rank, once it can be asked."""
    client.poll()
    while not link.ready:
        ScriptedRank.made[-1].hear()
        client.poll()
    return ScriptedRank.made[-1]


def ensure(compressed_kv, length=COVERED):
    """Why the request reads full KV; "none" where it has a copy."""
    state = RequestState(rid="r", row=1, seed=0)
    return FALLBACK_REASONS[ensure_compressed_kv(compressed_kv, SimpleNamespace(last_node=None), state, length, 0)]


def step(compressed_kv, position):
    """One token of the request."""
    queries = torch.randn(LAYERS, 1, HEADS, DIM, generator=torch.Generator().manual_seed(position)) * 3
    watch = observe_step(compressed_kv, {1: position + 1}, 4)
    with compressed_kv.queries.recording((RecordedRows(1, 0, 1, position),), watch):
        for layer in range(LAYERS):
            compressed_kv.queries.record(layer, queries[layer])


def some_of(ask, heads):
    """Positions of each head, ascending."""
    noise = torch.rand(ask.count, heads, ask.covered, generator=torch.Generator().manual_seed(ask.first))
    return noise.topk(ask.keep).indices.sort(-1).values


def test_a_copy_is_made_here_and_led_by_what_the_rank_chose_for_the_step_before():
    compressed_kv, client, link = ranked_views()
    rank, heads = ready(client, link), compressed_kv.buffers.keys[0].shape[1]
    assert ensure(compressed_kv) == "none" and compressed_kv.get(1).covered == COVERED
    first = led_to(compressed_kv)
    step(compressed_kv, 150)
    asks = rank.asks()
    assert [(ask.first, ask.count, ask.positions) for ask in asks] == [(layer, 1, (150,)) for layer in range(LAYERS)]
    assert led_to(compressed_kv) == first
    for ask in asks:
        rank.answer(ask, some_of(ask, heads))
    step(compressed_kv, 151)
    slots = compressed_kv.token_table[1, :COVERED].long()
    assert led_to(compressed_kv) == [slots[some_of(ask, heads)[0]].tolist() for ask in asks] != first
    assert compressed_kv.num_compressions["spade"] == 2 and client.taken == 1 and not +client.missed
    check_compressed(compressed_kv)
    assert ensure(compressed_kv, 153) == "none" and compressed_kv.get(1).covered == COVERED, "few exact tokens follow it"
    compressed_kv.release(1)
    assert not client.has_request(1) and client.held_tokens == 0


def test_full_kv_is_read_until_a_rank_is_ready_and_after_it_has_ended():
    compressed_kv, client, link = ranked_views()
    assert ensure(compressed_kv) == "no-selection" and +client.missed == {"starting": 1} and compressed_kv.get(1) is None
    rank = ready(client, link)
    assert ensure(compressed_kv) == "none"
    step(compressed_kv, 150)
    rank.ended = -9
    compressed_kv.poll()
    assert ensure(compressed_kv, 151) == "no-selection" and client.missed["ended"] == 1
    assert compressed_kv.get(1) is None and observe_step(compressed_kv, {}, 4) is None
