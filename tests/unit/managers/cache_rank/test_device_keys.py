"""Keys that a cache rank takes out of the exchange buffer, of many blocks at once: on a CPU, where PyTorch copies them."""

import pytest
import torch
from rank_helpers import attach, pool

from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.key_store import KeyStore, split_by_block
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import KeyPiece, StagedTokens
from sglang_ext.mem_cache.selection.scoring_keys import KeySpec, QuantizedKeys

CPU = torch.device("cpu")
# Two to one block, the second of which counts; the last ends with the last block.
PIECES = KeyPiece(2, 0, 64, 0), KeyPiece(3, 5, 9, 1), KeyPiece(2, 0, 64, 2), KeyPiece(31, 60, 4, 3)


def keys_of(bits, rows):
    """An arena in which the pieces lie, and what takes them out of it."""
    told = attach(bits=bits, rows=rows, fresh=8 * rows)
    arena = ExchangeBuffer(told.shape, CPU, "cpu")
    arena.put_keys([StagedTokens(0, 64, 0), StagedTokens(1, 9, 64), StagedTokens(2, 64, 73), StagedTokens(3, 4, 137)], pool(0, 200), torch.arange(141))
    store = KeyStore(told, CPU)
    return arena, store, MappedExchangeBuffer(told.shape, CPU, b"", arena.begin(1))


@pytest.mark.parametrize("rows", [False, True], ids=["positions", "rows"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_many_blocks_at_once_are_what_they_are_one_by_one(bits, rows):
    arena, store, memory = keys_of(bits, rows)
    slots, keys = store.blocks * 64, arena.keys[0, 0]
    sizes = KeySpec(arena.shape.layers, *keys.shape[1:], keys.dtype, bits)
    other, scored = QuantizedKeys(sizes, slots) if bits < 16 else None, sizes.empty(slots, CPU)
    exact = torch.zeros(2, arena.shape.layers, slots, *keys.shape[1:])
    store.pull(memory, [StagedTokens(piece.place, piece.tokens, store.first_slot(piece)) for piece in PIECES])
    for piece in PIECES:
        first, tokens = store.first_slot(piece), piece.tokens
        scored[:, first : first + tokens] = arena.keys[piece.place, :, :tokens]
        if other is not None:
            other.write(torch.arange(first, first + tokens), arena.keys[piece.place, :, :tokens])
        if rows:
            exact[:, :, first : first + tokens] = torch.stack([part[piece.place, :, :tokens] for part in (arena.keys, arena.values)])
    for piece in PIECES:
        tokens = torch.arange(piece.tokens) + store.first_slot(piece)
        for layer in range(arena.shape.layers):
            expected = scored[layer, tokens] if other is None else other.read(layer, tokens)
            assert torch.equal(store.buffers.scoring_keys(layer, tokens), expected)
            if rows:
                assert torch.equal(store.sent.keys[layer][tokens], exact[0, layer, tokens])
                assert torch.equal(store.sent.values[layer][tokens], exact[1, layer, tokens])


def test_what_goes_to_one_block_is_taken_in_the_order_in_which_it_was_sent_and_all_else_at_once():
    pulls = [StagedTokens(*each) for each in ((0, 64, 0), (1, 10, 64), (2, 5, 74), (3, 64, 128), (4, 64, 0), (5, 1, 300))]
    assert [*split_by_block(pulls)] == [pulls[:2], pulls[2:]] and [*split_by_block([])] == []
    alike = [StagedTokens(place, 1, 7) for place in range(3)]
    assert [*split_by_block(alike)] == [[each] for each in alike]
    _, store, memory = keys_of(8, True)
    taken, pull = [], memory.pull
    memory.pull = lambda some, *given, **named: (taken.append([each.place for each in some]), pull(some, *given, **named))
    store.pull(memory, [StagedTokens(piece.place, piece.tokens, store.first_slot(piece)) for piece in PIECES])
    assert taken == [[0, 1], [0, 1], [2, 3], [2, 3]], "keys and values"
