"""What is attended to: random keys and values of a batch, of one layer, as they are and in blocks."""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.rounding import token_seeds
from sglang_ext.mem_cache.compressors.catalogue import quantizer


@dataclass(frozen=True)
class Shape:
    """Of one layer's attention.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        dim: channels of a head.
        device: where it runs.
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
        """Of queries, keys and values: bfloat16 on a GPU, float32 on a CPU."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """Keys or values whose channels differ in size, [count, kv_heads, dim]."""
        drawn = torch.Generator(self.device).manual_seed(seed)
        spread = 1 + 3 * torch.rand(self.dim, generator=drawn, device=self.device)
        made = torch.empty(count, self.kv_heads, self.dim, dtype=self.dtype, device=self.device)
        for part in made.split(1 << 16):
            part.copy_(torch.randn(part.shape, generator=drawn, device=self.device) * spread)
        return made

    def queries(self, count: int) -> torch.Tensor:
        """[count, heads, dim]."""
        drawn = torch.Generator(self.device).manual_seed(3)
        return torch.randn(count, self.heads, self.dim, generator=drawn, device=self.device).to(self.dtype)

    def token_bytes(self, number_bytes: int) -> int:
        """Bytes of a token's key and value."""
        return 2 * self.kv_heads * self.dim * number_bytes


@dataclass(frozen=True)
class Full:
    """A batch's KV as it is, each token in a slot of its own, which lie anywhere.

    Attributes:
        keys, values: [slots, kv_heads, dim].
        slots: int64 [batch, context].
        queries: [batch, heads, dim], of the newest tokens.
    """

    shape: Shape
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, batch: int, context: int) -> "Full":
        """Random."""
        pools = (shape.tokens(batch * context, seed) for seed in (1, 2))
        drawn = torch.Generator(shape.device).manual_seed(4)
        slots = torch.randperm(batch * context, generator=drawn, device=shape.device).view(batch, context)
        return cls(shape, *pools, slots, shape.queries(batch))

    def first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first request, float64 [kv_heads, tokens, dim]."""
        return tuple(pool[self.slots[0]].transpose(0, 1).double() for pool in (self.keys, self.values))


@dataclass(frozen=True)
class Copies:
    """The same batch's KV in blocks, but for its sinks and the tokens that fill no block.

    Attributes:
        full: what was packed.
        packing: how.
        keys, values: a pool of their own, [slots, kv_heads, dim].
        table: int32 [batch, slots]: blocks, sinks, newest tokens.
        packed: slots of blocks of each request.
    """

    full: Full
    packing: Packing
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    packed: int

    @classmethod
    def of(cls, full: Full, method: str, bits: int, partition: int | None) -> "Copies":
        """Of a method of the catalogue; codes that are drawn, as a server's are."""
        shape, (batch, context) = full.shape, full.slots.shape
        probe = KVBuffers((0,), (shape.scaling,), (full.keys[:1],), (full.values[:1],))
        packing = Packing.for_pool(quantizer(method, bits, partition), probe, 1)
        tokens = (context - packing.sinks - 1) // packing.block_tokens * packing.block_tokens
        sinks, packed, tail = packing.sinks, packing.packed_slots(tokens), context - packing.sinks - tokens
        drawn = torch.Generator(shape.device).manual_seed(5)
        table = torch.randperm(batch * (packed + sinks + tail), generator=drawn, device=shape.device).view(batch, -1)
        pools = tuple(torch.zeros(table.numel(), *full.keys.shape[1:], dtype=shape.dtype, device=shape.device) for _ in "kv")
        kept = torch.arange(sinks, sinks + tokens, device=shape.device).expand(1, shape.kv_heads, -1)
        seeds = token_seeds(range(context), context, shape.device) if packing.stochastic else None
        for slots, row in zip(full.slots, table):
            exact = torch.cat([slots[:sinks], slots[sinks + tokens :]])
            # A pool for sources and targets, as kernels read and write one.
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
        """Of blocks, and of exact tokens, of all requests."""
        layouts, (batch, width) = (self.packing.keys, self.packing.values), self.table.shape
        block = sum(layout.tokens * layout.token_bytes + layout.parameter_bytes for layout in layouts) * self.full.shape.kv_heads
        exact = (width - self.packed) * self.full.shape.token_bytes(self.keys.element_size())
        return batch * (self.packed // self.packing.block_slots * block + exact)

    def first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What those of the first request mean, float64 [kv_heads, tokens, dim]."""
        row, means = self.table[0].long(), []
        for pool, layout in ((self.keys, self.packing.keys), (self.values, self.packing.values)):
            far = self.packing.dequantize(self.packing.read(pool, layout, row[: self.packed]), layout, None).double()
            means.append(torch.cat([far, pool[row[self.packed :]].transpose(0, 1).double()], 1))
        return tuple(means)


def exactly(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of the last queries, [count, heads, dim], over [kv_heads, tokens, dim]: float64 [count, heads, dim]."""
    (count, heads, dim), (kv_heads, tokens) = queries.shape, keys.shape[:2]
    rows = queries.double().view(count, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("qhgd,htd->hgqt", rows, keys) * scaling
    newest = torch.arange(tokens - count, tokens, device=keys.device)
    logits.masked_fill_(torch.arange(tokens, device=keys.device) > newest[:, None], float("-inf"))
    return torch.einsum("hgqt,htd->qhgd", logits.softmax(-1), values).flatten(1, 2)


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference, in shares of the greatest number that is expected."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
