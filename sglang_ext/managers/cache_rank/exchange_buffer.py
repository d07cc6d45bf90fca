"""Exchange buffer: memory of the inference rank that a cache rank maps. Queries and keys are sent one way, selected tokens the other.

On a GPU its CUDA IPC handle is sent to the cache rank. On a CPU it is anonymous shared memory, whose descriptor the rank's process
inherits, and PyTorch does the work of the kernels. Both sides count *words* in it (layers/kernels/exchange_kernels.py). Words name the
epoch, so the buffer outlives the rank's processes: a late write of an earlier process is not accepted as a reply. On a GPU a selection
request covers all layers. On a CPU it may cover a *pack* of layers, with its own words (:meth:`BufferShape.entry`).

If ranks hold full KV, values are sent too. The rank sends back rows of K and V (layers/kernels/row_exchange.py) for the selected tokens that
the compressed KV lacks. To find these, it reads the *record* of the compressed KV, the positions of its rows, which the client copies to the
buffer with a selection request. A record changes when a selection is applied and when compressed KV is refreshed. After such a change,
replies to older selection requests are not applied. So a late rank may read a record that is partly newer, and the rank does not have to
know which of its replies were applied.

A late or missing reply costs only its rows. The rank sends the rows with the highest scores if not all rows fit. The compressed KV always
matches its record, but may hold tokens of older selections. A lane has one slot for a record and one for rows, because the device reads
only the rows of the newest selection request.
"""

import math
import mmap
import os
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang_ext.core import OptionError
from sglang_ext.device import to_device
from sglang_ext.managers.cache_rank.protocol import CHOSEN, DONE, BufferShape, ExchangeLayout, StagedTokens, epoch_word
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import as_pointers

# Counters of the device: applied selections, late ones, selection requests not written because their slot was in use, nanoseconds of
# waiting, and applied rows of K and V.
DEVICE_COUNTERS = ("taken", "late", "unasked", "waited", "rows")
# Bytes of a CUDA IPC handle.
HANDLE_BYTES = 64


class ExchangeBufferError(OptionError):
    """The exchange buffer cannot be allocated or shared. The text names the reason and the remedy."""


