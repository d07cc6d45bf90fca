"""An inference rank's arena (exchange_buffer.py) as the cache rank has it: on a GPU by addresses alone, as PyTorch has no tensors of another one's memory
without a context there.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from sglang_ext.device import SideStream, to_device
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import QUESTION_NUMBERS, CHOSEN, DONE, LANE_WORDS, ExchangeBufferError, ExchangeLayout, BufferRegion
from sglang_ext.managers.cache_rank.protocol import BLOCK, StagedTokens, BufferShape
from sglang_ext.mem_cache.compressed.row_exchange import missing_mask, exchange, top_mask
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.selection.on_gpu import MarkedPart

# How much was written, and the words of each lane.
Words = tuple[int, list[list[int]]]


class MappedExchangeBuffer:
    """An arena as the cache rank sees it: by addresses on a GPU, which memory of another is read and written by.

    Args:
        shape: of the rank.
        device: of the cache rank.
        handle: CUDA IPC handle; of no use on a CPU.
        descriptor: of shared memory, on a CPU; None on a GPU.

    Raises:
        ExchangeBufferError: the memory cannot be mapped.
    """

    def __init__(self, shape: BufferShape, device: torch.device, handle: bytes, descriptor: int | None):
        self.shape, self._device, self._layout = shape, device, ExchangeLayout.from_shape(shape)
        self._beside = SideStream(device)
        self._base = open_ipc_handle(handle, device) if descriptor is None else None
        if descriptor is not None:
            memory = torch.frombuffer(mmap.mmap(descriptor, self._layout.size), dtype=torch.uint8)
            self._heads, self._written, self._queries, self._keys, self._chosen, *rows = self._layout.views(memory)
            self._values, self._records, *self._arrived = rows

    def _address(self, part: BufferRegion, *index: int) -> int:
        """Of what ``index`` leads to in a part."""
        at = 0
        for number, size in zip(index, part.sizes):
            at = at * size + number
        return self._base + part.begin + at * math.prod(part.sizes[len(index) :]) * part.dtype.itemsize

    @property
    def _item(self) -> int:
        return getattr(torch, self.shape.dtype).itemsize

    def read_words(self) -> Words:
        """How much was written, and the words of each lane; waits for the device."""
        none = torch.empty(0, QUESTION_NUMBERS, dtype=torch.int64, device=self._device)
        return self.await_words(none, none.new_empty(0, dtype=torch.int32), 0, 0.0)()

    def await_words(self, asked: torch.Tensor, there: torch.Tensor, least: int, seconds: float) -> Callable[[], Words]:
        """Let the stream wait until ``least`` was written, no longer than ``seconds``, and read words then; waits for these, and says them.

        What is launched next follows them on the device, which knows by the same words which questions are there. On a CPU that is done at
        once.

        Args:
            asked: int64 [questions, :data:`QUESTION_NUMBERS`], lane, word, and tokens that each head keeps.
            there: int32 [questions], that will be 1 for each that is there: as in all methods that answer them.
            least: as a question's number is written that is there.
            seconds: 0 to look at once.
        """
        if self._base is None:
            until = time.monotonic() + seconds
            while int(self._written[0]) < least and time.monotonic() < until:
                time.sleep(1e-4)
            found = int(self._written[0]), self._heads.tolist()
            put = [found[0] >= least and found[1][lane][word % 2] == word for lane, word, _ in asked.tolist()]
            there.copy_(torch.tensor(put, dtype=torch.int32))
            return lambda: found
        from sglang_ext.layers.kernels.exchange_kernels import read_words

        out = torch.empty(1 + self.shape.lanes * LANE_WORDS, dtype=torch.int64, device=self._device)
        # Before the device waits, for which pages that are pinned anew would wait.
        host = out if self._device.type == "cpu" else torch.empty_like(out, device="cpu", pin_memory=True)
        read_words(self._address(self._layout.heads), self._address(self._layout.written), out, asked, there, least, seconds)
        if host is out:
            return lambda: _words(out)
        # Beside what is launched next, which would wait for the copy.
        copied = self._beside.launch(lambda: host.copy_(out, non_blocking=True), [out])

        def words() -> Words:
            copied.synchronize()
            return _words(host)

        return words

    def pull_queries(self, asked: torch.Tensor, count: int) -> torch.Tensor:
        """Queries of questions with so many each: [questions, layers, count, query_heads, dim]."""
        shape = self.shape
        if self._base is None:
            return torch.stack([self._queries[lane, word % 2, :, :count] for lane, word, _ in asked.tolist()])
        of_query = int32_words(shape.query_heads * shape.dim * self._item)
        of_place = shape.layers * shape.window * of_query
        steps = 2 * of_place, of_place
        found = self._gathered(self._layout.queries, asked, shape.layers, count * of_query, shape.window * of_query, steps)
        return found.view(getattr(torch, shape.dtype)).view(len(asked), shape.layers, count, shape.query_heads, shape.dim)

    def _gathered(
        self, part: BufferRegion, asked: torch.Tensor, rows: int, length: int, apart: int, steps: tuple[int, int]
    ) -> torch.Tensor:
        """Of places of questions in a part so many rows of words each, int32 [questions, rows, length].

        Args:
            part: of the arena.
            asked: the questions.
            rows: of each.
            length: words of a row.
            apart: words from a row to the next.
            steps: words from a lane to the next, and from the place of even words to that of odd ones.
        """
        from sglang_ext.layers.kernels.exchange_kernels import gather_rows

        found = torch.empty(len(asked), rows, length, dtype=torch.int32, device=self._device)
        gather_rows(self._address(part), asked, found, length, apart, steps)
        return found

    def pull(self, pulls: Sequence[StagedTokens], into: torch.Tensor, values: bool = False) -> None:
        """Keys of places, or ``values``, to ``into``, [layers, all tokens, kv_heads, dim], each layer of one piece, from their first there on;
        none twice to one token."""
        if self._base is None:
            for place, tokens, first in pulls:
                into[:, first : first + tokens] = (self._values if values else self._keys)[place, :, :tokens]
            return
        from sglang_ext.layers.kernels.exchange_kernels import pull_blocks

        token, part = self.shape.kv_heads * self.shape.dim * self._item, self._layout.values if values else self._layout.keys
        told, layers = to_device(list(pulls), self._device), self.shape.layers
        words = int32_words(token), int32_words(BLOCK * token), int32_words(into.stride(0) * self._item)
        pull_blocks(self._address(part), into.data_ptr(), told, layers, *words)

    def push_chosen(self, asked: torch.Tensor, there: torch.Tensor, chosen: torch.Tensor) -> None:
        """Answers to questions that are there: positions, int32 [layers, questions, kv_heads, most]."""
        if self._base is None:
            for i, (lane, word, keep) in _those(asked, there):
                kept = chosen[:, i, :, :keep]
                self._chosen[lane, word % 2, : kept.numel()] = kept.flatten()
            return
        from sglang_ext.layers.kernels.exchange_kernels import push_chosen

        to = self._layout.chosen
        push_chosen(chosen, asked, there, self._address(to), math.prod(to.sizes[2:]))

    def records(self, asked: torch.Tensor, most: int) -> torch.Tensor:
        """Of questions whose heads keep ``most`` tokens at most, the positions that their copies hold: int32 [questions, numbers], [layers,
        kv_heads, keep] at the beginning."""
        shape, part = self.shape, self._layout.records
        # What is behind a shorter one is nothing.
        return self._gathered(part, asked, 1, shape.layers * shape.kv_heads * most, 0, (part.sizes[1], 0)).squeeze(1)

    def push_rows(
        self, asked: torch.Tensor, there: torch.Tensor, parts: Iterable[MarkedPart], records: torch.Tensor, held: KVBuffers,
        streams: tuple[SideStream, SideStream],
    ) -> None:  # fmt: skip
        """K and V of what is marked for questions that are there and their copies do not hold; of more than have room those of the highest
        scores.

        Args:
            asked, there: as :meth:`await_words` has them.
            parts: of all layers, as they are marked.
            records: as :meth:`records` has them, of the first of the streams.
            held: what is held here.
            streams: of what finds which rows come, and of what sends those of one part while the next ones are marked.
        """
        from sglang_ext.layers.kernels.row_exchange import send_rows

        layout, (finding, sending), tables, kept = self._layout, streams, (held.key_table, held.value_table), []
        targets = tuple(self._address(part) for part in (layout.counts, layout.moves, layout.row_keys, layout.row_values))
        most = records.shape[1] // (self.shape.layers * self.shape.kv_heads)
        for part in parts:
            with finding.after(part.there):
                comes = send_rows.exchange(part.marked, records, most, self.shape.fresh)
                part.was_read(self._device)
            with sending.after(part.read):
                send_rows.push_rows(tables, held.keys[0], comes, asked, there, targets, part.layers.start, part.requests.start)
            # Kept, or the stream that finds would take its memory again before it was sent.
            kept.append(comes)
        finding.join()
        sending.join()

    def push_rows_on_cpu(
        self, asked: torch.Tensor, there: torch.Tensor, chosen: torch.Tensor, bits: torch.Tensor, table: torch.Tensor, held: KVBuffers
    ) -> None:
        """On a CPU, as :meth:`push_rows`, of positions and bits of their scores, int32 [layers, questions, kv_heads, most]; ``table``: where
        tokens of questions lie, int32 [questions, longest]."""
        for i, (lane, _, keep) in _those(asked, there):
            self._push_rows_of(lane, chosen[:, i, :, :keep], bits[:, i, :, :keep], table[i].long(), held)

    def _push_rows_of(
        self, lane: int, chosen: torch.Tensor, bits: torch.Tensor, places: torch.Tensor, held: KVBuffers
    ) -> None:
        """As :meth:`push_rows_on_cpu`, of one request: int32 [layers, kv_heads, keep] each."""
        record, chosen = self._records[lane, : chosen.numel()].view(chosen.shape).long(), chosen.long()
        # As many places go as tokens come, but in a record that is written meanwhile, of which the answer is not taken.
        going = missing_mask(record, chosen).sum(-1, keepdim=True)
        coming = top_mask(missing_mask(chosen, record), bits, going.clamp(max=self.shape.fresh))
        found = exchange(record, chosen, coming)
        counts, moves, *rows = (part[lane] for part in self._arrived)
        counts.copy_(coming.sum(-1).flatten())
        pair = found.layers * self.shape.kv_heads + found.heads
        index = coming.cumsum(-1)[found.layers, found.heads, found.wanted] - 1
        moves[pair, index] = torch.stack([found.places, found.positions], -1).int()
        for layer in range(self.shape.layers):
            these = found.of_layer(layer)
            slots, heads = places[found.positions[these]], found.heads[these]
            for into, part in zip(rows, (held.keys[layer], held.values[layer])):
                into[pair[these], index[these]] = part[slots, heads]

    def answer(self, asked: torch.Tensor, there: torch.Tensor) -> None:
        """Say of questions that are there that they are done with, and, where tokens are kept, that there is an answer. What was pushed before
        can be seen then."""
        if self._base is not None:
            from sglang_ext.layers.kernels.exchange_kernels import answer

            answer(self._address(self._layout.heads), asked, there)
            return
        for _, (lane, word, keep) in _those(asked, there):
            if keep:
                self._heads[lane, CHOSEN + word % 2] = word
            self._heads[lane, DONE] = word

    def skip_requests(self, questions: Sequence[tuple[int, int]]) -> None:
        """Say of questions, by lane and word, that they are done with, without an answer."""
        asked = to_device([[lane, word, 0] for lane, word in questions], self._device)
        self.answer(asked, torch.ones_like(asked[:, 0], dtype=torch.int32))


def _those(asked: torch.Tensor, there: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Questions that are there, with their numbers."""
    return [(i, numbers) for i, (numbers, put) in enumerate(zip(asked.tolist(), there.tolist())) if put]


def _words(read: torch.Tensor) -> Words:
    written, *words = read.tolist()
    return written, [words[at : at + LANE_WORDS] for at in range(0, len(words), LANE_WORDS)]


def int32_words(size: int) -> int:
    """Words of 32 bits of so many bytes.

    Raises:
        ExchangeBufferError: they are no whole number.
    """
    if size % 4:
        raise ExchangeBufferError(f"a row of {size} bytes is no whole number of words of 32 bits, in which it travels: pass --kv-cache-ranks 0")
    return size // 4


def open_ipc_handle(handle: bytes, device: torch.device) -> int:
    """The address of another process's memory on the GPU ``device``, by its CUDA IPC handle.

    Raises:
        ExchangeBufferError: it cannot be mapped.
    """
    from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary, cudaIpcMemHandle_t

    size = ctypes.sizeof(cudaIpcMemHandle_t)
    with torch.cuda.device(device):
        try:
            return CudaRTLibrary().cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle.ljust(size, b"\0"))).value
        except RuntimeError as error:
            raise ExchangeBufferError(
                f"memory of the inference rank cannot be mapped on {device}: {error}; both processes need one user and one host, "
                "and their containers one IPC namespace; or pass --kv-cache-ranks 0"
            ) from error
