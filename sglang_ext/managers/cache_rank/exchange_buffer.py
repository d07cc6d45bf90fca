"""Exchange buffer: memory of the inference rank that a cache rank maps. Queries and keys are sent one way, selected tokens the other.

On a GPU the buffer is allocated apart from PyTorch's memory, and its CUDA IPC handle is sent to the cache rank. On a CPU it is anonymous
shared memory, whose descriptor the rank's process inherits, and PyTorch does the work of the kernels. Both sides count *words* in it
(layers/kernels/exchange_kernels.py). Words name the epoch, so the buffer outlives the rank's processes: a late write of an earlier
process is not accepted as a reply.

On a GPU a selection request covers all layers. On a CPU it may cover a *pack* of layers, with its own words (:class:`PackRegion`).

If ranks hold full KV, values are sent too. The rank sends back rows of K and V (layers/kernels/row_exchange.py) for the selected tokens that
the compressed KV lacks. To find these, it reads the *record* of the compressed KV, the positions of its rows. The client copies the record
to the buffer when it publishes a selection request. A record changes when a selection is applied and when the request's compressed KV is
refreshed. After such a change, replies to older selection requests are not applied: the host expects only the newest reply, and the device
publishes the next request after it.

This design has these consequences:

- The rank does not have to know which of its replies were applied. A late or missing reply costs only its rows.

- A restarted process begins with the positions that the compressed KV holds.

- A lane has only one slot for a record and one slot for rows, because the device reads only the rows of the newest selection request.

- A late rank may read a record that is partly newer, but the device does not apply its reply.

- The rank sends the rows with the highest scores if not all rows fit. The compressed KV always matches its record, but may hold tokens of
  older selections.
"""

import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from sglang_ext.core import OptionError
from sglang_ext.device import to_device
from sglang_ext.managers.cache_rank.protocol import BLOCK, NUMBER_BITS, BufferShape, StagedTokens
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.pointers import as_pointers

# Equal to those of layers/kernels/exchange_kernels.py, which is not imported on a CPU.
LANE_WORDS, DONE, CHOSEN, QUESTION_NUMBERS = 8, 2, 4, 3
COUNTERS = ("taken", "late", "unasked", "waited", "rows")
ALL_LAYERS = slice(None)
# Granularity of CUDA allocations, so that the IPC handle covers no other allocation.
GRAIN = 2 << 20
# Bytes of a CUDA IPC handle.
HANDLE_BYTES = 64


class ExchangeBufferError(OptionError):
    """The GPUs cannot share the exchange buffer. The text names the GPUs and the remedy."""


def epoch_word(epoch: int, number: int) -> int:
    """Return the word of a number in a process's epoch."""
    return (epoch << NUMBER_BITS) + number


class PackRegion(NamedTuple):
    """Where the data of a pack of layers is, on a CPU. The numbers of a pack are contiguous, from those of its first layer on.

    Attributes:
        lane: Lane of the request.
        first: First layer.
        numbers: First number of the pack in ``chosen`` or ``records`` of the lane.
        pairs: Index of the pack's first pair of layer and KV head.
    """

    lane: int
    first: int
    numbers: int
    pairs: int

    @classmethod
    def from_entry(cls, shape: BufferShape, entry: int) -> "PackRegion":
        """Return the region of the pack whose words have this index."""
        lane, first = divmod(entry, shape.packs)
        return cls(lane, first, first * shape.kv_heads * shape.most, first * shape.kv_heads)


