"""The cache rank's access to an inference rank's exchange buffer (exchange_buffer.py).

On a GPU it uses raw addresses, because PyTorch has no tensors of another GPU's memory without a context there.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from sglang_ext.device import SideStream, to_device
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBufferError
from sglang_ext.managers.cache_rank.protocol import BLOCK, CHOSEN, DONE, LANE_WORDS, QUESTION_NUMBERS, BufferShape, ExchangeLayout, StagedTokens
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.row_exchange import missing_mask, plan_exchange, top_mask
from sglang_ext.mem_cache.selection.on_gpu import MarkedPart

# The written word, and the words of each lane, on a CPU of each pack.
Words = tuple[int, Sequence[Sequence[int]]]


class MappedExchangeBuffer:
    """The cache rank's access to the exchange buffer; on a GPU by addresses of the other GPU's mapped memory.

    In all methods ``asked`` is int64 [requests, :data:`QUESTION_NUMBERS`]: index of the words (:meth:`BufferShape.entry`; the lane on a
    GPU), word, and kept tokens per head of each selection request. ``there`` is int32 [requests]: 1 for each selection request that is
    published.

    ``device`` is that of the cache rank. On a GPU, ``handle`` is the CUDA IPC handle. On a CPU, ``descriptor`` is that of the shared memory.

    Raises:
        ExchangeBufferError: The memory cannot be mapped.
    """

    def __init__(self, shape: BufferShape, device: torch.device, handle: bytes, descriptor: int | None):
        self.shape, self._device, self._layout = shape, device, ExchangeLayout(shape)
        self._item = getattr(torch, shape.dtype).itemsize
        self._copy_stream = SideStream(device)
        self._base = open_ipc_handle(handle, device) if descriptor is None else None
        if descriptor is not None:
            memory = torch.frombuffer(mmap.mmap(descriptor, self._layout.size), dtype=torch.uint8)
            self._heads, self._written, self._queries, self._keys, self._chosen, *rows = self._layout.views(memory)
            self._values, self._records, *self._row_regions = rows

    def read_words(self) -> Words:
        """Return the written word, and the words of each lane. Waits for the device."""
        none = torch.empty(0, QUESTION_NUMBERS, dtype=torch.int64, device=self._device)
        return self.await_words(none, none.new_empty(0, dtype=torch.int32), 0, 0.0)()

    def await_words(self, asked: torch.Tensor, there: torch.Tensor, least: int, seconds: float) -> Callable[[], Words]:
        """Make the stream wait until the written word reaches ``least``, at most ``seconds``, and then read all words.

        Returns a function that waits for the words and returns them. Kernels launched next are ordered after the read on the device. They
        learn from the same words which selection requests are published, by the output ``there``. On a CPU this call itself waits.
        """
        if self._base is None:
            until = time.monotonic() + seconds
            while int(self._written[0]) < least and time.monotonic() < until:
                time.sleep(1e-4)
            # With packs, a view of the words: a list of so many would take as long as a selection.
            found = int(self._written[0]), self._heads.tolist() if self.shape.packs == 1 else self._heads.numpy()
            put = [int(found[0] >= least and found[1][entry][word % 2] == word) for entry, word, _ in asked.tolist()]
            there.copy_(torch.tensor(put, dtype=torch.int32))
            return lambda: found
        from sglang_ext.layers.kernels.exchange_kernels import read_words

        out = torch.empty(1 + self.shape.lanes * LANE_WORDS, dtype=torch.int64, device=self._device)
        # Allocate before the device waits: a new pinned allocation would wait for the device.
        host = out if self._device.type == "cpu" else torch.empty_like(out, device="cpu", pin_memory=True)
        read_words(self._base + self._layout.heads.begin, self._base + self._layout.written.begin, out, asked, there, least, seconds)
        if host is out:
            return lambda: _words(out)
        # On a second stream, because the next kernels would otherwise wait for the copy.
        copied = self._copy_stream.launch(lambda: host.copy_(out, non_blocking=True), [out])

        def words() -> Words:
            copied.synchronize()
            return _words(host)

        return words

    def pull_queries(self, asked: torch.Tensor, count: int, layers: int) -> torch.Tensor:
        """Copy the queries of selection requests with ``count`` queries each: [requests, layers, count, query_heads, dim]. ``layers``: layers
        of their packs; all layers on a GPU."""
        shape = self.shape
        if self._base is None:
            parts = [(*divmod(entry, shape.packs), word % 2) for entry, word, _ in asked.tolist()]
            return torch.stack([self._queries[lane, parity, first : first + layers, :count] for lane, first, parity in parts])
        of_query = int32_words(shape.query_heads * shape.dim * self._item)
        of_place = shape.layers * shape.window * of_query
        steps = 2 * of_place, of_place
        found = self._gather(self._layout.queries.begin, asked, shape.layers, count * of_query, shape.window * of_query, steps)
        return found.view(getattr(torch, shape.dtype)).view(len(asked), shape.layers, count, shape.query_heads, shape.dim)

    def _gather(self, begin: int, asked: torch.Tensor, rows: int, length: int, apart: int, steps: tuple[int, int]) -> torch.Tensor:
        """Copy rows of the lanes of a region from byte ``begin`` on: int32 [requests, rows, length]. Other arguments as the kernel's."""
        from sglang_ext.layers.kernels.exchange_kernels import gather_rows

        found = torch.empty(len(asked), rows, length, dtype=torch.int32, device=self._device)
        gather_rows(self._base + begin, asked, found, length, apart, steps)
        return found

    def pull(self, pulls: Sequence[StagedTokens], into: torch.Tensor, values: bool = False) -> None:
        """Copy keys, or ``values``, from staging slots to ``into``, [layers, all tokens, kv_heads, dim], each layer contiguous.

        Each of ``pulls`` names its first target token. No target token occurs twice.
        """
        if self._base is None:
            for place, tokens, first in pulls:
                into[:, first : first + tokens] = (self._values if values else self._keys)[place, :, :tokens]
            return
        from sglang_ext.layers.kernels.exchange_kernels import pull_blocks

        token, part = self.shape.kv_heads * self.shape.dim * self._item, self._layout.values if values else self._layout.keys
        told, layers = to_device(list(pulls), self._device), self.shape.layers
        words = int32_words(token), int32_words(BLOCK * token), int32_words(into.stride(0) * self._item)
        pull_blocks(self._base + part.begin, into.data_ptr(), told, layers, *words)

    def push_chosen(self, asked: torch.Tensor, there: torch.Tensor, chosen: torch.Tensor) -> None:
        """Write the selections of published selection requests: positions, int32 [layers, requests, kv_heads, most]."""
        if self._base is None:
            for i, (entry, word, keep) in _published(asked, there):
                kept = chosen[:, i, :, :keep]
                lane, numbers = self.shape.numbers(entry, kept.numel())
                self._chosen[lane, word % 2, numbers] = kept.flatten()
            return
        from sglang_ext.layers.kernels.exchange_kernels import push_chosen

        to = self._layout.chosen
        push_chosen(chosen, asked, there, self._base + to.begin, math.prod(to.sizes[2:]))

    def records(self, asked: torch.Tensor, most: int) -> torch.Tensor:
        """Copy the positions that compressed KV holds: int32 [requests, numbers], [layers, kv_heads, keep] at the beginning. Heads keep
        at most ``most`` tokens."""
        shape, part = self.shape, self._layout.records
        # Numbers after a shorter record are undefined.
        return self._gather(part.begin, asked, 1, shape.layers * shape.kv_heads * most, 0, (part.sizes[1], 0)).squeeze(1)

    def push_rows(
        self, asked: torch.Tensor, there: torch.Tensor, parts: Iterable[MarkedPart], records: torch.Tensor, held: KVBuffers,
        streams: tuple[SideStream, SideStream],
    ) -> None:  # fmt: skip
        """Write K and V of marked tokens that the compressed KV lacks. If they exceed the room, write those of the highest scores.

        ``parts`` are the marked tokens of all layers, part by part as they are marked. ``records`` is the result of :meth:`records`, computed
        on the first of the ``streams``. This stream finds the rows to send. The second sends those of one part of ``held``, the rank's K and
        V, while the next parts are marked.
        """
        from sglang_ext.layers.kernels import row_exchange

        layout, (finding, sending), tables, kept = self._layout, streams, (held.key_table, held.value_table), []
        targets = tuple(self._base + part.begin for part in (layout.counts, layout.moves, layout.row_keys, layout.row_values))
        most = records.shape[1] // (self.shape.layers * self.shape.kv_heads)
        for part in parts:
            with finding.after(part.there):
                comes = row_exchange.exchange(part.marked, records, most, self.shape.fresh)
                part.was_read(self._device)
            with sending.after(part.read):
                row_exchange.push_rows(tables, held.keys[0], comes, asked, there, targets, part.layers.start, part.requests.start)
            # Keep it, or the first stream would reuse its memory before it is sent.
            kept.append(comes)
        finding.join()
        sending.join()

    def push_rows_on_cpu(
        self, asked: torch.Tensor, there: torch.Tensor, chosen: torch.Tensor, bits: torch.Tensor, table: torch.Tensor, held: KVBuffers
    ) -> None:
        """Like :meth:`push_rows`, on a CPU.

        ``chosen``, ``bits``: int32 [pack layers, requests, kv_heads, most], positions, and bits of their scores. ``table``: int32 [requests,
        longest], slots of the tokens. ``held``: K and V at the rank.
        """
        for i, (entry, _, keep) in _published(asked, there):
            wanted, places, heads = chosen[:, i, :, :keep].long(), table[i].long(), self.shape.kv_heads
            record = self._records[self.shape.numbers(entry, wanted.numel())].view(wanted.shape).long()
            # Leaving and arriving rows are equal in number, except if the record is overwritten meanwhile. Then the reply is not applied.
            going = missing_mask(record, wanted).sum(-1, keepdim=True)
            coming = top_mask(missing_mask(wanted, record), bits[:, i, :, :keep], going.clamp(max=self.shape.fresh))
            found = plan_exchange(record, wanted, coming)
            counts, moves, *rows = (part[self.shape.pairs(entry, len(wanted))] for part in self._row_regions)
            counts.copy_(coming.sum(-1).flatten())
            pair = found.layers * heads + found.heads
            index = coming.cumsum(-1)[found.layers, found.heads, found.wanted] - 1
            moves[pair, index] = torch.stack([found.places, found.positions], -1).int()
            for layer in range(len(wanted)):
                at = entry % self.shape.packs + layer
                these = found.layers == layer
                slots = places[found.positions[these]]
                for into, part in zip(rows, (held.keys[at], held.values[at])):
                    into[pair[these], index[these]] = part[slots, found.heads[these]]

    def answer(self, asked: torch.Tensor, there: torch.Tensor) -> None:
        """Mark published selection requests as done, and as answered if they keep tokens. All earlier pushes are visible first."""
        if self._base is not None:
            from sglang_ext.layers.kernels.exchange_kernels import answer

            answer(self._base + self._layout.heads.begin, asked, there)
            return
        for _, (lane, word, keep) in _published(asked, there):
            if keep:
                self._heads[lane, CHOSEN + word % 2] = word
            self._heads[lane, DONE] = word

    def skip_requests(self, questions: Sequence[tuple[int, int]]) -> None:
        """Mark selection requests, given by lane and word, as done without a reply."""
        asked = to_device([[lane, word, 0] for lane, word in questions], self._device)
        self.answer(asked, torch.ones_like(asked[:, 0], dtype=torch.int32))