def _allocate_on_gpu(size: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Allocate zeros, uint8 [size], outside PyTorch's allocator, which might free them while another process maps them. Also their handle."""
    from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the CUDA context
        library = CudaRTLibrary()
        address = library.cudaMalloc(size)
        library.cudaMemset(address, 0, size)
        library.cudaDeviceSynchronize()  # orders the memset before work on other streams
        handle = bytes(library.cudaIpcGetMemHandle(address))[:HANDLE_BYTES]
    shown = {"shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3}
    memory = torch.as_tensor(type("Allocated", (), {"__cuda_array_interface__": shown})(), device=device)
    assert memory.data_ptr() == address.value, "a view, no copy"
    return memory, handle


def _allocate_on_host(size: int) -> tuple[torch.Tensor, int]:
    """Allocate anonymous shared memory, whose pages use no memory until they are written: uint8 [size], and its descriptor."""
    descriptor = os.memfd_create("kv-exchange", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8), descriptor
    except OSError as error:
        os.close(descriptor)
        raise ExchangeBufferError(
            f"the exchange buffer of a cache rank needs {size / 1e6:.0f} MB of shared memory, which the system refuses ({error.strerror}): "
            "pass a lower --max-running-requests, a lower --kv-select, or --kv-cache-ranks 0"
        ) from None


class QueryUpload(NamedTuple):
    """A selection request to publish.

    Attributes:
        places: Indices of its queries in their pool, oldest first.
        lane: Index of its words: the lane, on a CPU that of the lane's pack (:meth:`BufferShape.entry`).
        word: Its word.
        record: With rows, the record of the compressed KV in the pack's layers.
        layers: The pack; all layers on a GPU.
    """

    places: list[int]
    lane: int
    word: int
    record: torch.Tensor | None = None
    layers: slice = slice(None)


class SelectionTarget(NamedTuple):
    """A compressed KV that applies a selection.

    Attributes:
        lane, word: Those of the :class:`QueryUpload`.
        row, covered, keep: Row in the token table, covered tokens, and kept tokens per head.
        slots: Slots of the compressed KV.
        record: With rows, its record in the pack's layers, int32 [layers, kv_heads, keep].
    """

    lane: int
    word: int
    row: int
    covered: int
    keep: int
    slots: torch.Tensor
    record: torch.Tensor | None = None


class ExchangeBuffer:
    """The inference rank's access to the exchange buffer in its memory, on ``device``. All operations are ordered on the current stream.

    Attributes:
        rank_device: Device of the cache rank, as PyTorch names it.
        handle: CUDA IPC handle; empty on a CPU.
        descriptor: Descriptor of the shared memory; None on a GPU.
        regions: Views of the regions of :class:`~.protocol.ExchangeLayout`, in order.
        number: Number of writes in this epoch, including a reserved one that is not published yet.
        counters: int64 [5], :data:`DEVICE_COUNTERS`, on the device.

    Raises:
        ExchangeBufferError: The cache rank's GPU cannot read this GPU's memory, or the system refuses so much shared memory.
    """

    def __init__(self, shape: BufferShape, device: torch.device, rank_device: str):
        self.shape, self.rank_device, self.device = shape, rank_device, device
        self._epoch, self.number, self._announced, self._by_kernels = 0, 0, 0, device.type == "cuda"
        layout, self.handle, self.descriptor = ExchangeLayout(shape), b"", None
        if self._by_kernels:
            check_peer_access(device, torch.device(rank_device))
            memory, self.handle = _allocate_on_gpu(layout.size, device)
        else:
            memory, self.descriptor = _allocate_on_host(layout.size)
        self.heads, self.written, self.queries, self.keys, self.chosen, *rows = self.regions = layout.views(memory)
        self.values, self.records, *self.arrived = rows
        self.counters = torch.zeros(len(DEVICE_COUNTERS), dtype=torch.int64, device=device)

    def begin(self, epoch: int) -> int | None:
        """Reset the words for a process of a new epoch. Return a descriptor that the process inherits and its starter closes; None on a
        GPU."""
        self._epoch, self.number, self._announced = epoch, 0, 0
        self.heads.fill_(epoch_word(epoch, 0))
        self.written.fill_(epoch_word(epoch, 0))
        if self.device.type == "cuda":
            # Orders the reset before work on any stream.
            torch.cuda.current_stream().synchronize()
        return None if self.descriptor is None else os.dup(self.descriptor)

    def word(self, number: int) -> int:
        """Return the word of a number in the running process's epoch."""
        return epoch_word(self._epoch, number)

    def put_keys(self, puts: Sequence[StagedTokens], buffers: KVBuffers, slots: torch.Tensor) -> int:
        """Copy the keys at pool ``slots``, int64 [tokens], and with rows their values, to staging slots. Return the number of this write.

        Each of ``puts`` starts at its own index of ``slots``.
        """
        self.number += 1
        both = (self.keys, buffers.keys, "key_table"), (self.values, buffers.values, "value_table")
        told = to_device(list(puts), self.device) if self._by_kernels else None
        for travels, of_layers, table in both[: 1 + self.shape.rows]:
            if self._by_kernels:
                from sglang_ext.layers.kernels.exchange_kernels import put_keys

                put_keys(travels, told, getattr(buffers, table), of_layers[0], slots)
                continue
            for place, tokens, first in puts:
                for into, of_layer in zip(travels[place], of_layers):
                    torch.index_select(of_layer, 0, slots[first : first + tokens], out=into[:tokens])
        return self.number

    def reserve_number(self) -> int:
        """Return the number of the next write, which :meth:`publish` will make."""
        self.number += 1
        return self.number

    def publish(self, pool: torch.Tensor, selection_requests: Sequence[QueryUpload]) -> None:
        """Write the queries of selection requests whose slots are free, and announce them and all earlier writes, if there are any.

        ``pool``: pool of queries, [layers, places, query_heads, dim]. ``selection_requests``: one per lane.
        """
        if not selection_requests and self.number == self._announced:
            return
        recorded = [each for each in selection_requests if each.record is not None]
        if recorded:
            places = [self.records[self.shape.numbers(each.lane, each.record.numel())] for each in recorded]
            torch._foreach_copy_(places, [each.record.flatten() for each in recorded])
        by_count: dict[int, list[QueryUpload]] = {}
        for each in selection_requests:
            by_count.setdefault(len(each.places), []).append(each)
        groups = [*by_count.values()] or [[]]
        for group in groups:
            # Announce the number only with the last group.
            self._announced = self.number if group is groups[-1] else self._announced
            self._publish(pool, group, self.word(self._announced))

    def _publish(self, pool: torch.Tensor, selection_requests: Sequence[QueryUpload], written: int) -> None:
        """Publish selection requests that have equal numbers of queries."""
        device = self.heads.device
        if self._by_kernels:
            from sglang_ext.layers.kernels.exchange_kernels import put_queries, signal_written

            numbers = to_device([[each.lane, each.word] for each in selection_requests], device)
            if selection_requests:
                opened = put_queries(self.heads, self.queries, pool, to_device([each.places for each in selection_requests], device), numbers)
            else:
                opened = torch.empty(0, dtype=torch.int32, device=device)
            signal_written(self.heads, self.written, numbers, opened, written)
            return
        for places, entry, word, _, layers in selection_requests:
            if int(self.heads[entry, DONE]) >= word - 2:
                self.queries[entry // self.shape.packs, word % 2, layers, : len(places)] = pool[layers, places]
                self.heads[entry, word % 2] = word
        self.written[0] = written

    def apply_selections(self, copies: Sequence[SelectionTarget], token_table: torch.Tensor, buffers: KVBuffers, seconds: float) -> None:
        """Apply the selections that arrive within ``seconds`` in total: write pointers, or with rows the received rows."""
        if self._by_kernels:
            from sglang_ext.layers.kernels.exchange_kernels import wait_for_selections, write_selected_pointers

            device, firsts = self.heads.device, accumulate((len(copy.slots) for copy in copies), initial=0)
            there = to_device([[*copy[:5], first] for copy, first in zip(copies, firsts)], device)
            hits, most = wait_for_selections(self.heads, there, self.counters, seconds), max(copy.keep for copy in copies)
            targets = torch.cat([copy.slots for copy in copies])
            if self.shape.rows:
                from sglang_ext.layers.kernels.row_exchange import commit_rows

                records, tables = to_device([copy.record.data_ptr() for copy in copies], device), (buffers.key_table, buffers.value_table)
                commit_rows(tuple(self.arrived), hits, there, records, self.counters, tables, buffers.keys[0], targets)
                return
            write_selected_pointers(self.chosen, hits, there, most, buffers.key_table, buffers.keys[0], token_table, targets)
            return
        begun = time.monotonic_ns()
        for copy in copies:
            if not self._await_reply(copy, begun + int(seconds * 1e9)):
                continue
            if self.shape.rows:
                self.counters[DEVICE_COUNTERS.index("rows")] += self.commit_rows(copy, buffers)
            elif (kept := self.read_selection(copy, self.shape.layers)) is not None:
                place = torch.arange(copy.keep)
                for keys, of_layer in zip(buffers.keys, token_table[copy.row].long()[kept]):
                    cells = as_pointers(keys)
                    per_slot, heads = cells.shape[2], torch.arange(cells.shape[1])
                    cells[copy.slots[place // per_slot][:, None], heads, (place % per_slot)[:, None]] = of_layer.t().int()
        self.counters[DEVICE_COUNTERS.index("waited")] += time.monotonic_ns() - begun

    def _await_reply(self, copy: SelectionTarget, until: int) -> bool:
        head, parity = self.heads[copy.lane], copy.word % 2
        is_requested = int(head[parity]) == copy.word
        while is_requested and int(head[DONE]) < copy.word and time.monotonic_ns() < until:
            time.sleep(1e-4)
        hit = is_requested and int(head[CHOSEN + parity]) == copy.word
        self.counters[DEVICE_COUNTERS.index("taken" if hit else "late" if is_requested else "unasked")] += 1
        return hit

    def is_answered(self, entry: int, word: int) -> bool:
        """Whether the reply to a selection request, marked as done, is that of its word. On a CPU only."""
        return int(self.heads[entry, CHOSEN + word % 2]) == word

    def read_selection(self, copy: SelectionTarget, layers: int) -> torch.Tensor | None:
        """Return the selected positions of a pack of ``layers`` layers: int64 [layers, kv_heads, keep]; None if one is not among the
        covered tokens. On a CPU only."""
        sizes = layers, self.shape.kv_heads, copy.keep
        lane, numbers = self.shape.numbers(copy.lane, math.prod(sizes))
        kept = self.chosen[lane, copy.word % 2, numbers].view(sizes).long()
        return kept if int(kept.min()) >= 0 and int(kept.max()) < copy.covered else None

    def commit_rows(self, copy: SelectionTarget, buffers: KVBuffers) -> int:
        """Store the received rows of a pack, whose layers ``buffers`` has, in a compressed KV, and update its record. Return their number.
        On a CPU only."""
        pairs, heads = self.shape.pairs(copy.lane, len(buffers.keys)), self.shape.kv_heads
        counts, moves, *rows = (part[pairs] for part in self.arrived)
        place, token = moves.long().unbind(-1)
        inside = torch.arange(self.shape.fresh) < counts[:, None]
        inside &= (place >= 0) & (place < copy.keep) & (token >= 0) & (token < copy.covered)
        pair, index = inside.nonzero(as_tuple=True)
        place = place[pair, index]
        copy.record.view(-1, copy.keep)[pair, place] = token[pair, index].int()
        for layer in range(len(buffers.keys)):
            here = pair // heads == layer
            slots, head = copy.slots[place[here]], pair[here] % heads
            for part, arrived in zip((buffers.keys[layer], buffers.values[layer]), rows):
                part[slots, head] = arrived[pair[here], index[here]]
        return len(pair)


def check_peer_access(device: torch.device, other: torch.device) -> None:
    """Raise :class:`ExchangeBufferError` if the GPU ``other`` cannot read the memory of ``device``."""
    if device != other and not torch.cuda.can_device_access_peer(other.index, device.index):
        raise ExchangeBufferError(
            f"GPU {other.index} cannot read the memory of GPU {device.index}, as --kv-cache-ranks requires: choose GPUs "
            "with peer access by --base-gpu-id (see `nvidia-smi topo -p2p r`), or pass --kv-cache-ranks 0"
        )
