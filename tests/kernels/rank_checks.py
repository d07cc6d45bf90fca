"""Checks of a cache rank that kernels ask, against one that PyTorch asks, both in this process; on a GPU or through Triton's interpreter."""

import os
from contextlib import contextmanager

import msgspec
import torch
from exchange_checks import check_exchanged
from hand_over_checks import (
    Pair,
    RowPair,
    check_answers,
    check_awaited_words,
    check_keys_and_questions,
    check_rows,
    check_waiting,
    later,
    without_assembly,
)
from rank_socket import RankSocket, serve

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank import selection_runner
from sglang_ext.managers.cache_rank.exchange_buffer import QueryUpload
from sglang_ext.managers.cache_rank.selection_server import SelectionServer
from sglang_ext.managers.cache_rank.protocol import BLOCK, Attach, RotaryParameters

# Or graphs would take as many answers as all of this asks for.
selection_runner.RECORDED_AFTER = 3


def rank_of(pair, plain, predictor, bits, apart=False, blocks=8):
    """A cache rank in this process, of one arena or the other, that was told what it serves; and its socket."""
    told, socket = msgspec.structs.replace(attach(pair.shape, predictor, bits), apart=apart, blocks=blocks), RankSocket()
    descriptor = os.dup(pair.descriptor) if plain else None
    rank = SelectionServer(socket, descriptor, 3, torch.device("cpu") if plain else pair.device)
    socket.tell(told)
    with pair.mapped_here():
        serve(rank)
    return rank, socket


