"""Attention backend of steps over pointers into full KV on a GPU (copy_decode.py, slot_pointers.py)."""

import torch

from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.kernels.pointer_decode import pointer_decode
from sglang_ext.mem_cache.compressed.formats.slot_pointers import PointerRows


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
