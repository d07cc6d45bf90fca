"""Host memory for full KV, pinned if a GPU copies to and from it, and the allocator of its pages."""

import logging
import mmap
import weakref
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier import host_memory

logger = logging.getLogger(__name__)

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def as_words(buffer: torch.Tensor, widest: int) -> torch.Tensor:
    """View rows of ``buffer``, [slots, kv_heads, head_dim], as integers of at most ``widest`` bytes that divide a row: [slots, words]."""
    row = buffer[0].numel() * buffer.element_size()
    size = next(size for size in _WORDS if size <= widest and row % size == 0)
    # A view from its own dtype may not exist at this width. A view from bytes always does.
    return buffer.flatten(1).view(torch.uint8).view(_WORDS[size])


@dataclass(frozen=True)
class HostPageRun:
    """``count`` consecutive pages from page ``first`` on, which has index ``place`` in a list of pages."""

    place: int
    first: int
    count: int


def runs(pages: torch.Tensor) -> tuple[HostPageRun, ...]:
    """Return the maximal runs of ``pages`` (int64 [pages], on the host), in the list's order."""
    if not len(pages):
        return ()
    breaks = (pages.diff() != 1).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), len(pages)]
    return tuple(HostPageRun(place, int(pages[place]), end - place) for place, end in pairwise(ends))


class HostPages:
    """Allocates ``count`` pages by number, in as few runs as possible. Lists of pages are int64 [pages], on the host."""

    def __init__(self, count: int) -> None:
        self.count = self.free_pages = count
        # Free runs, ascending. A search in `_owned` would read all pages at each allocation.
        self._free = [range(count)]
        # Not PyTorch tensors: those cannot be written if inference mode differs between creation and use.
        self._owned, self._filled = np.zeros(count, bool), np.zeros(count, bool)
        # Readers of each page, and pages that were freed while they had readers.
        self._readers, self._freed = np.zeros(count, np.int32), np.zeros(count, bool)

    def allocate(self, count: int) -> torch.Tensor | None:
        """Allocate ``count`` pages: int64 [count], on the host. None if fewer are free. Raises ValueError if ``count`` is below 1.

        The pages form one run if a free run is long enough. It takes the shortest such run, to keep long runs.
        """
        if count < 1:
            raise ValueError(f"{count} pages of host memory were requested; request at least 1")
        if count > self.free_pages:
            return None
        taken, missing = [], count
        while missing:
            long = [run for run in self._free if len(run) >= missing]
            best = min(long, key=len) if long else max(self._free, key=len)
            index, rest = self._index(best.start), best[missing:]
            self._free[index : index + 1] = [rest] if rest else []
            taken.append(best[:missing])
            missing -= len(taken[-1])
        pages = torch.cat([torch.arange(run.start, run.stop) for run in taken])
        self._owned[pages.numpy()] = True
        self._filled[pages.numpy()] = False
        self.free_pages -= count
        return pages

    def _index(self, page: int) -> int:
        """Index in the list of free runs of a run that starts at ``page``."""
        return bisect_left(self._free, page, key=lambda run: run.start)

    def free(self, pages: torch.Tensor) -> None:
        """Free ``pages``. Transfers in progress may use them. Raises ValueError, and frees none, if some are not owned, or are named twice."""
        self.check_owned(pages)
        ordered = pages.sort().values
        twice = ordered[1:][ordered.diff() == 0]
        if len(twice):
            raise ValueError(f"host pages {twice.tolist()[:8]} are freed twice in one call; name each page once")
        self._owned[pages.numpy()] = False
        is_read = self._readers[ordered.numpy()] > 0
        self._freed[ordered.numpy()[is_read]] = True
        self._return(ordered[torch.from_numpy(~is_read)])

    def hold(self, pages: torch.Tensor) -> None:
        """Keep the content of ``pages`` (int64 [pages], on the host, owned): if they are freed, they stay unavailable until :meth:`release`."""
        self.check_owned(pages)
        self._readers[pages.numpy()] += 1

    def release(self, pages: torch.Tensor) -> None:
        """Undo one :meth:`hold`."""
        index = pages.numpy()
        self._readers[index] -= 1
        late = index[self._freed[index] & (self._readers[index] == 0)]
        self._freed[late] = False
        self._return(torch.from_numpy(np.sort(late)))

    def _return(self, pages: torch.Tensor) -> None:
        """Add ``pages`` (int64, ascending) to the free ones."""
        self.free_pages += len(pages)
        for run in runs(pages):
            first, end = run.first, run.first + run.count
            start = stop = self._index(first)
            # Merge it with adjacent free runs.
            if start > 0 and self._free[start - 1].stop == first:
                start -= 1
                first = self._free[start].start
            if stop < len(self._free) and self._free[stop].start == end:
                end = self._free[stop].stop
                stop += 1
            self._free[start:stop] = [range(first, end)]

    def check_owned(self, pages: torch.Tensor) -> None:
        """Raise ValueError if some of ``pages`` do not exist or are free."""
        foreign = pages[(pages < 0) | (pages >= self.count)]
        if len(foreign):
            raise ValueError(f"host pages {foreign.tolist()[:8]} do not exist; there are pages 0 to {self.count - 1}")
        unowned = pages.numpy()[~self._owned[pages.numpy()]]
        if len(unowned):
            raise ValueError(f"host pages {unowned.tolist()[:8]} are free; allocate pages before using them, free them once")

    def fill(self, pages: torch.Tensor) -> None:
        """Record that owned ``pages`` are stored to."""
        self._filled[pages.numpy()] = True

    def check_filled(self, pages: torch.Tensor) -> None:
        """Raise ValueError if some of ``pages`` were not stored to since they were allocated."""
        empty = pages.numpy()[~self._filled[pages.numpy()]]
        if len(empty):
            raise ValueError(f"host pages {empty.tolist()[:8]} were not stored since they were allocated; store, then load them")