def attach(shape, predictor, bits):
    """What ranks of this shape are told."""
    turning = RotaryParameters(tuple((1 / 10 ** torch.arange(shape.dim // 2)).tolist()), False)
    return Attach(protocol.VERSION, 3, shape, 8, (0.1,) * shape.layers, predictor, 4, 8, turning, bits)


def hand_over_contexts(pair, ranks, lengths):
    """Both ranks take the keys of as many tokens of each lane, with values where these travel."""
    for lane, length in lengths.items():
        for first in range(0, length, BLOCK):
            tokens, place = min(BLOCK, length - first), first // BLOCK
            slots = pair.table[lane, first : first + tokens].long()
            put = [protocol.StagedTokens(place, tokens, 0)]
            number = pair.arena.put_keys(put, pair.there, slots.to(pair.device))
            pair.plain.put_keys(put, pair.buffers, slots)
            for _, socket in ranks:
                socket.tell(protocol.Lease(lane, place, (2 * lane + place,)))
                socket.tell(protocol.Append((protocol.KeyPiece(2 * lane + place, 0, tokens, place),), number))
        pair.publish()
        for rank, socket in ranks:
            serve(rank)
            assert isinstance(socket.messages[-1], protocol.PlacesFreed), socket.messages


def check_rank(device):
    """A rank that is asked by kernels chooses what one chooses that PyTorch asks: several requests at once, the newest of each alone, with
    windows of one and of two, and more than a block of keys, as they are and in few bits."""
    kinds = ("current", 24, 16), ("regressed", 16, 16), ("current", 24, 4), ("current", 64, 8)
    # Without a GPU 8 bits are checked below.
    for predictor, dim, bits in kinds if device == "cuda" else kinds[:3]:
        pair = Pair(device, torch.float32, dim=dim)
        ranks = [rank_of(pair, plain, predictor, bits) for plain in (False, True)]
        lengths, keeps = {0: 100, 1: 40}, {0: 30, 1: 20}
        hand_over_contexts(pair, ranks, lengths)
        for number in (1, 2):
            pair.publish(([3 + number], 0, number), ([5, 1 + number], 1, number))
            for _, socket in ranks:
                for lane, positions in ((0, (99,)), (1, (38, 39))):
                    ask = (lane, 0, pair.shape.layers, number, lengths[lane], keeps[lane], positions)
                    socket.tell(protocol.SelectionRequest(*ask, ahead=2, number=pair.arena.number))
        for rank, socket in ranks:
            serve(rank)
            answers = [(each.lane, each.sequence, each.chosen) for each in socket.messages if isinstance(each, protocol.SelectionReply)]
            assert sorted(answers) == [(0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True)], answers
        found, wanted = pair.arena.chosen.cpu(), pair.plain.chosen
        assert torch.equal(pair.arena.heads.cpu(), pair.plain.heads)
        for lane, keep in keeps.items():
            one, other = (part[lane, 0, : 4 * keep].view(4, keep) for part in (found, wanted))
            shared = (one[:, :, None] == other[:, None, :]).any(-1).float().mean()
            # Queries are rounded where integers are multiplied.
            assert shared == 1 if device == "cpu" and bits == 16 else shared > 0.97, (predictor, bits, lane, shared)


def recorded(rank, device):
    """What launches again what a rank launched before: graphs, on a GPU, or it could not record."""
    found = [known.replay for known in rank._answering._known.values() if known.replay]
    assert device == "cpu" or all(isinstance(getattr(each, "__self__", None), torch.cuda.CUDAGraph) for each in found)
    return found


@contextmanager
def put_meanwhile(rank, put, device):
    """Questions are put while the rank waits for them; in the interpreter, where nothing runs beside it, just before."""
    memory = rank._memory
    waits = memory.await_words

    def await_words(asked, there, least, seconds):
        if least:
            later(put) if device == "cuda" else put()
        return waits(asked, there, least, seconds)

    memory.await_words = await_words
    try:
        yield
    finally:
        del memory.await_words


def check_rank_ahead(device):
    """What a rank answers that has launched all before questions are put is what one answers that is asked then; nothing is lost where one has
    no place, where nothing is put in time, and where not all of them were told; also once what it launches was recorded."""
    pair = Pair(device, torch.float32)
    (ahead, socket), (plain, other) = ranks = [rank_of(pair, False, "current", 16, apart=True), rank_of(pair, True, "current", 16)]
    lengths, keeps, choices = {0: 100, 1: 40}, {0: 30, 1: 20}, []
    hand_over_contexts(pair, ranks, {0: 120, 1: 60})
    runner = ahead._answering
    prepare = runner.prepare
    runner.prepare = lambda asks, *given, **more: choices.append(len(asks)) or prepare(asks, *given, **more)

    def tell(*questions, together=2):
        number = pair.arena.number + 2
        for lane, sequence in questions:
            ask = lane, 0, pair.shape.layers, sequence, lengths[lane], keeps[lane], (99,)
            for _, asked in ranks:
                asked.tell(protocol.SelectionRequest(*ask, ahead=2, number=number, together=together))

    def put(*questions):
        pair.publish(*(([(3 + sequence) % 9], lane, sequence) for lane, sequence in questions))

    def answered(socket, since):
        return sorted((each.lane, each.sequence, each.chosen) for each in socket.messages[since:] if isinstance(each, protocol.SelectionReply))

    def answer(*questions, meanwhile=True, together=2):
        since, there = (len(each.messages) for each in (socket, other))
        tell(*questions, together=together)
        with put_meanwhile(ahead, (lambda: put(*questions)) if meanwhile else lambda: None, device):
            serve(ahead)
        if not meanwhile:
            assert not answered(socket, since)
            put(*questions)
            serve(ahead)
        serve(plain)
        found = answered(socket, since)
        assert found == answered(other, there) and torch.equal(pair.arena.heads.cpu(), pair.plain.heads)
        for lane, sequence, hit in found:
            if hit:
                one, two = (part[lane, sequence % 2, : 4 * keeps[lane]].view(4, -1) for part in (pair.arena.chosen.cpu(), pair.plain.chosen))
                assert (one[:, :, None] == two[:, None, :]).any(-1).float().mean() > 0.97
        return found

    assert answer((0, 1), (1, 1)) == [(0, 1, True), (1, 1, True)] and choices == [2]
    # The place of the first is not free: the other is answered all the same.
    assert answer((0, 4), (1, 2)) == [(0, 4, False), (1, 2, True)] and choices == [2, 2]
    assert answer((0, 5), (1, 3), meanwhile=False) == [(0, 5, True), (1, 3, True)] and choices == [2, 2, 2, 2]
    # One more was put with them, of which nothing was told yet: nothing is launched ahead.
    assert answer((0, 6), (1, 4), meanwhile=False, together=3) == [(0, 6, True), (1, 4, True)] and choices == [2, 2, 2, 2, 2]
    assert answer((0, 7), (1, 5)) == [(0, 7, True), (1, 5, True)]
    graphs = recorded(ahead, device)
    assert len(graphs) == 1
    # It serves other lengths, lanes and words, too.
    lengths.update({0: 120, 1: 60})
    keeps.update({0: 17, 1: 30})
    assert answer((1, 6), (0, 8)) == [(0, 8, True), (1, 6, True)]
    assert answer((0, 11), (1, 7)) == [(0, 11, False), (1, 7, True)]
    assert answer((1, 8), (0, 12)) == [(0, 12, True), (1, 8, True)]
    assert graphs == recorded(ahead, device)
    # And questions that are there before it looks.
    replays = []
    for known in runner._known.values():
        if known.replay:
            known.replay = lambda replay=known.replay: replays.append(1) or replay()
    assert answer((0, 13), (1, 9), meanwhile=False) == [(0, 13, True), (1, 9, True)] and len(replays) == 2


def check_row_rank(device, bits):
    """A rank with full KV that kernels ask sends the rows that one sends that PyTorch asks, whole ones where it scores by few bits."""
    # Of so many layers that memory of a part is taken again, and so often that it is recorded. The interpreter is slow: it does so once,
    # with one KV head.
    layers, heads = (4, 2) if device == "cuda" else (4, 1) if bits == 16 else (2, 2)
    pair = RowPair(device, torch.float32, layers=layers, heads=heads, keeps=(30, 20), fresh=6)
    ranks = [rank_of(pair, plain, "current", bits, apart=not plain) for plain in (False, True)]
    hand_over_contexts(pair, ranks, {0: 100, 1: 40})
    for number in range(1, 6):
        asked = [QueryUpload([number + lane], lane, pair.arena.word(number)) for lane in range(2)]

        def put(asked=asked):
            for arena, queries, kind in ((pair.arena, pair.queries.to(pair.device), 2), (pair.plain, pair.queries, 1)):
                arena.reserve_number()
                arena.publish(queries, [each._replace(record=pair.copies[each.lane][kind]) for each in asked])

        for _, socket in ranks:
            for lane, covered in ((0, 100), (1, 40)):
                ask = lane, 0, layers, number, covered, pair.keeps[lane], (99,)
                socket.tell(protocol.SelectionRequest(*ask, number=pair.arena.number + 1, together=2))
        with put_meanwhile(ranks[0][0], put, device):
            for rank, socket in ranks:
                serve(rank)
                assert all(each.chosen for each in socket.messages[-2:]), socket.messages
        pair.take_rows(number)
        pair.true_records()
        if device == "cpu" and bits == 16:
            pair.same()
        # Else scores that are all but equal may be in another order.
        shared = [(plain[..., :, None] == there.cpu()[..., None, :]).any(-1).float().mean() for _, plain, there in pair.copies]
        assert min(shared) > 0.9, (number, shared)
    assert int(pair.plain.counters[4]) > 20 and len(recorded(ranks[0][0], device)) == 1


def check_hand_over(device):
    """All of them."""
    if device == "cpu":
        without_assembly()
    for check in (check_keys_and_questions, check_answers, check_waiting, check_awaited_words, check_rank, check_rank_ahead, check_rows):
        check(device)
    check_exchanged(device)
    for bits in (16, 8) if device == "cpu" else (16, 8, 4):
        check_row_rank(device, bits)
