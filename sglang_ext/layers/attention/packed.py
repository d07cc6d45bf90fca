"""Attention over rows that begin with packed blocks: in PyTorch, and on a GPU the backend of draft steps (decode_backend.py).

In PyTorch, blocks are dequantized, except blocks with sums: they are multiplied as integers, with queries and weights in 8 bits
(layers/kernels/packed/integer_attention.py). If numbers were rotated before they were quantized, the queries are rotated, too, and sums of
rotated values are rotated back.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_ext.layers.attention.decode_backend import CompressedDecode
from sglang_ext.layers.kernels.packed.integer_attention import Partitioned, product, quantize_partitions
from sglang_ext.layers.kernels.packed.packed_decode import choose_splits, max_resident_programs, packed_decode
from sglang_ext.mem_cache.compressed.layouts.block_layout import Quantized
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, QuantizedLayout

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def packed_attention(
    packing: Packing,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    packed: int,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of a request's newest tokens over its row: one softmax over packed and exact tokens.

    Returns float32 [count, heads, value_dim]. ``queries``: [count, heads, dim], of the last ``count`` tokens, which are exact. ``keys``,
    ``values``: a layer's buffers, [slots, kv_heads, dim]. ``slots``: int64, ``packed`` slots with blocks, then a slot for each exact token.
    """
    count, heads, dim = queries.shape
    kv_heads, exact = keys.shape[1], slots[packed:]
    rows = group_by_kv_head(queries, kv_heads, scaling)
    of_keys = packing.read(keys, packing.keys, slots[:packed])
    (to_keys, to_values), (key_levels, value_levels) = packing.rotations(slots.device), packing.levels(slots.device)
    packed_scores = _packed_scores(packing, _rotated(rows, to_keys), of_keys, key_levels)

    def packed_sums(weights: torch.Tensor) -> torch.Tensor:
        of_values = packing.read(values, packing.values, slots[:packed])
        summed = _packed_sums(packing, weights, of_values, value_levels)
        return _rotated(summed, None if to_values is None else to_values.t())

    return ungroup_heads(attend_packed_and_exact(rows, packed_scores, packed_sums, keys[exact], values[exact], count), count)


def group_by_kv_head(queries: torch.Tensor, kv_heads: int, scaling: float) -> torch.Tensor:
    """Queries, [count, heads, dim], as float32 [kv_heads, count * heads of each, dim], times ``scaling``."""
    return (queries.float() * scaling).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def ungroup_heads(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of :func:`group_by_kv_head`: from [kv_heads, rows, dim] to [count, heads, dim]."""
    return rows.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2)


def attend_packed_and_exact(
    rows: torch.Tensor,
    packed_scores: torch.Tensor,
    packed_sums: Callable[[torch.Tensor], torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Causal attention of the newest tokens, float32 [kv_heads, rows, value_dim]: one softmax over packed tokens and the exact ones after them.

    ``rows``: grouped queries of the last ``count`` exact tokens (:func:`group_by_kv_head`). ``packed_scores``: float32 [kv_heads, rows, packed
    tokens], products with packed keys. ``packed_sums`` takes weights of that shape and returns sums of packed values, float32 [kv_heads, rows,
    value_dim]. ``keys``, ``values``: of the exact tokens, [tokens, kv_heads, dim].
    """
    exact_scores = rows @ keys.float().permute(1, 2, 0)
    newest = torch.arange(count, device=keys.device).repeat_interleave(rows.shape[1] // count) + len(keys) - count
    exact_scores = exact_scores.masked_fill(torch.arange(len(keys), device=keys.device) > newest[:, None], float("-inf"))
    packed_scores, exact_scores = torch.cat([packed_scores, exact_scores], -1).softmax(-1).split([packed_scores.shape[-1], len(keys)], -1)
    return packed_sums(packed_scores) + exact_scores @ values.float().transpose(0, 1)


def _packed_scores(packing: Packing, rows: torch.Tensor, block: Quantized, levels: torch.Tensor | None) -> torch.Tensor:
    """Products of ``rows``, float32 [heads, rows, dim], with packed keys: [heads, rows, tokens]."""
    if packing.keys.sums:
        partition = packing.keys.grid.channels
        return product(quantize_partitions(rows, partition), partitions_of_keys(block), partition)
    return rows @ packing.dequantize(block, packing.keys, levels).mT


def _packed_sums(packing: Packing, weights: torch.Tensor, block: Quantized, levels: torch.Tensor | None) -> torch.Tensor:
    """Sums of packed values with ``weights``, float32 [heads, rows, tokens]: [heads, rows, dim]."""
    if packing.values.sums:
        partition = packing.values.grid.tokens
        return product(quantize_partitions(weights, partition), partitions_of_values(block), partition)
    return weights @ packing.dequantize(block, packing.values, levels)


def partitions_of_keys(block: Quantized) -> Partitioned:
    """Keys in partitions of channels, as rows of their tokens: [heads, tokens, dim]."""
    parts = (part.flatten(1, 2) for part in (block.scale, block.zero, block.sums.float()))
    return Partitioned(block.codes.flatten(1, 2).to(torch.int8), *parts)


def partitions_of_values(block: Quantized) -> Partitioned:
    """Values in partitions of tokens, as rows of their channels: [heads, dim, tokens]."""
    parts = (part.flatten(1, 2).mT for part in (block.scale, block.zero, block.sums.float()))
    return Partitioned(block.codes.flatten(1, 2).mT.to(torch.int8), *parts)


def _rotated(rows: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    return rows if rotation is None else rows @ rotation


class PackedDecode(CompressedDecode):
    """Attends to packed blocks, whose slots are counted in a table of the layout, and to the tokens after them."""

    compressed_kv_name = "packed KV"
    remedy = "use a --kv-compressor that only drops tokens, such as snapkv"
    # Measured on an H200: the kernels' programs have one warp.
    min_parts = 4096

    layout: QuantizedLayout

    def __init__(self, model_runner: "ModelRunner", layout: QuantizedLayout):
        super().__init__(model_runner, layout)
        self._room = max_resident_programs(layout.layout, self.token_to_kv_pool.get_key_buffer(0), self.query_heads // self.kv_heads)

    def splits(self, requests: int) -> tuple[int, int]:
        """Parts of each request's blocks and exact tokens."""
        if self._room is None:
            return super().splits(requests)
        return choose_splits(requests * self.kv_heads, self._room, self.layout.layout.keys.bits)

    def attend(
        self, layer_id: int, queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scaling: float, splits: tuple[int, int]
    ) -> torch.Tensor:
        pool, packed, table = self.token_to_kv_pool, self.layout, self.req_to_token_pool.req_to_token
        buffers = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        return packed_decode(packed.layout, queries, *buffers, table, rows, lengths, packed.counts, scaling, splits)
