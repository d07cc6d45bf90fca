"""Packed copies in a small pool, and what they mean, computed without the code under test."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from triton.runtime.jit import JITFunction

from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.compressors.quantizer import Quantizer

# Every quantizer with every number of bits that it allows.
KINDS = [(name, bits) for name in catalogue.packing() for bits in catalogue.QUANTIZERS[name].bits]
# Those that have kernels.
KERNEL_KINDS = [(name, bits) for name, bits in KINDS if name in catalogue.on_gpu()]


def on_gpu(tensor, monkeypatch, capability):
    """What code that asks a tensor for its device and shape sees of it on an NVIDIA GPU with a compute capability; None for the tensor itself."""
    if capability is None:
        return tensor
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return SimpleNamespace(
        is_cuda=True, device=tensor.device, dtype=tensor.dtype, shape=tensor.shape, stride=tensor.stride, element_size=tensor.element_size
    )


def record_launches(monkeypatch):
    """The kernels that are launched from now on, which do nothing: their names and positional arguments."""
    launched = []

    def run(self, *given, grid, warmup, **options):
        launched.append((self.__name__, given))

    monkeypatch.setattr(JITFunction, "run", run)
    return launched


def divides(name, dim):
    """Whether heads of ``dim`` channels are whole partitions, of some size, of a method of the catalogue."""
    sizes = catalogue.QUANTIZERS[name].partitions
    return not sizes or any(dim % size == 0 for size in sizes)


def for_heads(name, bits, dim):
    """A quantizer of the catalogue, with the default partitions where they divide heads of ``dim`` channels, else others that do."""
    sizes = (size for size in catalogue.QUANTIZERS[name].partitions if dim % size == 0)
    return quantizer(name, bits, next(sizes, None))


def frequencies(dim):
    """Of a rotary embedding that turns all channels but the last quarter: float32 [pairs]."""
    return 100.0 ** -torch.linspace(0, 1, dim * 3 // 8)


def turned(vectors, positions, angles):
    """NeoX rotary embedding in complex float64: ``vectors`` [..., tokens, dim] at ``positions`` [..., tokens], or [tokens]."""
    pairs = len(angles)
    units = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[..., None] * angles.double())
    units = torch.complex(vectors[..., :pairs].double(), vectors[..., pairs : 2 * pairs].double()) * units
    return torch.cat([units.real, units.imag, vectors[..., 2 * pairs :].double()], -1)


def meant(block, levels, rotation):
    """What blocks stand for, number by number: float64 [heads, tokens, dim]."""
    heads, blocks, tokens, dim = block.codes.shape
    numbers = block.codes.double() if levels is None else levels.double()[block.codes.long()]
    along = (tokens // block.scale.shape[2], dim // block.scale.shape[3])
    scale, zero = (
        part.double().repeat_interleave(along[0], 2).repeat_interleave(along[1], 3) for part in (block.scale, block.zero)
    )
    numbers = numbers * scale + zero
    if block.outliers is not None:
        head, number, _ = torch.meshgrid(*map(torch.arange, block.outliers.places.shape), indexing="ij")
        numbers[head, number, block.outliers.places // dim, block.outliers.places % dim] += block.outliers.excess.double()
    numbers = numbers.reshape(heads, -1, dim)
    return numbers if rotation is None else numbers @ rotation.double().t()


@dataclass(frozen=True)
class Gridded(Quantizer):
    """Integers that share scales over any grids."""

    keys: Grid = Grid(1, 64)
    values: Grid = Grid(1, 64)

    def key_grid(self, dim):
        return self.keys

    def value_grid(self, dim):
        return self.values


@dataclass
class PackedPool:
    """A pool with one layer and a request whose first tokens are packed.

    ``row``: its slots, ``packed`` of them with blocks; ``keys``, ``values``: what all of its tokens mean, float64
    [kv_heads, tokens, dim]; ``originals``: what those that are packed were, keys and values.
    """

    buffers: KVBuffers
    packing: Packing
    row: torch.Tensor
    packed: int
    keys: torch.Tensor
    values: torch.Tensor
    originals: list[torch.Tensor]


def packed_pool(name, bits, blocks, exact, heads=2, dim=64, dtype=torch.float32, seed=0):
    """``blocks`` packed blocks of a method of the catalogue, and ``exact`` tokens after them; partitions as heads allow."""
    return pool_by(for_heads(name, bits, dim), blocks, exact, heads, dim, dtype, seed)


def pool_by(packs, blocks, exact, heads=2, dim=64, dtype=torch.float32, seed=0):
    """``blocks`` blocks that the quantizer ``packs``, and ``exact`` tokens after them."""
    noise = torch.Generator().manual_seed(seed)
    tokens = blocks * packs.block
    # Channels and tokens of different sizes, as keys have.
    spread = 1 + 3 * torch.rand(dim, generator=noise)
    keys, values = ((torch.randn(2 * tokens + exact + 60, heads, dim, generator=noise) * spread).to(dtype) for _ in "kv")
    buffers = KVBuffers((0,), (0.1,), (keys,), (values,))
    packing = Packing.for_pool(packs, buffers, 1, Rotary(frequencies(dim)))
    order = torch.randperm(len(keys), generator=noise)
    sources, rest = order[:tokens], order[tokens:]
    packed = packing.packed_slots(tokens)
    row = rest[: packed + exact]
    originals = [buffer[sources].transpose(0, 1).double() for buffer in (keys, values)]
    kept = torch.arange(tokens).expand(1, heads, -1)
    packing.write(buffers, kept, sources, row[:packed])
    means, levels, rotations = [], packing.levels(row.device), packing.rotations(row.device)
    for kind, (buffer, layout) in enumerate(((keys, packing.keys), (values, packing.values))):
        block = packing.read(buffer, layout, row[:packed])
        far = meant(block, levels[kind], rotations[kind])
        far = far if block.positions is None else turned(far, torch.arange(tokens), frequencies(dim))
        means.append(torch.cat([far, buffer[row[packed:]].transpose(0, 1).double()], 1))
    return PackedPool(buffers, packing, row, packed, *means, originals)


def eight_bits(numbers, partition):
    """What numbers mean in 8 bits, rounded to the nearest, in partitions along their last dimension: float64."""
    if not numbers.shape[-1]:
        return numbers
    parts = [part - part.amin(-1, keepdim=True) for part in numbers.split(partition, -1)]
    steps = [part.amax(-1, keepdim=True).clamp(min=1e-30) / 255 for part in parts]
    return torch.cat([(p / s).round() * s + w.amin(-1, keepdim=True) for p, s, w in zip(parts, steps, numbers.split(partition, -1))], -1)


def attention_over(packing, tokens, *given):
    """:func:`attention` where blocks with sums hold the first ``tokens`` tokens: by queries and weights in 8 bits over them."""
    return attention(*given, (packing.keys.grid.channels, packing.values.grid.tokens, tokens) if packing.keys.sums else (1, 1, 0))


def attention(queries, keys, values, scaling, partitions=(1, 1, 0)):
    """float64 causal attention of the last queries, [count, heads, dim], over [kv_heads, tokens, dim].

    ``partitions``: of queries along channels and of weights along tokens, in 8 bits over so many of the first tokens.
    """
    count, heads, dim = queries.shape
    group = heads // len(keys)
    keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
    of_channels, of_tokens, far = partitions
    logits = torch.einsum("qhd,htd->hqt", queries.double(), keys) * scaling
    if far:
        coarse = eight_bits(queries.double() * scaling, of_channels)
        logits[..., :far] = torch.einsum("qhd,htd->hqt", coarse, keys[:, :far])
    newest = torch.arange(keys.shape[1] - count, keys.shape[1])
    logits.masked_fill_(torch.arange(keys.shape[1]) > newest[:, None], float("-inf"))
    weights = logits.softmax(-1)
    weights[..., :far] = eight_bits(weights[..., :far], of_tokens)
    return torch.einsum("hqt,htd->qhd", weights, values)
