"""Which rows compressed KV replaces when another process has the full KV. A row is a token's K and V in one layer and KV head.

Compressed KV of ``keep`` slots stores in slot i, for each layer and KV head, the row of one token that the head keeps. Attention does not
depend on their order, since keys are already rotated. Rows that stay therefore keep their place, and new rows replace leaving ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class RowExchange(NamedTuple):
    """Rows that replace others: where they are stored, their tokens' positions, and their indices in the wanted positions of their head.

    Each tensor is int64 [rows], ascending by layer and head.
    """

    layers: torch.Tensor
    heads: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True)
class NewestRows:
    """A context's newest tokens, from position ``first`` on, that replace the rows in ``places``, int64 [layers, kv_heads, count]."""

    places: torch.Tensor
    first: int


def plan_exchange(held: torch.Tensor, wanted: torch.Tensor, available: torch.Tensor) -> RowExchange:
    """Plan which rows of compressed KV to replace so that it holds the wanted rows. Rows that it already holds keep their slots.

    ``held`` and ``wanted`` are distinct positions, int64 [layers, kv_heads, places]. If a wanted row is neither held nor ``available``, bool
    like ``wanted``, its place keeps the previous row.
    """
    missing, unwanted = missing_mask(wanted, held) & available, missing_mask(held, wanted)
    # Replace only as many rows as arrive, in the first places that are free.
    unwanted &= unwanted.cumsum(-1) <= missing.sum(-1, keepdim=True)
    layers, heads, index = missing.nonzero(as_tuple=True)
    return RowExchange(layers, heads, unwanted.nonzero(as_tuple=True)[2], wanted[layers, heads, index], index)


def missing_mask(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """Mask of a head's positions in ``these`` that are not in ``those``, int64 [layers, kv_heads, count] each: bool, like ``these``."""
    tokens = 1 + max(int(these.max()), int(those.max()))
    return ~torch.zeros(*these.shape[:-1], tokens, dtype=torch.bool).scatter_(-1, those, True).gather(-1, these)


def top_mask(these: torch.Tensor, scores: torch.Tensor, most: int | torch.Tensor) -> torch.Tensor:
    """Mask of the ``most`` highest ``scores`` among each head's tokens ``these``, bool [..., count]. Ties go to the first.

    ``scores`` has the shape of ``these`` and is above -1. ``most`` is one number for all heads, or int64 [..., 1].
    """
    rank = torch.where(these, scores, -1).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return these & (rank < most)


def plan_refresh(held: torch.Tensor, before: int, covered: int, keep: int, recent: int) -> tuple[torch.Tensor, NewestRows]:
    """Plan a refresh from ``before`` to ``covered`` tokens from the record alone.

    The newest ``recent`` tokens, which every selection contains, replace the previous newest ones and fill added slots. ``held``, int32
    [layers, kv_heads, count], are distinct positions below ``before``; ``keep`` is no smaller than ``count``.

    Returns:
        ``held`` afterwards, [layers, kv_heads, keep], and the rows to copy.
    """
    count = held.shape[-1]
    new = max(keep - count, min(covered - before, recent, keep))
    leaving = held.argsort(dim=-1)[..., keep - new :]
    added = torch.arange(count, keep, device=held.device).expand(*held.shape[:-1], -1)
    places = torch.cat([leaving, added], dim=-1)
    newest = torch.arange(covered - new, covered, device=held.device, dtype=held.dtype).expand(places.shape)
    grown = torch.nn.functional.pad(held, (0, keep - count))
    return grown.scatter(-1, places, newest), NewestRows(places, covered - new)
