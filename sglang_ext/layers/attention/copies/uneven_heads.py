"""Attention over rows that begin with a copy whose heads keep different numbers of tokens (head_cells.py): in PyTorch, and on a GPU the
backend of steps (copy_decode.py).
"""

from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.copies.copy_and_tail import attend
from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.kernels.uneven_decode import uneven_decode
from sglang_ext.mem_cache.compressed.formats.head_cells import HeadCells

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def uneven_attention(
    cells: HeadCells,
    row: int,
    copied: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of a request's newest tokens over its row: what each head keeps, and all tokens after the copy.

    Args:
        cells: what copies hold.
        row: of the token table.
        copied: slots of the copy, at the beginning of the row.
        queries: [count, heads, head_dim], of the last ``count`` tokens, which come after the copy.
        keys, values: a layer's buffers, [slots, kv_heads, head_dim].
        slots: int64, the row.
        scaling: factor on query-key products; None for ``head_dim ** -0.5``.

    Returns:
        [count, heads, head_dim], in the dtype of ``queries``.
    """
    bounds, copy, tail = cells.of_layer(row, keys), slots[:copied], slots[copied:]
    places, kept = _places(bounds, slots.device)
    # On a CPU several times as fast as indexing with brackets.
    far = (
        cells.read(kind, copy, bounds[0], bounds[-1]).index_select(0, places.flatten()).unflatten(0, places.shape)
        for kind in (cells.buffers.keys, cells.buffers.values)
    )
    near = (buffer.index_select(0, tail) for buffer in (keys, values))
    return attend(queries, tuple(far), kept, tuple(near), scaling)


def _places(bounds: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cells of each of a layer's heads lie among all of the layer's, padded to the longest head.

    Returns:
        int64 [kv_heads, longest], and bool [kv_heads, longest]: which are the head's own.
    """
    firsts, ends = (torch.tensor(part, device=device)[:, None] - bounds[0] for part in (bounds[:-1], bounds[1:]))
    places = firsts + torch.arange(int((ends - firsts).max()), device=device)
    return places.clamp(max=bounds[-1] - bounds[0] - 1), places < ends


class UnevenDecode(CopyDecode):
    """Attends to the cells of each head, as its format says which are whose, and to the tokens after the copy."""

    copies = "copies of --kv-head-budgets adaptive"
    remedy = "pass --kv-head-budgets equal"
    # Found on an H200: the heads that keep most are cut so small that the others need not wait for them.
    busy = 4096

    form: HeadCells

    def __init__(self, model_runner: "ModelRunner", form: HeadCells):
        super().__init__(model_runner, form)
        self.layers = {layer_id: index for index, layer_id in enumerate(form.buffers.layer_ids)}

    def attend(
        self,
        layer_id: int,
        queries: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        scaling: float,
        splits: tuple[int, int],
    ) -> torch.Tensor:
        """As :meth:`CopyDecode.attend`."""
        table = self.req_to_token_pool.req_to_token
        return uneven_decode(self.form, self.layers[layer_id], queries, table, rows, lengths, scaling, splits)
