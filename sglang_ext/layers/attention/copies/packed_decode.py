"""Attention backend of steps over packed copies on a GPU (copy_decode.py): rows may begin with packed blocks."""

from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.kernels.gluon import waves
from sglang_ext.layers.kernels.packed.packed_decode import packed_decode, warps_at_once
from sglang_ext.mem_cache.compressed.formats.packing import PackedRows

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class PackedDecode(CopyDecode):
    """Attends to packed blocks, as its format says which slots hold some, and to the tokens after them."""

    copies = "packed copies"
    remedy = "use a --kv-compressor that only drops tokens, such as snapkv"
    # Found on an H200: the kernels' programs are of one warp.
    busy = 4096

    form: PackedRows

    def __init__(self, model_runner: "ModelRunner", form: PackedRows):
        super().__init__(model_runner, form)
        buffers = self.token_to_kv_pool.get_key_buffer(0), self.token_to_kv_pool.get_value_buffer(0)
        self._room = warps_at_once(form.form, *buffers, self.query_heads // self.kv_heads)

    def splits(self, requests: int) -> tuple[int, int]:
        """Parts of each request's blocks and exact tokens."""
        return super().splits(requests) if self._room is None else waves.cut(requests * self.kv_heads, self._room)

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
        pool, packed, table = self.token_to_kv_pool, self.form, self.req_to_token_pool.req_to_token
        buffers = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        return packed_decode(packed.form, queries, *buffers, table, rows, lengths, packed.counts, scaling, splits)
