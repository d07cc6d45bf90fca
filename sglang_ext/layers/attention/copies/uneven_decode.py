"""Attention backend of steps over copies of uneven heads on a GPU (copy_decode.py): rows may begin with cells (head_cells.py)."""

from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.copies.copy_decode import CopyDecode
from sglang_ext.layers.kernels.uneven_decode import uneven_decode
from sglang_ext.mem_cache.compressed.formats.head_cells import HeadCells

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


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
