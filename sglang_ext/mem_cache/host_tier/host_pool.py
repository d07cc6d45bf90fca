"""Host memory for full KV, pinned if a GPU copies to and from it."""

import logging
import mmap
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier import host_memory
from sglang_ext.mem_cache.host_tier.checksums import as_words
from sglang_ext.mem_cache.host_tier.host_pages import HostPages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostPool:
    """Pages of host memory, in one of two orders.

    - Layer-first: a run of pages of one layer is one block of memory.

    - Page-first, for pages that may be stored as residuals (residuals.py): each page has a frame.

    Attributes:
        kv: [2, layers, pages, page_size, kv_heads, head_dim]: keys, then values. Page-first: [pages, 2, layers, page_size, ...].
        checksums: int64 [pages], of the last stored KV. Valid when its transfer is done.
        pages: The allocator of the pages.
        sizes: int64 [pages], bytes of the last stored residual, 0 for a whole page. Valid when the transfer is done. None if layer-first.
    """

    kv: torch.Tensor
    checksums: torch.Tensor
    pages: HostPages
    sizes: torch.Tensor | None = None

    @classmethod
    def create(cls, buffers: KVBuffers, page_size: int, size: int, frames: bool = False) -> "HostPool":
        """Create a pool with as many pages as fit in ``size`` bytes.

        Args:
            buffers: The layers of the device's pool, all of one shape and dtype.
            page_size: Tokens per page.
            size: Bytes of host memory.
            frames: Whether the order is page-first.

        Raises:
            OptionError: No page fits, or the host has too little memory.
            ValueError: The layers' buffers differ, or are not contiguous.
        """
        check_alike(buffers)
        count = size // (buffers.bytes_per_slot * page_size)
        if count < 1:
            raise OptionError(
                f"--kv-host-gb gives {size / 1e9:.3f} GB of host memory; one page of {page_size} tokens takes "
                f"{buffers.bytes_per_slot * page_size / 1e9:.3f} GB: pass at least that, or better enough for many requests"
            )
        used = count * page_size * buffers.bytes_per_slot
        # Checked again, because weights were loaded since. Other ranks may have their memory already.
        host_memory.check(used)
        key = buffers.keys[0]
        memory = _pinned(used) if key.is_cuda else torch.empty(used, dtype=torch.uint8)
        kinds = 2, len(buffers.keys)
        shape = *((count, *kinds) if frames else (*kinds, count)), page_size, *key.shape[1:]
        checksums, sizes = (torch.zeros(count, dtype=torch.int64, pin_memory=key.is_cuda) for _ in range(2))
        pool = cls(memory.view(key.dtype).view(shape), checksums, HostPages(count), sizes if frames else None)
        if key.is_cuda:
            # Not at exit: the memory is released with the process.
            weakref.finalize(pool, _unpin, memory).atexit = False
        return pool

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.shape[3]

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: keys and values of all layers."""
        return self.kv.numel() * self.kv.element_size() // self.pages.count

    @cached_property
    def words(self) -> torch.Tensor:
        """:attr:`kv` as integers, keys of all layers before values: [2 * layers, pages * page_size, words]. Layer-first pools only."""
        return as_words(self.kv.flatten(0, 3), 8).unflatten(0, (2 * self.kv.shape[1], -1))

    @cached_property
    def frames(self) -> torch.Tensor:
        """:attr:`kv` by page: uint8 [pages, page_bytes]. Page-first pools only."""
        return self.kv.view(len(self.kv), -1).view(torch.uint8)

    @torch.inference_mode()
    def flip(self, page: int) -> None:
        """Flip a bit of the KV stored last to a page, for tests. Call it after the store is done."""
        if self.sizes is None:
            self.words[0, page * self.page_size, :1].bitwise_xor_(1)
        else:
            # Not at the beginning of a residual (bit offsets that some readers ignore), nor between blocks (unused bits).
            place = (int(self.sizes[page]) or self.page_bytes) * 37 // 100
            self.frames[page, place : place + 1].bitwise_xor_(1)


def check_alike(buffers: KVBuffers) -> None:
    """Raise unless all layers have one layout, as the pool and the kernels require.

    Raises:
        ValueError: Names the layout that differs.
    """
    key = buffers.keys[0]
    for buffer in (*buffers.keys, *buffers.values):
        if buffer.shape != key.shape or buffer.dtype != key.dtype or not buffer.is_contiguous():
            raise ValueError(
                f"a KV buffer is {buffer.dtype} {list(buffer.shape)} with strides {buffer.stride()}, the first is "
                f"{key.dtype} {list(key.shape)}; full KV in host memory needs contiguous buffers of one shape and dtype"
            )


def _pinned(size: int) -> torch.Tensor:
    """Allocate ``size`` bytes of pinned memory.

    PyTorch's own pinned memory has sizes of powers of two, which could double it. The memory is excluded from forks, which would move its
    pages away from the device. Large pages, written by all cores, reduce the allocation time to a tenth.
    """
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # kernels without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8).zero_()
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.data_ptr(), size, 0)
    if int(status) != 0:
        raise OptionError(
            f"--kv-host-gb: pinning {size / 1e9:.1f} GB of host memory failed ({cudart.cudaGetErrorString(status)}): pass "
            "less, or raise the limit of locked memory (ulimit -l)"
        )
    return memory


def _unpin(memory: torch.Tensor) -> None:
    """Unpin memory after all copies have ended."""
    torch.cuda.synchronize()
    status = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    if int(status) != 0:
        logger.warning("unpinning %d bytes of host memory failed: CUDA error %d", memory.numel(), int(status))
