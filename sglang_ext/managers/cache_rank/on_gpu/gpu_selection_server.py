"""The server loop of a cache rank on a GPU: copies keys from the exchange buffer, and writes selections to it (exchange_buffer.py).

With values, the rank also sends K and V of selected tokens that a request's compressed KV lacks.

A message arrives as soon as the inference rank's host has launched the kernels that write to the exchange buffer. The server uses the
announced data once the words in the buffer show that it is written. It answers the selection requests of several requests in one batch. Of
each request it answers only the newest one.

If no other work is pending, the server launches the kernels of the next batch early (selection_runner.py). A first kernel waits for the
batch. So no launch delays the reply. The server does not answer selection requests that are not published in time; the host checks
afterwards which ones were. On a CPU, for tests, PyTorch selects.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NoReturn

import torch
import zmq

from sglang_ext.core import OptionError
from sglang_ext.device import Mark
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.on_gpu.selection_runner import SelectionRunner
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBufferError, epoch_word
from sglang_ext.managers.cache_rank.on_gpu.gpu_keys import GpuKeys
from sglang_ext.managers.cache_rank.on_gpu.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BLOCK, StagedTokens, ProtocolError
from sglang_ext.managers.cache_rank.selection_server import BEAT_SECONDS, PROBED, SelectionServer

# Maximum wait of the device, and the host, for the batch of a launch ahead. A heartbeat fits in between.
AHEAD_SECONDS = BEAT_SECONDS / 2


class GpuSelectionServer(SelectionServer):
    """Serves one inference rank over one socket and an exchange buffer.

    Args:
        socket: Socket connected to the inference rank.
        descriptor: Descriptor of the exchange buffer on a CPU; None on a GPU, where the first message carries its handle.
        epoch: Epoch of this process.
        device: Device that runs the selection.
    """

    def __init__(self, socket: zmq.Socket, descriptor: int | None, epoch: int, device: torch.device):
        super().__init__(socket, descriptor, epoch, device)
        self._by_kernels, self._on_other_gpu = descriptor is None, False
        self._announced: deque[protocol.Append | protocol.SelectionRequest] = deque()
        # For each lane the word of the newest selection request that was not written because its slot was in use.
        self._unwritten: dict[int, int] = {}

    @property
    def _busy(self) -> bool:
        return bool(self._announced) or super()._busy

    def _open(self, told: protocol.Attach) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._store = KeyStore(told.shape, told.blocks, told.scaling, told.bits, self._device)
            self._memory = MappedExchangeBuffer(told.shape, self._device, told.arena, self._descriptor)
        except ExchangeBufferError as error:
            self._refuse(str(error))
        except torch.OutOfMemoryError as error:
            self._refuse_room(f"{'full KV' if told.shape.rows else 'keys'} of {told.blocks * BLOCK} tokens", error)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._keys, self._on_other_gpu = GpuKeys(self._store, told.scaling, self._device), told.apart
        kinds = self._method, self._rotary, self._device, self._by_kernels
        self._answering = SelectionRunner(self._memory, self._keys, self._store, *kinds)

    def _probe(self) -> float:
        """Compile and load all kernels, then return seconds of one layer's selection."""
        shape, tokens = self._memory.shape, min(PROBED, self._store.blocks * BLOCK)
        self._keys.clear(tokens)
        if self._by_kernels:
            try:
                self._meet_lengths(tokens)
            except torch.OutOfMemoryError as error:
                self._refuse_room("selections in addition to the stored KV", error)
            except OptionError as error:
                self._refuse(f"its GPU cannot select tokens: {error}")
        for _ in range(2):
            begun = time.perf_counter()
            self._keys.pull(self._memory, [StagedTokens(0, 1, 0)])
            self._run_dummy_batch(tokens, tokens)
            self._wait()
        return (time.perf_counter() - begun) / shape.layers

    def _refuse_room(self, what: str, error: torch.OutOfMemoryError) -> NoReturn:
        self._refuse(
            f"its GPU has no room for {what}: pass a smaller --kv-cache-rank-gb, or select another GPU with --kv-cache-rank-gpu ({error})"
        )

    def _run_dummy_batch(self, tokens: int, cleared: int) -> None:
        """Run a whole batch for one dummy selection request among ``tokens`` tokens, using the first ``cleared`` slots repeatedly. Its
        word is the initial word of lanes."""
        shape = self._memory.shape
        keep = max(1, min(shape.most, tokens // 8))
        ask = protocol.SelectionRequest(0, 0, shape.layers, 0, tokens, keep, tuple(range(shape.window)))
        self._answering.hold(0, torch.arange(tokens, device=self._device) % cleared)
        prepared = self._answering.prepare([ask], [self._word(ask)], again=True)
        self._memory.await_words(prepared.inputs.asked, prepared.inputs.there, epoch_word(self._epoch, 0), AHEAD_SECONDS)()
        prepared.launch()
        self._answering.forget(0)

    def _meet_lengths(self, cleared: int) -> None:
        """Run one selection for each context length that uses a different kernel, up to the capacity, with the cleared keys.

        So no request waits for a compiler, or for a kernel to load.
        """
        from sglang_ext.layers.kernels.select_tokens import compile_ahead, kernel_lengths

        longest, always = self._store.blocks * BLOCK, (self._method.sinks, self._method.recent)
        compile_ahead(self._keys.buffers.keys[0], self._memory.shape.query_heads, always, longest)
        # Longest first, so that the others reuse its memory.
        for length in reversed(kernel_lengths(longest)):
            self._run_dummy_batch(length, cleared)
        self._wait()

    def _wait(self) -> None:
        """Wait until the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _word(self, ask: protocol.SelectionRequest) -> int:
        return epoch_word(self._epoch, ask.sequence)

    def _asked(self, ask: protocol.SelectionRequest) -> None:
        shape = self._memory.shape
        if ask.count != shape.layers or ask.lane >= shape.lanes or not ask.keep <= min(ask.covered, shape.most):
            raise ProtocolError(f"{ask} goes beyond {shape}")
        self._announced.append(ask)

    def _append(self, told: protocol.Append) -> None:
        last = max(piece.place for piece in told.pieces)
        if last >= self._memory.shape.places:
            raise ProtocolError(f"place {last} was named, of {self._memory.shape.places}")
        self._announced.append(told)

    def _lease(self, told: protocol.Lease) -> None:
        super()._lease(told)
        self._answering.forget(told.lane)

    def _drop(self, lane: int) -> list[protocol.SelectionRequest]:
        asks = [each for each in self._announced if isinstance(each, protocol.SelectionRequest) and each.lane == lane]
        self._announced = deque(each for each in self._announced if each not in asks)
        self._answering.forget(lane)
        return super()._drop(lane) + asks

    def _skip(self, ask: protocol.SelectionRequest | None) -> None:
        if ask is not None:
            self._memory.skip_requests([(ask.lane, self._word(ask))])
        super()._skip(ask)

    def _answer_next(self) -> None:
        # Keys that arrived with selection requests count in their duration.
        begun, answered = Mark.now(self._device), []
        if self._announced:
            self._pull(*self._memory.read_words())
        if coming := self._next_batch():
            answered += self._answer_ahead(coming)
            begun = Mark.now(self._device)
        for _, group in groupby(sorted(self._questions.all(), key=_batch_key), key=_batch_key):
            answered += self._answer(list(group), begun)
            begun = Mark.now(self._device)
        newest = {ask.lane: self._word(ask) for ask in answered}
        passed = [(lane, word) for lane, word in self._unwritten.items() if word > newest.get(lane, 0)]
        if passed:
            # Mark their predecessors in the lanes as done, so that slots are free again.
            self._memory.skip_requests(passed)
        self._unwritten.clear()

    def _next_batch(self) -> list[protocol.SelectionRequest]:
        """Return the batch that is published next, if it is the only pending work and can be answered together; otherwise an empty list."""
        if (
            not self._on_other_gpu or self._questions.waiting or not self._announced
            or not isinstance(self._announced[0], protocol.SelectionRequest)
        ):  # fmt: skip
            return []
        first = self._announced[0]
        asks = [*takewhile(lambda each: isinstance(each, protocol.SelectionRequest) and each.number == first.number, self._announced)]
        whole = len(asks) == first.together == len({ask.lane for ask in asks})
        return asks if whole and len({_batch_key(ask) for ask in asks}) == 1 else []

    def _answer_ahead(self, asks: Sequence[protocol.SelectionRequest]) -> list[protocol.SelectionRequest]:
        """Launch the batch that is published next, ahead of its publication. Return the selection requests that were published in time,
        and take other data that has arrived."""
        words = [self._word(ask) for ask in asks]
        # Prepare before the device waits: copies from the host would wait for it.
        (inputs, launch), number = self._answering.prepare(asks, words, again=True), epoch_word(self._epoch, asks[0].number)
        seen = self._memory.await_words(inputs.asked, inputs.there, number, AHEAD_SECONDS)
        begun = Mark.now(self._device)
        launch()
        done = Mark.now(self._device)
        written, heads = seen()
        # Use the same words as the device.
        there = [ask for ask in asks if written >= number and self._is_published(ask, heads)]
        self._announced = deque(each for each in self._announced if each not in there)
        self._pull(written, heads)
        self._send_replies(there, begun, done)
        return there

    def _is_published(self, ask: protocol.SelectionRequest, heads: Sequence[Sequence[int]]) -> bool:
        return heads[ask.lane][self._word(ask) % 2] == self._word(ask)

    def _pull(self, written: int, heads: Sequence[Sequence[int]]) -> None:
        """Take the announced data that the words show as written. Keys announced after a selection request wait until it is answered."""
        taken: list[StagedTokens] = []
        while self._announced and epoch_word(self._epoch, self._announced[0].number) <= written:
            message = self._announced[0]
            if isinstance(message, protocol.Append):
                if self._questions.waiting:
                    break
                taken += (StagedTokens(piece.place, piece.tokens, self._store.first_slot(piece)) for piece in message.pieces)
            elif self._is_published(message, heads):
                self._skip(self._questions.add(message))
            else:
                self._unwritten[message.lane] = self._word(message)
                self._say(self._about(message, False, 0.0))
            self._announced.popleft()
        if taken:
            self._keys.pull(self._memory, taken)
            self._wait()
            self._say(protocol.PlacesFreed(self._epoch, tuple(each.place for each in taken)))

    def _answer(self, asks: Sequence[protocol.SelectionRequest], begun: Mark) -> Sequence[protocol.SelectionRequest]:
        """Answer and return published selection requests with equal numbers of queries and equal ``ahead``. ``begun``: start of their
        work."""
        self._answering.prepare(asks, [self._word(ask) for ask in asks]).launch()
        self._send_replies(asks, begun, Mark.now(self._device))
        return asks

    def _send_replies(self, asks: Sequence[protocol.SelectionRequest], begun: Mark, done: Mark) -> None:
        """Wait until selection requests are answered, and send the replies."""
        self._wait()
        for ask in asks:
            self._say(self._about(ask, True, begun.until(done), len(asks)))


def _batch_key(ask: protocol.SelectionRequest) -> tuple[int, int]:
    """Key of the selection requests that can be answered together."""
    return len(ask.positions), ask.ahead