@dataclass(frozen=True)
class HostPool:
    """Pages of host memory, in one of two orders.

    Layer-first, a run of pages of one layer is one block of memory. Page-first, each page has a frame and may be stored as a residual
    (page_copies.py).

    Attributes:
        kv: [2, layers, pages, page_size, kv_heads, head_dim]: keys, then values. Page-first: [pages, 2, layers, page_size, ...].
        checksums: int64 [pages], of the last stored KV. Valid when its transfer is done.
        sizes: int64 [pages], bytes of the last stored residual, 0 for a whole page. Valid when the transfer is done. None if layer-first.
    """

    kv: torch.Tensor
    checksums: torch.Tensor
    pages: HostPages
    sizes: torch.Tensor | None = None

    @classmethod
    def create(cls, buffers: KVBuffers, page_size: int, size: int, frames: bool = False) -> "HostPool":
        """Create a pool for the device's ``buffers``, with as many pages of ``page_size`` tokens as fit in ``size`` bytes.

        It is page-first with ``frames``. Raises :class:`OptionError` if no page fits or the host has too little memory, ValueError if the
        layers' buffers differ or are not contiguous.
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
    """Raise ``ValueError`` unless all layers have one layout, as the pool and the kernels require."""
    key = buffers.keys[0]
    for buffer in (*buffers.keys, *buffers.values):
        if buffer.shape != key.shape or buffer.dtype != key.dtype or not buffer.is_contiguous():
            raise ValueError(
                f"a KV buffer is {buffer.dtype} {list(buffer.shape)} with strides {buffer.stride()}, the first is "
                f"{key.dtype} {list(key.shape)}; full KV in host memory needs contiguous buffers of one shape and dtype"
            )


def _pinned(size: int) -> torch.Tensor:
    """Allocate ``size`` bytes of pinned memory. PyTorch's own has sizes of powers of two, which could double it."""
    # Excluded from forks, which would move its pages away from the device. Large pages, written by all cores, take a tenth of the time.
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
