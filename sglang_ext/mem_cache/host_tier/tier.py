"""Full KV in host memory: stored from device slots, and loaded into device slots for a verification.

A store gathers slots into one of two buffers on the device, and a copy engine copies runs of pages from there to the host. A load does
the reverse, and scatters. While one buffer is copied, the other is gathered or scattered. Each direction has its own two buffers and two
streams, so that stores, loads and forwards run in parallel. On a CPU a thread does the same, one transfer after another.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from numba import njit

from sglang_ext.device import Mark
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import HostPool, as_words, check_alike, runs
from sglang_ext.mem_cache.host_tier.page_copies import FrameCopies, LayerCopies, PageBlocks, ResidualPages
from sglang_ext.mem_cache.host_tier.transfers import (
    CopyStream,
    DeferredLaunches,
    DoubleBuffer,
    LastTransfers,
    LaunchedTransfer,
    Transfer,
    TransferError,
    TransferTracker,
)  # fmt: skip

# At most 32 bits: in a 64-bit sum, even the highest bit of two words must not cancel out.
SUMMED_WORD = 4
# Index of the first token weight in the sequence of weights. No row has as many columns.
FIRST_TOKEN = 1 << 32


def odd_weights(first: int, count: int) -> torch.Tensor:
    """Odd weights, int64 [count], by the mixing function of SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195, figure 14)."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


