"""Checks of what a copy lacks of what is marked for it, against scores of PyTorch: records that hold anything, and answers without room."""

from unittest.mock import patch

import torch
from backend_steps import on
from choose_checks import Asked
from marked_helpers import written

from sglang_ext.layers.kernels import row_exchange


def expected(chosen, scores, held, fresh):
    """Of a KV head, places and positions of moves: of what was ``chosen`` what is not ``held``, no more than ``fresh`` of the highest scores,
    and no more than places are free; what is held again in another block of places is free, too."""
    wanted, known, free, block = set(chosen.tolist()), set(held.tolist()), [], row_exchange.LOOKED_AT
    for place, token in enumerate(held.tolist()):
        if token not in wanted or token in held[: place // block * block].tolist():
            free.append(place)
    coming = [token for token in chosen.tolist() if token not in known]
    best = sorted(coming, key=lambda token: (-float(scores[token]), token))[: min(fresh, len(free))]
    return [*zip(free, sorted(best))]


def records(asked, chosen, most, noise):
    """Of each request positions that copies hold in all layers: half of what is chosen, and what they should not hold: nothing, the same
    again, negative ones, and what lies behind the context, where marks of other heads are."""
    layers, heads = len(asked.buffers.keys), asked.buffers.keys[0].shape[1]
    found = torch.full((len(asked.lengths), layers * heads * most), -7, dtype=torch.int32)
    row = -(-max(asked.lengths) // 128) * 128
    for request, (length, count) in enumerate(zip(asked.lengths, asked.counts)):
        held = chosen[:, request, :, :count].clone()
        for kept in held.view(-1, count):
            other = torch.randint(0, length, (count,), generator=noise).int()
            odd = torch.tensor([-1, -2, -33, length, length + 1, *(row + chosen[0, request, 0, : max(1, count // 4)])]).int()
            other[: len(odd)] = odd[:count]
            kept[::2] = other[torch.randperm(count, generator=noise)][: len(kept[::2])]
            kept[1:4] = kept[1] if count > 4 else kept[1:4]
            kept.copy_(kept[torch.randperm(count, generator=noise)])
        found[request, : held.numel()] = held.flatten()
    return found


def check_exchanged(device):
    """Of contexts of several chunks and of one, heads that keep many tokens and few, all requests or some; with room for all that comes, for
    some, and for none."""
    for lengths, counts, always, part in (
        ((1300, 300), (200, 60), (4, 32), (slice(0, 2), slice(0, 2))),
        ((97, 1, 130), (40, 1, 40), (0, 0), (slice(1, 2), slice(1, 3))),
    ):
        rooms = (max(counts), 2048, 1024), (5, 8, 2), (5, 2048, 1024), (1, 8, 2), (0, 2048, 1024)
        # The interpreter is slow: of long contexts it checks two.
        for fresh, looked_at, words in rooms[:2] if device == "cpu" and max(lengths) > 1000 else rooms:
            with patch.multiple(row_exchange, LOOKED_AT=looked_at, WORDS=words):
                exchanged(device, Asked(2, 2, 3, 16, torch.float32, lengths, counts, always), part, fresh)


def exchanged(device, asked, part, fresh):
    """What comes of some requests in some layers is what PyTorch's scores say."""
    from sglang_ext.layers.kernels.select_tokens import mark_tokens

    # Of a second chunk some query heads have much, and others little.
    for row, length in zip(asked.rows.tolist(), asked.lengths):
        for keys in asked.buffers.keys:
            keys[asked.table[row, 1024:length].long()] *= 6
    there, meant, most = on(device, asked.buffers), asked.queries[part[1], part[0]].to(device), max(asked.counts)
    shared, contexts = (meant, there.key_table, there.keys[0], there.scaling_table), asked.contexts(device, False)
    chosen = torch.zeros(2, len(asked.lengths), 2, most, dtype=torch.int32)
    marked = mark_tokens(*shared, contexts, *part)
    chosen[part] = written(marked, most).cpu()
    held = records(asked, chosen, most, torch.Generator().manual_seed(fresh))
    counts, moves, slots = (each.cpu() for each in row_exchange.exchange(marked, held.to(device), most, fresh))
    for layer in range(2)[part[0]]:
        for request in range(len(asked.lengths))[part[1]]:
            scores, keep = asked.scores(request, layer), asked.counts[request]
            for head in range(2):
                mine, at = chosen[layer, request, head, :keep], (layer - part[0].start, request - part[1].start, head)
                record = held[request, : 4 * keep].view(2, 2, keep)[layer, head]
                count = int(counts[at])
                found = [tuple(move) for move in moves[at][:count].tolist()]
                about = fresh, layer, request, head
                assert found == expected(mine, scores[head], record, fresh), about
                row = asked.table[asked.rows[request]]
                assert slots[at][:count].tolist() == [int(row[token]) for _, token in found], about
