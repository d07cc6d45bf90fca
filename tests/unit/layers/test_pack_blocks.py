"""On a GPU a kernel packs blocks, and PyTorch what it does not take; kernel_checks.py compares the bytes."""

from dataclasses import dataclass

import pytest
import torch
from packed_helpers import Gridded, on_gpu, record_launches

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels.packed.packed_decode import check_readable, packed_decode
from sglang_ext.mem_cache.compressed.layouts.block_layout import Grid, as_bytes
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.compressors.integer_quantizers import Kivi


@dataclass(frozen=True)
class Coarse(Kivi):
    """Finds codes in a way of its own."""

    def quantize(self, numbers, grid):
        return super().quantize(numbers.round(), grid)


class OnGpu(KVBuffers):
    """Buffers where kernels run."""

    on_gpu = True


def made(packs, dim=64, dtype=torch.float32):
    """A pool of one layer, full of noise, and its packing."""
    keys, values = (torch.randn(300, 1, dim, generator=torch.Generator().manual_seed(dim)).to(dtype) for _ in "kv")
    buffers = OnGpu((0,), (1.0,), (keys,), (values,))
    return buffers, Packing.for_pool(packs, buffers, 1, Rotary(torch.ones(8)))


def written(packs, monkeypatch, **pool):
    """Kernels that ran, and whether PyTorch wrote, where buffers lie on a GPU."""
    buffers, packing = made(packs, **pool)
    before, launched = as_bytes(buffers.keys[0]).clone(), record_launches(monkeypatch)
    given = torch.arange(128)[None, None], torch.arange(128), 128 + torch.arange(packing.held_slots(128))
    packing.write(buffers, *given)
    assert all(arguments[2:5] == given for _, arguments in launched)
    return [name for name, _ in launched], not torch.equal(as_bytes(buffers.keys[0]), before)


# Keys and values.
BOTH = ["pack_tiles"] * 2


@pytest.mark.parametrize(("name", "bits"), [("kivi", 2), ("int8", 8), ("rotatekv", 4), ("turboquant", 2), ("lynx", 4)])
def test_where_buffers_lie_on_a_gpu_the_kernel_packs(name, bits, monkeypatch):
    assert written(quantizer(name, bits), monkeypatch) == (BOTH, False)
    assert written(quantizer(name, bits), monkeypatch, dim=128, dtype=torch.bfloat16) == (BOTH, False)


@pytest.mark.parametrize(
    ("packs", "pool"),
    [
        (Coarse(4), {}),
        (quantizer("kvquant", 4), {}),
        (Kivi(4, block=128), {}),
        (quantizer("int4", 4), {"dim": 32}),
        (quantizer("int8", 8), {"dtype": torch.float64}),
    ],
    ids=["codes of its own", "outliers", "long blocks", "small heads", "other numbers"],
)
def test_pytorch_packs_what_the_kernel_does_not_take(packs, pool, monkeypatch):
    assert written(packs, monkeypatch, **pool) == ([], True)


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        (Grid(1, 32), Grid(1, 64), "keys of gridded share scales over 1 tokens and 32 channels"),
        (Grid(48, 1), Grid(1, 64), "keys of gridded share scales over 48 tokens and 1 channels"),
        (Grid(32, 1), Grid(32, 2), "values of gridded share scales over 32 tokens and 2 channels"),
    ],
)
def test_grids_that_no_kernel_reads_are_refused(keys, values, words):
    buffers, packing = made(Gridded(4, block=192, keys=keys, values=values))
    with pytest.raises(OptionError, match=f"{words}, which no kernel reads; .* use such grids, or pass --device cpu"):
        check_readable(packing, buffers.keys[0])


def test_blocks_with_outliers_are_read_by_no_kernel():
    buffers, packing = made(quantizer("kvquant", 4))
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OptionError, match="blocks of kvquant .* no kernel reads: pass --kv-compressor kivi, or --device cpu"):
        packed_decode(packing, torch.zeros(1, 1, 64), buffers.keys[0], buffers.values[0], nothing[None], *[nothing] * 3, 0.1)


@pytest.mark.parametrize(("capability", "refused"), [(None, False), ((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_products_of_integers_are_refused_on_gpus_that_they_do_not_compile_for(monkeypatch, capability, refused):
    for name in ("hack", "kivi"):
        buffers, packing = made(quantizer(name, 4))
        keys = on_gpu(buffers.keys[0], monkeypatch, capability)
        if refused and name == "hack":
            words = "blocks of hack .* a GPU of compute capability 8.0 or more; .* has 7.5: pass --kv-compressor kivi"
            with pytest.raises(OptionError, match=words):
                check_readable(packing, keys)
        else:
            check_readable(packing, keys)