@dataclass(frozen=True)
class PageChecksums:
    """Checksums of pages of device slots. All layers are contiguous, of one shape and dtype."""

    buffers: KVBuffers
    page_size: int

    @cached_property
    def column_weights(self) -> torch.Tensor:
        """int64 [words of a row]."""
        key = self.buffers.keys[0]
        return odd_weights(0, as_words(key, SUMMED_WORD).shape[1]).to(key.device)

    @cached_property
    def token_weights(self) -> torch.Tensor:
        """int64 [layers, 2, page_size]: weights for keys, then for values."""
        shape = len(self.buffers.keys), 2, self.page_size
        return odd_weights(FIRST_TOKEN, shape[0] * 2 * self.page_size).view(shape).to(self.buffers.keys[0].device)

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Checksums of the pages in ``slots``, int64 [pages * page_size]: int64 [pages], on the buffers' device."""
        buffers = self.buffers
        if buffers.on_gpu:
            from sglang_ext.layers.kernels.kv_copies import page_checksum

            words = as_words(buffers.keys[0], SUMMED_WORD)
            tables = buffers.key_table, buffers.value_table
            return page_checksum(*tables, words, slots, self.token_weights, self.column_weights)
        sums = slots.new_zeros(len(slots) // self.page_size)
        for words, token_weights in self._weighted_words:
            _add_checksums(words, slots.numpy(), self.column_weights.numpy(), token_weights, sums.numpy())
        return sums

    @cached_property
    def _weighted_words(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys of all layers, then values, in host memory, [buffers, slots, words of a row], with their token weights, [buffers, page_size].

        One pair if the distances between buffers are equal, since each pair costs a call. Otherwise one pair for each buffer.
        """
        words = [as_words(buffer, SUMMED_WORD).numpy() for buffer in (*self.buffers.keys, *self.buffers.values)]
        weights = self.token_weights.transpose(0, 1).flatten(0, 1).numpy()
        distances = {after.ctypes.data - before.ctypes.data for before, after in pairwise(words)}
        if len(distances) > 1:
            return [(buffer[None], of_token[None]) for buffer, of_token in zip(words, weights, strict=True)]
        return [(np.lib.stride_tricks.as_strided(words[0], (len(words), *words[0].shape), (*distances, *words[0].strides)), weights)]


@njit(nogil=True, cache=True, error_model="numpy")
def _add_checksums(words: np.ndarray, slots: np.ndarray, column_weights: np.ndarray, token_weights: np.ndarray, sums: np.ndarray) -> None:
    """Add the weighted sums of the pages of some buffers to ``sums``, int64 [pages], modulo 2**64.

    ``words``: integers [buffers, slots, words of a row]. ``slots``, the weights: int64 [pages * page_size], [words of a row] and [buffers, page_size].
    """
    for buffer in range(len(words)):
        for page in range(len(sums)):
            for place, token_weight in enumerate(token_weights[buffer]):
                row, of_token = words[buffer, slots[page * token_weights.shape[1] + place]], np.int64(0)
                for column, weight in enumerate(column_weights):
                    of_token += np.int64(row[column]) * weight
                sums[page] += of_token * token_weight


# Bytes of both buffers of a direction: a share of the device's KV, within bounds. They are large enough that copying half of them takes
# much longer than the launch. A stream holds about 1,000 launches before the host waits: several loads of a long context stay below.
STAGING_SHARE, LEAST_STAGING, MOST_STAGING = 1 / 64, 16 << 20, 256 << 20


def staging_bytes(pool: int, page: int = 0) -> int:
    """Device memory for the buffers of one direction, given the bytes of the KV pool and of a page of full KV."""
    return max(min(max(int(STAGING_SHARE * pool), LEAST_STAGING), MOST_STAGING), 2 * page)


class HostTier:
    """Copies KV between a device's slots and a pool of host pages.

    All calls come from one thread. A transfer starts after the work enqueued before the call on the current stream and on ``forward_stream``,
    where forwards run that may still write freed slots. Its device slots must not change until it is done. Later work that writes,
    reads or frees them must wait for it (:meth:`Transfer.wait`). Host pages need no such wait: transfers of the same pages are ordered. Only a
    thread that writes host pages waits, for :meth:`unfinished` ones.

    ``staging`` is the device bytes for the buffers of one direction, at least two pages of one layer's keys. None for :func:`staging_bytes`.
    ``residuals`` is the layout of pages in a page-first pool. ``forward_stream`` is None if forwards run on the current stream. Raises
    ValueError if the layers' buffers differ, or are not contiguous.
    """

    def __init__(
        self,
        buffers: KVBuffers,
        pool: HostPool,
        staging: int | None = None,
        residuals: ResidualPages | None = None,
        forward_stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        check_alike(buffers)
        self.pool, self._forward_stream = pool, forward_stream
        key = buffers.keys[0]
        self._device = key.device
        self._checksums = PageChecksums(buffers, pool.page_size)
        # Creates the tables and compiles the kernel here, so that no stream uses them before they are complete.
        self._checksums.of(torch.zeros(pool.page_size, dtype=torch.int64, device=key.device))
        staging = staging_bytes(len(key) * buffers.bytes_per_slot, pool.page_bytes) if staging is None else staging
        self._copies: LayerCopies | FrameCopies
        if residuals is None:
            self._copies = LayerCopies([as_words(buffer, 8) for buffer in (*buffers.keys, *buffers.values)], pool, staging)
        else:
            self._copies = FrameCopies(pool, residuals, staging)
            if buffers.on_gpu:
                residuals.compile_kernels()
        copies, moves = (partial(CopyStream, self._device, urgent) for urgent in (False, True))
        self._stores = DoubleBuffer(self._copies.halves(), filler=moves(), emptier=copies())
        self._loads = DoubleBuffer(self._copies.halves(), filler=copies(), emptier=moves())
        self._stored, self._loaded = LastTransfers(pool.pages.count), LastTransfers(pool.pages.count)
        self._launches = DeferredLaunches() if buffers.on_gpu else ThreadPoolExecutor(1, thread_name_prefix="host-tier")

    @property
    def workspace_bytes(self) -> int:
        """Device bytes in addition to the KV pool: the buffers of both directions."""
        return self._stores.size + self._loads.size

    def defer_transfers(self) -> AbstractContextManager[None]:
        """Launch transfers requested inside this context at its end: a launch takes the host milliseconds. On a CPU, a thread starts them at once.

        They wait only for work enqueued before the request.
        """
        return self._launches.until_end() if isinstance(self._launches, DeferredLaunches) else nullcontext()

    def store(self, slots: torch.Tensor, pages: torch.Tensor, blocks: PageBlocks | None = None) -> Transfer:
        """Copy device ``slots``, int64 [pages * page_size], to host ``pages``, int64 [pages] on the host, each once.

        Pages with ``blocks``, whose slots must not change until the transfer is done, are stored as residuals. Raises ValueError if slots and
        pages do not match, or pages are not allocated.
        """
        self._check(slots, pages)
        self.pool.pages.fill(pages)
        return self._begin(self._store, slots, pages, blocks)

    def load(self, pages: torch.Tensor, slots: torch.Tensor, blocks: PageBlocks | None = None) -> Transfer:
        """Copy host pages to device slots, with the existing blocks of :meth:`store`. Raises ValueError as :meth:`store`, or for empty pages."""
        self._check(slots, pages)
        self.pool.pages.check_filled(pages)
        return self._begin(self._load, slots, pages, blocks)

    def unfinished(self, pages: torch.Tensor) -> list[Mark]:
        """Ends of launched transfers that may still use host ``pages``, which were freed since. Other memory writes must wait for them."""
        ends = [last.end(pages) for last in (self._stored, self._loaded)]
        return [end for end in ends if end is not None]

    def close(self) -> None:
        """Finish all transfers. None may be started afterwards."""
        if isinstance(self._launches, DeferredLaunches):
            torch.cuda.synchronize(self._device)
        else:
            self._launches.shutdown()

    def _begin(self, launch: Callable[..., LaunchedTransfer], slots: torch.Tensor, pages: torch.Tensor, blocks: PageBlocks | None) -> Transfer:
        # The arguments may be views of tables that change before the transfer reads them.
        slots, pages = slots.clone(), pages.clone()
        after = [Mark.now(self._device)]
        if self._forward_stream is not None:
            after.append(Mark.now(self._device, self._forward_stream))
        launched = self._launches.submit(launch, slots, pages, blocks, after)
        return Transfer(len(pages) * self.pool.page_bytes, pages, launched)

    @torch.inference_mode()
    def _store(self, slots: torch.Tensor, pages: torch.Tensor, blocks: PageBlocks | None, after: Sequence[Mark]) -> LaunchedTransfer:
        pipe = self._stores
        pipe.after(*after, self._loaded.end(pages))
        pipe.filler.uses(slots, None if blocks is None else blocks.slots)
        start = pipe.emptier.mark()
        for fill, empty in self._copies.stores(pages, slots, blocks):
            pipe.move(fill, empty)
        with pipe.filler.running():
            sums = self._checksums.of(slots)
        pipe.hand_over()
        pipe.emptier.uses(sums)
        with pipe.emptier.running():
            for run in runs(pages):
                of_host = self.pool.checksums[run.first : run.first + run.count]
                of_host.copy_(sums[run.place : run.place + run.count], non_blocking=True)
        end = pipe.emptier.mark()
        self._stored.note(pages, end)
        return LaunchedTransfer(start, end, None, len(pages) * self.pool.page_bytes)

    @torch.inference_mode()
    def _load(self, slots: torch.Tensor, pages: torch.Tensor, blocks: PageBlocks | None, after: Sequence[Mark]) -> LaunchedTransfer:
        pipe = self._loads
        storing = self._stored.end(pages)
        pipe.after(*after, storing)
        pipe.emptier.uses(slots, None if blocks is None else blocks.slots)
        start, (size, moves) = pipe.filler.mark(), self._copies.loads(pages, slots, blocks, storing is None)
        for fill, empty in moves:
            pipe.move(fill, empty)
        with pipe.filler.running():
            expected = slots.new_empty(len(pages))
            for run in runs(pages):
                of_host = self.pool.checksums[run.first : run.first + run.count]
                expected[run.place : run.place + run.count].copy_(of_host, non_blocking=True)
        pipe.hand_over()
        pipe.emptier.uses(expected)
        wrong = torch.empty(len(pages), dtype=torch.bool, pin_memory=slots.is_cuda)
        with pipe.emptier.running():
            wrong.copy_(self._checksums.of(slots) != expected, non_blocking=True)
        end = pipe.emptier.mark()
        self._loaded.note(pages, end)
        return LaunchedTransfer(start, end, wrong, size)

    def _check(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        if len(pages) == 0 or len(slots) != len(pages) * self.pool.page_size:
            raise ValueError(
                f"{len(slots)} slots for {len(pages)} pages of {self.pool.page_size} tokens; pass a slot for each token of at least one page"
            )
        for name, tensor, device in (("slots", slots, self._device), ("pages", pages, torch.device("cpu"))):
            if tensor.dtype != torch.int64 or tensor.device != device:
                raise ValueError(f"{name} are {tensor.dtype} on {tensor.device}; pass torch.int64 on {device}")
        self.pool.pages.check_owned(pages)


@dataclass
class HostLinkBandwidth:
    """Bandwidth of completed loads. Each load multiplies the weights of earlier ones by ``decay``. ``seconds`` is the sum of all."""

    decay: float = 0.9
    loads: int = 0
    seconds: float = 0.0
    _bytes: float = 0.0
    _restored: float = 0.0
    _seconds: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second. None until a transfer was counted."""
        return self._bytes / self._seconds if self._seconds > 0 else None

    @property
    def restored(self) -> float | None:
        """Bytes of full KV per second. More than are transferred if the host stores residuals. None until a transfer was counted."""
        return self._restored / self._seconds if self._seconds > 0 else None

    def add(self, size: int, seconds: float, restored: int | None = None) -> None:
        """Count a load of ``size`` bytes. ``restored``: bytes of full KV that it produced, if different."""
        self._bytes = self.decay * self._bytes + size
        self._restored = self.decay * self._restored + (size if restored is None else restored)
        self._seconds = self.decay * self._seconds + seconds
        self.loads += 1
        self.seconds += seconds

    def measure(self, tier: HostTier, slots: torch.Tensor, arrivals: TransferTracker) -> float:
        """Store and load the KV in ``slots``, which may repeat, wait for it, and return the measured bandwidth. With more, launches count less.

        Raises :class:`TransferError` if the host has too few free pages, or the loaded KV differs from the stored KV.
        """
        pages = tier.pool.pages.allocate(max(1, len(slots) // tier.pool.page_size))
        if pages is None:
            raise TransferError(
                f"{len(slots)} tokens do not fit in the {tier.pool.pages.free_pages} free pages of host memory; measure with "
                "fewer slots, or raise --kv-host-gb"
            )
        # The second load counts: the first waits for compilers.
        try:
            for transfer in (tier.store(slots, pages), tier.load(pages, slots), last := tier.load(pages, slots)):
                arrivals.wait(transfer)
        finally:
            tier.pool.pages.free(pages)
        seconds, failed, _ = arrivals.outcome(last)
        if failed:
            raise TransferError(f"host pages {failed[:8]} came back changed; the link or the memory is broken: do not serve from it")
        self.add(last.size, seconds)
        return self.bandwidth