def _published(asked: torch.Tensor, there: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Index and numbers of each published selection request."""
    return [(i, numbers) for i, (numbers, put) in enumerate(zip(asked.tolist(), there.tolist())) if put]


def _words(read: torch.Tensor) -> Words:
    written, *words = read.tolist()
    return written, [words[at : at + LANE_WORDS] for at in range(0, len(words), LANE_WORDS)]


def int32_words(size: int) -> int:
    """Return the number of 32-bit words in ``size`` bytes. If the size is not a multiple of 4, raise :class:`ExchangeBufferError`."""
    if size % 4:
        raise ExchangeBufferError(f"a row of {size} bytes is not a multiple of 4 bytes, the unit of transfer: pass --kv-cache-ranks 0")
    return size // 4


def open_ipc_handle(handle: bytes, device: torch.device) -> int:
    """Map another process's memory by its CUDA IPC handle, and return its address. If that fails, raise :class:`ExchangeBufferError`."""
    from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary, cudaIpcMemHandle_t

    size = ctypes.sizeof(cudaIpcMemHandle_t)
    with torch.cuda.device(device):
        try:
            return CudaRTLibrary().cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle.ljust(size, b"\0"))).value
        except RuntimeError as error:
            raise ExchangeBufferError(
                f"memory of the inference rank cannot be mapped on {device}: {error}; both processes need one user and one host, "
                "and their containers the same IPC namespace; or pass --kv-cache-ranks 0"
            ) from error
