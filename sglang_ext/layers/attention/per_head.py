"""Attention over rows that begin with compressed KV in which each head keeps its own tokens: in PyTorch, and on a GPU as backends of
draft steps (decode_backend.py). Ragged heads (ragged_heads.py) have a different number of cells for each head. Pointers (pointers.py) lead
to tokens of the full KV, which attention may select itself. Rows of K and V from cache ranks have the same number for each head.
"""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.layers.attention.decode_backend import EXACT_PARTS, CompressedDecode, split_counts
from sglang_ext.layers.kernels.per_head_decode import pointer_decode, ragged_decode
from sglang_ext.layers.kernels.quest_pages import point_at_best_pages
from sglang_ext.mem_cache.compressed.layouts.base import ExchangedRowLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def attend_kept_and_tail(
    queries: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    own: torch.Tensor,
    tail: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Attention of a request's newest tokens over the tokens that each head keeps of a context, and over all tokens after it.

    It is causal in the tail: the last query belongs to the last token. Returns [count, heads, head_dim], in the dtype of ``queries``, which
    are of the last ``count`` tokens. ``kept``: keys and values, [kv_heads, longest, head_dim]; ``own``: bool [kv_heads, longest], which of them a
    head keeps. ``tail``: keys and values, [tokens, kv_heads, head_dim]. ``scaling``: None for ``head_dim ** -0.5``.
    """
    (count, heads), (kv_heads, length) = queries.shape[:2], (len(own), len(tail[0]))
    joined = (torch.cat([far, near.transpose(0, 1)], dim=1)[None].to(queries.dtype) for far, near in zip(kept, tail))
    newest = torch.arange(length - count, length, device=queries.device)
    before = torch.arange(length, device=queries.device) <= newest[:, None]
    seen = torch.cat([own[:, None].expand(-1, count, -1), before.expand(kv_heads, -1, -1)], dim=-1)
    result = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        *joined,
        attn_mask=seen.repeat_interleave(heads // kv_heads, dim=0)[None],
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return result[0].transpose(0, 1)


def ragged_attention(
    cells: RaggedHeadLayout,
    row: int,
    num_compressed_slots: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of a request's newest tokens over its row: the tokens that each head keeps, and all tokens after them.

    Returns [count, heads, head_dim], in the dtype of ``queries``, which are of the last ``count`` tokens, after the compressed KV.
    ``num_compressed_slots``: slots of the compressed KV, at the beginning of the row of the token table. ``keys``, ``values``: a layer's buffers,
    [slots, kv_heads, head_dim]. ``slots``: int64, slots of the row. ``scaling``: None for ``head_dim ** -0.5``.
    """
    bounds, copy, tail = cells.layer_bounds(row, keys), slots[:num_compressed_slots], slots[num_compressed_slots:]
    places, kept = _places(bounds, slots.device)
    # On a CPU, index_select is several times as fast as indexing with brackets.
    far = (
        cells.read(kind, copy, bounds[0], bounds[-1]).index_select(0, places.flatten()).unflatten(0, places.shape)
        for kind in (cells.buffers.keys, cells.buffers.values)
    )
    near = (buffer.index_select(0, tail) for buffer in (keys, values))
    return attend_kept_and_tail(queries, tuple(far), kept, tuple(near), scaling)


def _places(bounds: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of each head's cells among a layer's cells, padded to the longest head, and which are its own: int64, bool [kv_heads, longest]."""
    firsts, ends = (torch.tensor(part, device=device)[:, None] - bounds[0] for part in (bounds[:-1], bounds[1:]))
    places = firsts + torch.arange(int((ends - firsts).max()), device=device)
    return places.clamp(max=bounds[-1] - bounds[0] - 1), places < ends


class RaggedHeadsDecode(CompressedDecode):
    """Attends to the cells of each head, which a table of the layout delimits, and to the tokens after the compressed KV."""

    compressed_kv_name = "compressed KV of --kv-head-budgets adaptive"
    remedy = "pass --kv-head-budgets equal"
    # Measured on an H200: the heads that keep most tokens are split so finely that the other heads do not wait for them.
    min_parts = 4096

    layout: RaggedHeadLayout

    def __init__(self, model_runner: "ModelRunner", layout: RaggedHeadLayout):
        super().__init__(model_runner, layout)
        self.layers = {layer_id: index for index, layer_id in enumerate(layout.buffers.layer_ids)}

    def attend(
        self, layer_id: int, queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scaling: float, splits: tuple[int, int]
    ) -> torch.Tensor:
        table = self.req_to_token_pool.req_to_token
        return ragged_decode(self.layout, self.layers[layer_id], queries, table, rows, lengths, scaling, splits)


def pointer_attention(
    rows: PointerLayout,
    row: int,
    pointed: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of a request's newest tokens over its row: the tokens that each head's pointers point to, and all later tokens.

    Arguments as for :func:`ragged_attention`. ``rows``: how pointers are stored in slots; ``pointed``: number of pointers of each head.
    """
    pointers = rows.layout
    held, kv_heads = pointers.packed_slots(pointed), keys.shape[1]
    kept = pointers.read(keys, slots, pointed)
    # The index of a cell of a head, over all slots: on a CPU one index is several times as fast as two.
    cells = (kept * kv_heads + torch.arange(kv_heads, device=kept.device)[:, None]).flatten()
    far = (part.flatten(0, 1).index_select(0, cells).unflatten(0, kept.shape) for part in (keys, values))
    near = (part.index_select(0, slots[held:]) for part in (keys, values))
    return attend_kept_and_tail(queries, tuple(far), torch.ones_like(kept, dtype=torch.bool), tuple(near), scaling)


def pointer_split_counts(rows: int, min_parts: int = CompressedDecode.min_parts) -> tuple[int, int]:
    """Like :func:`~sglang_ext.layers.attention.decode_backend.split_counts`. For few rows, more parts read pointers.

    Measured with 2,048 pointers per head and 36 tokens after them: the time of 7 and 1 parts, over that of 4 and 4. On an H100 the ratio
    is .89 for 64 rows and 1.10 for 128 rows; on an H200 it is .79 and .97.
    """
    parts = sum(split_counts(rows, min_parts))
    exact = min(EXACT_PARTS, parts // 8) if rows * parts <= min_parts else EXACT_PARTS
    return parts - exact, exact


class PointerDecode(CompressedDecode):
    """Attends to the tokens of the full KV that each head's pointers point to, and to the tokens after them."""

    compressed_kv_name = "compressed KV of --kv-compressor verify-guided or spade"
    remedy = "pass --kv-compressor snapkv"
    # As in pointer_decode, if the kernel before it selects the tokens.
    finished_parts: torch.Tensor | None = None

    layout: PointerLayout

    def splits(self, requests: int) -> tuple[int, int]:
        return pointer_split_counts(requests * self.kv_heads, self.min_parts)

    def attend(
        self, layer_id: int, queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scaling: float, splits: tuple[int, int]
    ) -> torch.Tensor:
        keys, values = self.token_to_kv_pool.get_key_buffer(layer_id), self.token_to_kv_pool.get_value_buffer(layer_id)
        table = self.req_to_token_pool.req_to_token
        return pointer_decode(self.layout, queries, keys, values, table, rows, lengths, scaling, splits, self.finished_parts)


class PagesDecode(PointerDecode):
    """Points each head to the pages with the highest bounds on its query's products, then attends as over any pointers."""

    compressed_kv_name = "compressed KV of --kv-compressor quest"

    layout: PagePointerLayout

    def __init__(self, model_runner: "ModelRunner", layout: PagePointerLayout):
        super().__init__(model_runner, layout)
        self.layers = {layer_id: index for index, layer_id in enumerate(layout.extremes.layer_ids)}
        self.finished_parts = layout.finished_parts

    def attend(
        self, layer_id: int, queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scaling: float, splits: tuple[int, int]
    ) -> torch.Tensor:
        layer, cells = self.layers[layer_id], as_pointers(self.token_to_kv_pool.get_key_buffer(layer_id))
        # Make them contiguous once for both kernels. Attention begins while pages of the last heads are selected, so keep ``bounds`` until
        # attention is launched.
        queries = queries.contiguous()
        bounds = point_at_best_pages(self.layout, layer, queries, cells, self.req_to_token_pool.req_to_token, rows, lengths)
        result = super().attend(layer_id, queries, rows, lengths, scaling, splits)
        del bounds
        return result


class SentRowsDecode(PointerDecode):
    """Attends to rows that begin with K and V of compressed KV, as to any tokens: the kernel treats them as rows without
    pointers."""

    compressed_kv_name = "compressed KV of --kv-compressor spade with rows from cache ranks"
    remedy = "pass --kv-cache-ranks 0"

    def __init__(self, model_runner: "ModelRunner", layout: ExchangedRowLayout):
        super().__init__(model_runner, layout)
        pool, table = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
        self.layout = PointerLayout.for_table(Pointers(as_pointers(pool.get_key_buffer(0)).shape[-1], 1), table)

    def splits(self, requests: int) -> tuple[int, int]:
        """As :meth:`CompressedDecode.splits`, but all parts except one read plain tokens."""
        return 1, sum(super().splits(requests)) - 1
