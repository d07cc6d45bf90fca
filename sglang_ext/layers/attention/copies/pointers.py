"""Attention over rows that begin with pointers into full KV (slot_pointers.py): in PyTorch, and on a GPU the backend of steps
(copy_decode.py).
"""

import torch

from sglang_ext.layers.attention.copies.copy_and_tail import attend
from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.kernels.pointer_decode import pointer_decode
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows


def pointer_attention(
    rows: PointerRows,
    row: int,
    pointed: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of a request's newest tokens over its row: what each head's pointers lead to, and all tokens after them.

    Args:
        rows: which rows begin with pointers, and how these lie in slots.
        row: of the token table.
        pointed: tokens to which each head's lead.
        queries: [count, heads, head_dim], of the last ``count`` tokens, which come after those chosen from.
        keys, values: a layer's buffers, [slots, kv_heads, head_dim].
        slots: int64, the row.
        scaling: factor on query-key products; None for ``head_dim ** -0.5``.

    Returns:
        [count, heads, head_dim], in the dtype of ``queries``.
    """
    pointers = rows.form
    held, kv_heads = pointers.packed_slots(pointed), keys.shape[1]
    kept = pointers.read(keys, slots, pointed)
    # A cell of each head, counted over all slots: on a CPU one index is several times as fast as two.
    cells = (kept * kv_heads + torch.arange(kv_heads, device=kept.device)[:, None]).flatten()
    far = (part.flatten(0, 1).index_select(0, cells).unflatten(0, kept.shape) for part in (keys, values))
    near = (part.index_select(0, slots[held:]) for part in (keys, values))
    return attend(queries, tuple(far), torch.ones_like(kept, dtype=torch.bool), tuple(near), scaling)


class PointerDecode(CopyDecode):
    """Attends to the tokens of full KV to which each head's pointers lead, and to those after them."""

    copies = "copies of --kv-compressor verify-guided"
    remedy = "pass --kv-compressor snapkv"

    form: PointerRows

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
        keys, values = self.token_to_kv_pool.get_key_buffer(layer_id), self.token_to_kv_pool.get_value_buffer(layer_id)
        table = self.req_to_token_pool.req_to_token
        return pointer_decode(self.form, queries, keys, values, table, rows, lengths, scaling, splits)