class BufferRegion(NamedTuple):
    """A region of the exchange buffer: its first byte, sizes and dtype."""

    begin: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ExchangeLayout:
    """Regions of the exchange buffer, which both sides compute from the shape.

    Attributes:
        heads: int64 [lanes * packs, LANE_WORDS], words of each lane's packs.
        written: int64 [8]; the first counts the writes of the inference rank.
        queries: [lanes, 2, layers, window, query_heads, dim].
        keys: [places, layers, block, kv_heads, dim], staging slots.
        chosen: int32 [lanes, 2, numbers]; a selection is [layers, kv_heads, keep] at the beginning. Empty if rows are sent.
        values: Like ``keys``. This and the following are empty if no values are sent.
        records: int32 [lanes, numbers]; positions that the compressed KV holds, [layers, kv_heads, keep], at the beginning.
        counts: int32 [lanes, pairs], rows of a reply for each layer and KV head.
        moves: int32 [lanes, pairs, fresh, 2], for each row its target index in the compressed KV, and its token's position.
        row_keys, row_values: [lanes, pairs, fresh, dim].
        size: Total bytes.
    """

    heads: BufferRegion
    written: BufferRegion
    queries: BufferRegion
    keys: BufferRegion
    chosen: BufferRegion
    values: BufferRegion
    records: BufferRegion
    counts: BufferRegion
    moves: BufferRegion
    row_keys: BufferRegion
    row_values: BufferRegion
    size: int

    @classmethod
    def from_shape(cls, shape: BufferShape) -> "ExchangeLayout":
        """Compute the layout for ranks of this shape."""
        dtype, by_lane, begin, parts = getattr(torch, shape.dtype), (shape.lanes, 2), 0, []
        pairs, (chosen, places, lanes) = shape.layers * shape.kv_heads, (0, shape.places, shape.lanes)
        if not shape.rows:
            chosen, places, lanes = pairs * shape.most, 0, 0
        for sizes, kind in (
            ((shape.lanes * shape.packs, LANE_WORDS), torch.int64),
            ((8,), torch.int64),
            ((*by_lane, shape.layers, shape.window, shape.query_heads, shape.dim), dtype),
            ((shape.places, shape.layers, BLOCK, shape.kv_heads, shape.dim), dtype),
            ((*by_lane, chosen), torch.int32),
            ((places, shape.layers, BLOCK, shape.kv_heads, shape.dim), dtype),
            ((lanes, pairs * shape.most), torch.int32),
            ((lanes, pairs), torch.int32),
            ((lanes, pairs, shape.fresh, 2), torch.int32),
            ((lanes, pairs, shape.fresh, shape.dim), dtype),
            ((lanes, pairs, shape.fresh, shape.dim), dtype),
        ):
            parts.append(BufferRegion(begin, sizes, kind))
            begin += -(-math.prod(sizes) * kind.itemsize // 256) * 256
        return cls(*parts, -(-begin // GRAIN) * GRAIN)

    @property
    def parts(self) -> tuple[BufferRegion, ...]:
        """All regions in order."""
        rows = self.values, self.records, self.counts, self.moves, self.row_keys, self.row_values
        return self.heads, self.written, self.queries, self.keys, self.chosen, *rows

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a view of each region of ``memory``, uint8 [size]."""
        found = []
        for part in self.parts:
            size = math.prod(part.sizes) * part.dtype.itemsize
            found.append(memory[part.begin : part.begin + size].view(part.dtype).view(part.sizes))
        return tuple(found)


class SharedGpuMemory:
    """Memory of the current GPU outside PyTorch's allocator. It is never freed while another process maps it.

    Attributes:
        memory: uint8 [size], zeros.
        handle: Its CUDA IPC handle.
    """

    def __init__(self, size: int, device: torch.device):
        from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the CUDA context
            library = CudaRTLibrary()
            address = library.cudaMalloc(size)
            library.cudaMemset(address, 0, size)
            library.cudaDeviceSynchronize()  # orders the memset before work on other streams
            self.handle = bytes(library.cudaIpcGetMemHandle(address))[:HANDLE_BYTES]
        shown = {"shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3}
        self.memory = torch.as_tensor(type("Allocated", (), {"__cuda_array_interface__": shown})(), device=device)
        assert self.memory.data_ptr() == address.value, "a view, no copy"
        self.descriptor = None


class SharedHostMemory:
    """Anonymous shared memory, whose pages use no memory until they are written. ``descriptor``: its descriptor, which the rank's process
    inherits."""

    handle = b""

    def __init__(self, size: int):
        self.descriptor = os.memfd_create("kv-exchange", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)


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
    layers: slice = ALL_LAYERS


class SelectionTarget(NamedTuple):
    """A compressed KV that applies a selection.

    Attributes:
        lane, word: Those of the :class:`QueryUpload`.
        row: Row in the token table.
        covered: Covered tokens.
        keep: Kept tokens per head.
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
    """The inference rank's access to the exchange buffer in its memory. All operations are ordered on the current stream.

    Args:
        shape: Sizes of the rank.
        device: Device of the inference rank.
        rank_device: Device of the cache rank, as PyTorch names it.

    Attributes:
        handle: CUDA IPC handle; empty on a CPU.
        number: Number of writes in this epoch, including a reserved one that is not published yet.
        counters: int64 [5], :data:`COUNTERS`, on the device.

    Raises:
        ExchangeBufferError: The cache rank's GPU cannot read this GPU's memory.
    """

    def __init__(self, shape: BufferShape, device: torch.device, rank_device: str):
        self.shape, self.rank_device, self.device = shape, rank_device, device
        self._layout, self._epoch, self.number, self._announced = ExchangeLayout.from_shape(shape), 0, 0, 0
        if device.type == "cuda":
            check_peer_access(device, torch.device(rank_device))
        self._held = SharedGpuMemory(self._layout.size, device) if device.type == "cuda" else SharedHostMemory(self._layout.size)
        self.handle = self._held.handle
        self.heads, self.written, self.queries, self.keys, self.chosen, *rows = self._layout.views(self._held.memory)
        self.values, self.records, *self.arrived = rows
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self._by_kernels = device.type == "cuda"

    def begin(self, epoch: int) -> int | None:
        """Reset the words for a process of a new epoch. Return a descriptor that the process inherits and its starter closes; None on a
        GPU."""
        self._epoch, self.number, self._announced = epoch, 0, 0
        self.heads.fill_(epoch_word(epoch, 0))
        self.written.fill_(epoch_word(epoch, 0))
        if self.device.type == "cuda":
            # Orders the reset before work on any stream.
            torch.cuda.current_stream().synchronize()
        return None if self._held.descriptor is None else os.dup(self._held.descriptor)

    def word(self, number: int) -> int:
        """Return the word of a number in the running process's epoch."""
        return epoch_word(self._epoch, number)

    def next_sequence(self, lane: int, first: int) -> int:
        """Return the sequence of a pack's next selection request, one more than the last published one. On a CPU only."""
        return int(self.heads[self.shape.entry(lane, first), :DONE].max()) - self.word(0) + 1

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
            else:
                copy_tokens(puts, of_layers, slots, travels)
        return self.number

    def reserve_number(self) -> int:
        """Return the number of the next write, which :meth:`publish` will make."""
        self.number += 1
        return self.number

    @property
    def has_unannounced(self) -> bool:
        """Whether there are writes, or a reserved number, that were not announced to the rank."""
        return self.number != self._announced

    def publish(self, pool: torch.Tensor, selection_requests: Sequence[QueryUpload]) -> None:
        """Write the queries of selection requests whose slots are free, and announce them and all earlier writes.

        Args:
            pool: Pool of queries, [layers, places, query_heads, dim].
            selection_requests: Selection requests, one per lane.
        """
        recorded = [each for each in selection_requests if each.record is not None]
        if recorded:
            places = [self._record(each.lane, each.record.numel()) for each in recorded]
            torch._foreach_copy_(places, [each.record.flatten() for each in recorded])
        groups = [list(group) for _, group in groupby(sorted(selection_requests, key=_num_queries), key=_num_queries)]
        for group in groups or [[]]:
            # Announce the number only with the last group.
            self._announced = self.number if not groups or group is groups[-1] else self._announced
            self._publish(pool, group, self.word(self._announced))

    def _record(self, entry: int, numbers: int) -> torch.Tensor:
        """Return the record of a pack: int32 [numbers]."""
        if self.shape.packs == 1:
            return self.records[entry, :numbers]
        at = PackRegion.from_entry(self.shape, entry)
        return self.records[at.lane, at.numbers : at.numbers + numbers]

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
        device, first, numbers = self.heads.device, 0, []
        for copy in copies:
            numbers.append([*copy[:5], first])
            first += len(copy.slots)
        if self._by_kernels:
            from sglang_ext.layers.kernels.exchange_kernels import wait_for_selections, write_selected_pointers

            there = to_device(numbers, device)
            hits, most = wait_for_selections(self.heads, there, self.counters, seconds), max(copy.keep for copy in copies)
            targets = torch.cat([copy.slots for copy in copies])
            if self.shape.rows:
                self._commit_rows_by_kernel(copies, hits, there, buffers, targets)
                return
            write_selected_pointers(self.chosen, hits, there, most, buffers.key_table, buffers.keys[0], token_table, targets)
            return
        begun = time.monotonic_ns()
        for copy in copies:
            if not self._await_reply(copy, begun + int(seconds * 1e9)):
                continue
            if self.shape.rows:
                self._commit_rows(copy, buffers)
            else:
                self._commit_pointers(copy, token_table, buffers)
        self.counters[COUNTERS.index("waited")] += time.monotonic_ns() - begun

    def _await_reply(self, copy: SelectionTarget, until: int) -> bool:
        head, parity = self.heads[copy.lane], copy.word % 2
        is_requested = int(head[parity]) == copy.word
        while is_requested and int(head[DONE]) < copy.word and time.monotonic_ns() < until:
            time.sleep(1e-4)
        hit = is_requested and int(head[CHOSEN + parity]) == copy.word
        self.counters[COUNTERS.index("taken" if hit else "late" if is_requested else "unasked")] += 1
        return hit

    def is_answered(self, entry: int, word: int) -> bool:
        """Whether the reply to a selection request, marked as done, is that of its word. On a CPU only."""
        return int(self.heads[entry, CHOSEN + word % 2]) == word

    def read_selection(self, copy: SelectionTarget, layers: int) -> torch.Tensor | None:
        """Return the selected positions of a pack of ``layers`` layers: int64 [layers, kv_heads, keep]; None if one is not among the
        covered tokens. On a CPU only."""
        at, heads = PackRegion.from_entry(self.shape, copy.lane), self.shape.kv_heads
        count = layers * heads * copy.keep
        kept = self.chosen[at.lane, copy.word % 2, at.numbers : at.numbers + count].view(layers, heads, copy.keep).long()
        return kept if int(kept.min()) >= 0 and int(kept.max()) < copy.covered else None

    def _commit_pointers(self, copy: SelectionTarget, token_table: torch.Tensor, buffers: KVBuffers) -> None:
        layers, heads = len(buffers.keys), buffers.keys[0].shape[1]
        kept = self.read_selection(copy, layers)
        if kept is None:
            return
        place = torch.arange(copy.keep)
        for keys, of_layer in zip(buffers.keys, token_table[copy.row].long()[kept]):
            cells = as_pointers(keys)
            per_slot = cells.shape[2]
            cells[copy.slots[place // per_slot][:, None], torch.arange(heads), (place % per_slot)[:, None]] = of_layer.t().int()

    def _commit_rows_by_kernel(
        self, copies: Sequence[SelectionTarget], hits: torch.Tensor, numbers: torch.Tensor, buffers: KVBuffers, targets: torch.Tensor
    ) -> None:
        from sglang_ext.layers.kernels.row_exchange import commit_rows

        records = to_device([copy.record.data_ptr() for copy in copies], self.heads.device)
        tables = buffers.key_table, buffers.value_table
        commit_rows(tuple(self.arrived), hits, numbers, records, self.counters, tables, buffers.keys[0], targets)

    def _commit_rows(self, copy: SelectionTarget, buffers: KVBuffers) -> None:
        self.counters[COUNTERS.index("rows")] += self.commit_rows(copy, buffers)

    def commit_rows(self, copy: SelectionTarget, buffers: KVBuffers) -> int:
        """Store the received rows of a pack, whose layers ``buffers`` has, in a compressed KV, and update its record. Return their number.
        On a CPU only."""
        at, heads = PackRegion.from_entry(self.shape, copy.lane), self.shape.kv_heads
        pairs = slice(at.pairs, at.pairs + len(buffers.keys) * heads)
        counts, moves, *rows = (part[at.lane, pairs] for part in self.arrived)
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


def _num_queries(selection_request: QueryUpload) -> int:
    return len(selection_request.places)


def check_peer_access(device: torch.device, other: torch.device) -> None:
    """Refuse two GPUs if ``other`` cannot read the memory of ``device``.

    Raises:
        ExchangeBufferError: Names both.
    """
    if device != other and not torch.cuda.can_device_access_peer(other.index, device.index):
        raise ExchangeBufferError(
            f"GPU {other.index} cannot read the memory of GPU {device.index}, as --kv-cache-ranks requires: choose GPUs "
            "with peer access by --base-gpu-id (see `nvidia-smi topo -p2p r`), or pass --kv-cache-ranks 0"
        )


def copy_tokens(puts: Sequence[StagedTokens], of_layers: Sequence[torch.Tensor], slots: torch.Tensor, places: torch.Tensor) -> None:
    """Copy tokens of each layer to staging slots, [places, layers, block, kv_heads, dim], on a CPU.

    Args:
        puts: The staging slots to fill, each from its own index of ``slots`` on.
        of_layers: Buffer of each layer, [slots, kv_heads, dim].
        slots: int64 [tokens], pool slots of the tokens.
        places: The staging slots.
    """
    for place, tokens, first in puts:
        for into, of_layer in zip(places[place], of_layers):
            torch.index_select(of_layer, 0, slots[first : first + tokens], out=into[:tokens])
