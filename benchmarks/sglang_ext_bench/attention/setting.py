"""The KV of a benchmark: random keys and values of one layer for a batch of requests, as full KV and in quantized blocks."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressors.catalogue import quantizer


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one layer's attention.

    Attributes:
        heads: Query heads.
        kv_heads: KV heads.
        dim: Channels of a head.
        device: Device of all tensors.
    """

    heads: int
    kv_heads: int
    dim: int
    device: torch.device

    @property
    def scaling(self) -> float:
        """Factor on query-key products."""
        return self.dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of queries, keys and values: bfloat16 on a GPU, float32 on a CPU."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """Random keys or values, [count, kv_heads, dim]. Their channels differ in scale."""
        generator = torch.Generator(self.device).manual_seed(seed)
        scale = 1 + 3 * torch.rand(self.dim, generator=generator, device=self.device)
        tokens = torch.empty(count, self.kv_heads, self.dim, dtype=self.dtype, device=self.device)
        for part in tokens.split(1 << 16):
            part.copy_(torch.randn(part.shape, generator=generator, device=self.device) * scale)
        return tokens

    def queries(self, count: int) -> torch.Tensor:
        """Random queries, [count, heads, dim]."""
        generator = torch.Generator(self.device).manual_seed(3)
        return torch.randn(count, self.heads, self.dim, generator=generator, device=self.device).to(self.dtype)

    def token_bytes(self, number_bytes: int) -> int:
        """Bytes of the key and value of one token, with ``number_bytes`` bytes for each number."""
        return 2 * self.kv_heads * self.dim * number_bytes


@dataclass(frozen=True)
class FullKV:
    """The full KV of a batch, in random slots of a pool.

    Attributes:
        shape: Shape of the layer.
        keys: Keys of the pool, [slots, kv_heads, dim].
        values: Values of the pool, [slots, kv_heads, dim].
        slots: Slots of each request's tokens, int64 [batch, context].
        queries: Queries of each request's newest token, [batch, heads, dim].
    """

    shape: AttentionShape
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def of(cls, shape: AttentionShape, batch: int, context: int) -> "FullKV":
        """Create random KV of ``batch`` requests with ``context`` tokens each."""
        pools = (shape.tokens(batch * context, seed) for seed in (1, 2))
        generator = torch.Generator(shape.device).manual_seed(4)
        slots = torch.randperm(batch * context, generator=generator, device=shape.device).view(batch, context)
        return cls(shape, *pools, slots, shape.queries(batch))

    def first_request(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first request, float64 [kv_heads, tokens, dim]."""
        return tuple(pool[self.slots[0]].transpose(0, 1).double() for pool in (self.keys, self.values))


@dataclass(frozen=True)
class QuantizedKV:
    """The KV of a batch in quantized blocks. The first tokens (sinks), and the newest tokens that fill no block, stay exact.

    Attributes:
        full: The full KV.
        packing: Layout and quantizer of the blocks.
        keys: Keys of a pool of their own, [slots, kv_heads, dim].
        values: Values of this pool, [slots, kv_heads, dim].
        table: Slots of each request, int32 [batch, slots]: blocks, sinks, newest tokens.
        packed: Slots of each request's blocks.
    """

    full: FullKV
    packing: Packing
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    packed: int

    @classmethod
    def from_full(cls, full: FullKV, method: str, bits: int, partition: int | None) -> "QuantizedKV":
        """Quantize the KV of a batch as a server does, with its stochastic rounding.

        Args:
            full: The full KV.
            method: Name of the method in the catalogue.
            bits: Bits of a code.
            partition: Channels with a common scale, for methods with partitions.
        """
        shape, (batch, context) = full.shape, full.slots.shape
        probe = KVBuffers((0,), (shape.scaling,), (full.keys[:1],), (full.values[:1],))
        packing = Packing.for_pool(quantizer(method, bits, partition), probe, 1)
        tokens = (context - packing.sinks - 1) // packing.block_tokens * packing.block_tokens
        sinks, packed, tail = packing.sinks, packing.packed_slots(tokens), context - packing.sinks - tokens
        generator = torch.Generator(shape.device).manual_seed(5)
        table = torch.randperm(batch * (packed + sinks + tail), generator=generator, device=shape.device).view(batch, -1)
        pools = tuple(torch.zeros(table.numel(), *full.keys.shape[1:], dtype=shape.dtype, device=shape.device) for _ in "kv")
        kept = torch.arange(sinks, sinks + tokens, device=shape.device).expand(1, shape.kv_heads, -1)
        seeds = token_seeds(range(context), context, shape.device) if packing.stochastic else None
        for slots, row in zip(full.slots, table):
            exact = torch.cat([slots[:sinks], slots[sinks + tokens :]])
            # One pool has the sources and the targets, because kernels read and write the same pool.
            both = KVBuffers((0,), (shape.scaling,), *((torch.cat([pool[slots], own.new_zeros(packed, *own.shape[1:])]),)
                             for pool, own in zip((full.keys, full.values), pools)))  # fmt: skip
            places = torch.arange(context, context + packed, device=shape.device)
            if tokens:
                packing.write(both, kept, torch.arange(context, device=shape.device), places, seeds)
            for pool, (written,), own in zip((full.keys, full.values), (both.keys, both.values), pools):
                own[row[:packed]] = written[context:]
                own[row[packed:]] = pool[exact]
        return cls(full, packing, *pools, table.int(), packed)

    @property
    def read_bytes(self) -> int:
        """Bytes of the blocks and the exact tokens of all requests."""
        layouts, (batch, width) = (self.packing.keys, self.packing.values), self.table.shape
        block = sum(layout.tokens * layout.token_bytes + layout.parameter_bytes for layout in layouts) * self.full.shape.kv_heads
        exact = (width - self.packed) * self.full.shape.token_bytes(self.keys.element_size())
        return batch * (self.packed // self.packing.block_slots * block + exact)

    def first_request(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantized keys and values of the first request, float64 [kv_heads, tokens, dim]."""
        row, result = self.table[0].long(), []
        for pool, layout in ((self.keys, self.packing.keys), (self.values, self.packing.values)):
            blocks = self.packing.dequantize(self.packing.read(pool, layout, row[: self.packed]), layout, None).double()
            result.append(torch.cat([blocks, pool[row[self.packed :]].transpose(0, 1).double()], 1))
        return tuple(result)


def exactly(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute causal attention of the newest tokens in float64.

    Args:
        queries: Queries of the newest tokens, [count, heads, dim].
        keys: Keys of all tokens, [kv_heads, tokens, dim].
        values: Values of all tokens, [kv_heads, tokens, dim].
        scaling: Factor on query-key products.

    Returns:
        Outputs, float64 [count, heads, dim].
    """
    (count, heads, dim), (kv_heads, tokens) = queries.shape, keys.shape[:2]
    rows = queries.double().view(count, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("qhgd,htd->hgqt", rows, keys) * scaling
    newest = torch.arange(tokens - count, tokens, device=keys.device)
    logits.masked_fill_(torch.arange(tokens, device=keys.device) > newest[:, None], float("-inf"))
    return torch.einsum("hgqt,htd->qhgd", logits.softmax(-1), values).flatten(1, 2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
