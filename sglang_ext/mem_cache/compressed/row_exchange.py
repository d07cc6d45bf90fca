"""Which token's K and V each slot of a copy holds, by layer and KV head, where another process has the full KV: what goes, and what comes.

A copy of ``keep`` slots has in its slot i, for each layer and KV head, the row of one token that the head keeps. Attention asks for the set
alone, as keys are rotated already, so that what stays keeps its place, and what is new takes the places of what goes.
"""

from dataclasses import dataclass

import torch

# Of a place that holds nothing yet.
EMPTY = -1


@dataclass(frozen=True)
class RowExchange:
    """Rows that come in the place of others; int64 [rows] each, ascending by layer and head.

    Attributes:
        held: int64 [layers, kv_heads, places], positions of what each place holds afterwards.
        layers, heads, places: where they go.
        positions: of their tokens.
        wanted: their places among what was wanted of their head.
    """

    held: torch.Tensor
    layers: torch.Tensor
    heads: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor

    def of_layer(self, layer: int) -> slice:
        """Which of the rows are a layer's."""
        return slice(*torch.searchsorted(self.layers, torch.tensor([layer, layer + 1])).tolist())


@dataclass(frozen=True)
class ReceivedRows:
    """An exchange whose rows another process sent: ``keys`` and ``values`` are [rows, dim]."""

    exchange: RowExchange
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class NewestRows:
    """The newest tokens of a context, as many for each head, that come in the place of others.

    Attributes:
        places: int64 [layers, kv_heads, count], where they go.
        first: position of the first of them, which the others follow.
    """

    places: torch.Tensor
    first: int


def exchange(held: torch.Tensor, wanted: torch.Tensor, available: torch.Tensor | None = None) -> RowExchange:
    """Let places hold what is wanted: what is held already stays where it is.

    What is neither held nor available leaves its place to what is there: an exchange never says that a place holds what it does not.

    Args:
        held: int64 [layers, kv_heads, places], positions, each once; :data:`EMPTY` where there is nothing.
        wanted: int64 [layers, kv_heads, places], positions, each once.
        available: bool, like ``wanted``: whose rows there are; None for all.
    """
    coming, going = missing_mask(wanted, held), missing_mask(held, wanted)
    if available is not None:
        coming &= available
    # Of as many as come, the first places that are free.
    going &= going.cumsum(-1) <= coming.sum(-1, keepdim=True)
    layers, heads, index = coming.nonzero(as_tuple=True)
    places, positions = going.nonzero(as_tuple=True)[2], wanted[layers, heads, index]
    after = held.clone()
    after[layers, heads, places] = positions
    return RowExchange(after, layers, heads, places, positions, index)


def missing_mask(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """Which of a head's positions are not among others of it: bool, like ``these``; empty places are.

    Args:
        these, those: int64 [layers, kv_heads, count], positions or :data:`EMPTY`.
    """
    most = 2 + max(int(each.max()) if each.numel() else EMPTY for each in (these, those))
    there = torch.zeros(*these.shape[:-1], most, dtype=torch.bool)
    there.scatter_(-1, those - EMPTY, True)
    there[..., 0] = False
    return ~there.gather(-1, these - EMPTY)


def top_mask(these: torch.Tensor, scores: torch.Tensor, most: int | torch.Tensor) -> torch.Tensor:
    """Of a head's tokens, bool [..., count], as many as ``most`` of the highest ``scores``, which are like them and above -1; of equal ones
    those that come first. ``most`` for all heads, or int64 [..., 1]."""
    rank = torch.where(these, scores, -1).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return these & (rank < most)


def renewed(held: torch.Tensor, before: int, covered: int, keep: int, recent: int) -> tuple[torch.Tensor, NewestRows]:
    """Let a copy that stood for ``before`` tokens stand for ``covered``, without a look at what it holds: as many of the newest as a choice
    has in any case take the places of those that were the newest, and those that are added to it.

    Args:
        held: int32 [layers, kv_heads, count], positions below ``before``, each once.
        keep: places of the copy from now on, no fewer.
        recent: tokens that a choice has in any case.

    Returns:
        As ``held`` afterwards, [layers, kv_heads, keep], and what comes.
    """
    count = held.shape[-1]
    new = max(keep - count, min(covered - before, recent, keep))
    leaving = held.argsort(dim=-1)[..., keep - new :]
    added = torch.arange(count, keep, device=held.device).expand(*held.shape[:-1], -1)
    places = torch.cat([leaving, added], dim=-1)
    newest = torch.arange(covered - new, covered, device=held.device, dtype=held.dtype).expand(places.shape)
    return pad_places(held, keep).scatter(-1, places, newest), NewestRows(places, covered - new)


def pad_places(held: torch.Tensor, places: int) -> torch.Tensor:
    """So many places, of which those after what is held, [layers, kv_heads, fewer or as many], are empty."""
    return torch.nn.functional.pad(held, (0, places - held.shape[-1]), value=EMPTY)


def merge_exchanges(parts: list[RowExchange]) -> RowExchange:
    """Those of packs of layers, one after another, as one of all layers."""
    first, layers = 0, []
    for part in parts:
        layers.append(part.layers + first)
        first += len(part.held)
    rest = (torch.cat([getattr(part, name) for part in parts]) for name in ("heads", "places", "positions", "wanted"))
    return RowExchange(torch.cat([part.held for part in parts]), torch.cat(layers), *rest)
