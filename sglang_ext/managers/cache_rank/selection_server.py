"""The server loop of a cache rank: copies keys from the exchange buffer, and writes selections to it (exchange_buffer.py).

A message arrives as soon as the inference rank's host has launched the kernels that write to the exchange buffer, on a CPU after the data is
written. The server uses the announced data once the words in the buffer show that it is written. Of two selection requests for the same
request and pack of layers it answers only the newer. It answers the selection requests of several requests in one batch, but those of packs
one after another, oldest first.

If no other work is pending, the server on a GPU launches the kernels of the next batch early (selection_runner.py). A first kernel waits for
the batch. So no launch delays the reply. The server does not answer selection requests that are not published in time; the host checks
afterwards which ones were.

The process ends on SIGTERM, and when its parent process has ended.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby, takewhile
from typing import NoReturn

import torch
import zmq

from sglang_ext.core import OptionError, run_periodically
from sglang_ext.device import Mark
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBufferError
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_REASON_CHARS, VERSION, StagedTokens, epoch_word
from sglang_ext.managers.cache_rank.selection_runner import SelectionRunner
from sglang_ext.managers.kv_transfer.wire import WireError, encode
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.predictors import query_predictor

BEAT_SECONDS = 0.2
# Maximum wait of the device, and the host, for the batch of a launch ahead. A heartbeat fits in between.
AHEAD_SECONDS = BEAT_SECONDS / 2
# Tokens of the selection at start that measures its duration.
PROBE_TOKENS = 1024


class SelectionServer:
    """Serves one inference rank over one socket and an exchange buffer.

    On a CPU, ``descriptor`` is that of the exchange buffer. On a GPU it is None, because the first message carries the buffer's handle.
    ``epoch`` is that of this process. ``device`` runs the selection.
    """

    def __init__(self, socket: zmq.Socket, descriptor: int | None, epoch: int, device: torch.device):
        self._socket, self._descriptor, self._epoch, self._device = socket, descriptor, epoch, device
        # Selection requests that were published, by lane and first layer, oldest first.
        self._waiting: dict[tuple[int, int], protocol.SelectionRequest] = {}
        self._memory: MappedExchangeBuffer | None = None
        # Guards the socket, because another thread may send heartbeats.
        self._sending, self._last_heartbeat = threading.Lock(), 0.0
        self._by_kernels, self._on_other_gpu = descriptor is None, False
        self._announced: deque[protocol.Append | protocol.SelectionRequest] = deque()
        # By index of the words, the word of the newest selection request that was not written because its slot was in use.
        self._unwritten: dict[int, int] = {}

    def serve(self, is_running: Callable[[], bool]) -> None:
        """Run until ``is_running`` returns False. It is called several times a second.

        Raises:
            WireError: The inference rank sent an invalid message.
        """
        self._send(protocol.Heartbeat(self._epoch))
        while is_running():
            # Waiting work must not wait for the next message.
            self._receive(0 if self._announced or self._waiting else int(BEAT_SECONDS * 1000))
            if self._memory is not None:
                self._answer_next()
            if time.monotonic() - self._last_heartbeat > BEAT_SECONDS:
                self._beat()

    def _beat(self) -> None:
        """Send a heartbeat. Skip it if the queue is full because an idle inference rank does not read."""
        self._last_heartbeat = time.monotonic()
        with suppress(zmq.Again), self._sending:
            self._socket.send(encode(protocol.Heartbeat(self._epoch)), zmq.NOBLOCK)

    def _send(self, message: protocol.FromRank) -> None:
        with self._sending:
            self._socket.send(encode(message))
        self._last_heartbeat = time.monotonic()

    def _receive(self, milliseconds: int) -> None:
        """Process all received messages; wait up to ``milliseconds`` for the first."""
        if not self._socket.poll(milliseconds):
            return
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(protocol.decode_to_rank(frame))

    def _handle(self, message: protocol.ToRank) -> None:
        match message:
            case protocol.Attach():
                self._attach(message)
            case protocol.RankPing():
                self._send(protocol.Heartbeat(self._epoch, message.number))
            case _ if self._memory is None:
                raise WireError(f"the first message must be Attach, not {type(message).__name__}")
            case protocol.SelectionRequest() if not self._fits(message):
                raise WireError(f"{message} goes beyond {self._memory.shape}")
            case protocol.Append() if (last := max(piece.place for piece in message.pieces)) >= self._memory.shape.places:
                raise WireError(f"place {last} was named, of {self._memory.shape.places}")
            case protocol.SelectionRequest() | protocol.Append():
                self._announced.append(message)
            case protocol.Lease():
                self._store.lease(message)
                self._answering.forget(message.lane)
            case protocol.Free():
                for request in self._drop(message.lane):
                    self._skip(request)
                self._store.free(message.lane)

    def _fits(self, request: protocol.SelectionRequest) -> bool:
        """Whether the exchange buffer has the request's lane, pack, and kept tokens."""
        shape, last = self._memory.shape, request.first + request.count
        has_pack = last <= shape.layers and (shape.packs > 1 or request.count == shape.layers) and request.lane < shape.lanes
        return has_pack and request.keep <= min(request.covered, shape.most)

    def _drop(self, lane: int) -> list[protocol.SelectionRequest]:
        """Remove and return the selection requests of a lane."""
        requests = [each for each in self._announced if isinstance(each, protocol.SelectionRequest) and each.lane == lane]
        self._announced = deque(each for each in self._announced if each not in requests)
        self._answering.forget(lane)
        return [self._waiting.pop(key) for key in [*self._waiting] if key[0] == lane] + requests

    def _attach(self, told: protocol.Attach) -> None:
        if told.version != VERSION or told.epoch != self._epoch:
            self._refuse(f"version and epoch are {told.version}, {told.epoch} at the inference rank and {VERSION}, {self._epoch} here")
        self._method = Spade(query_predictor(told.predictor), sinks=told.sinks, recent=told.recent)
        self._rotary = Rotary(torch.tensor(told.turning.frequencies, dtype=torch.float32, device=self._device), told.turning.interleaved)
        # Memory is allocated and GPU kernels are compiled here. The loop reads no messages during that time, so a thread sends
        # heartbeats.
        with run_periodically(self._beat, BEAT_SECONDS):
            self._open(told)
            seconds = self._probe()
        self._send(protocol.Attached(self._epoch, seconds))

    def _refuse(self, reason: str) -> NoReturn:
        self._send(protocol.AttachRefused(self._epoch, reason[:MAX_REASON_CHARS]))
        raise WireError(reason)

    def _open(self, told: protocol.Attach) -> None:
        """Allocate the key store, and map the exchange buffer."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._store = KeyStore(told, self._device)
            self._memory = MappedExchangeBuffer(told.shape, self._device, told.arena, self._descriptor)
        except ExchangeBufferError as error:
            self._refuse(str(error))
        except torch.OutOfMemoryError as error:
            self._refuse_room(f"{'full KV' if told.shape.rows else 'keys'} of {told.blocks * BLOCK} tokens", error)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._on_other_gpu = told.apart
        self._answering = SelectionRunner(self._memory, self._store, self._method, self._rotary, self._device, self._by_kernels)

    def _probe(self) -> float:
        """Compile and load all kernels, then return seconds of one layer's selection, measured the second time."""
        shape, tokens = self._memory.shape, min(PROBE_TOKENS, self._store.blocks * BLOCK)
        self._store.clear(tokens)
        if self._by_kernels:
            try:
                self._warm_up_lengths(tokens)
            except torch.OutOfMemoryError as error:
                self._refuse_room("selections in addition to the stored KV", error)
            except OptionError as error:
                self._refuse(f"its GPU cannot select tokens: {error}")
        for _ in range(2):
            begun = time.perf_counter()
            self._store.pull(self._memory, [StagedTokens(0, 1, 0)])
            self._run_dummy_batch(tokens, tokens)
            self._wait()
        return (time.perf_counter() - begun) / shape.layers

    def _refuse_room(self, what: str, error: torch.OutOfMemoryError) -> NoReturn:
        self._refuse(
            f"its GPU has no room for {what}: pass a smaller --kv-cache-rank-gb, or select another GPU with --kv-cache-rank-gpu ({error})"
        )

    def _run_dummy_batch(self, tokens: int, cleared: int) -> None:
        """Run a batch of one dummy request among ``tokens`` tokens, in the first ``cleared`` slots, with the initial word of lanes."""
        shape = self._memory.shape
        keep = max(1, min(shape.most, tokens // 8))
        request = protocol.SelectionRequest(0, 0, shape.layers, 0, tokens, keep, tuple(range(shape.window)))
        self._store.lease(protocol.Lease(0, 0, tuple(index % (cleared // BLOCK) for index in range(-(-tokens // BLOCK)))))
        inputs, launch = self._answering.prepare([request], [self._word(request)], again=True)
        self._memory.await_words(inputs.asked, inputs.there, epoch_word(self._epoch, 0), AHEAD_SECONDS)()
        launch()
        self._store.free(0)
        self._answering.forget(0)

    def _warm_up_lengths(self, cleared: int) -> None:
        """Run one selection for each context length with another kernel, so that no request waits for a compiler or for loading."""
        from sglang_ext.layers.kernels.select_tokens import compile_ahead, kernel_lengths

        longest, always = self._store.blocks * BLOCK, (self._method.sinks, self._method.recent)
        compile_ahead(self._store.buffers.keys[0], self._memory.shape.query_heads, always, longest)
        # Longest first, so that the others reuse its memory.
        for length in reversed(kernel_lengths(longest)):
            self._run_dummy_batch(length, cleared)
        self._wait()

    def _wait(self) -> None:
        """Wait until the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _entry(self, request: protocol.SelectionRequest) -> int:
        return self._memory.shape.entry(request.lane, request.first)

    def _word(self, request: protocol.SelectionRequest) -> int:
        return epoch_word(self._epoch, request.sequence)

    def _skip(self, request: protocol.SelectionRequest | None) -> None:
        """Mark a request as done, and reply that no tokens were selected."""
        if request is not None:
            self._memory.skip_requests([(self._entry(request), self._word(request))])
            self._send_reply(request)

    def _answer_next(self) -> None:
        """Take announced data that has arrived, and answer the next selection requests."""
        # Keys that arrived with selection requests count in their duration.
        begun, answered = Mark.now(self._device), []
        if self._announced:
            self._pull(*self._memory.read_words())
        if coming := self._next_batch():
            answered += self._answer_ahead(coming)
            begun = Mark.now(self._device)
        # Packs are answered one after another, whole steps together.
        taken = [*self._waiting][: 1 if self._memory.shape.packs > 1 else None]
        for _, group in groupby(sorted(map(self._waiting.pop, taken), key=_batch_key), key=_batch_key):
            requests = list(group)
            _, launch = self._answering.prepare(requests, [self._word(request) for request in requests])
            launch()
            self._send_replies(requests, begun, Mark.now(self._device))
            answered += requests
            begun = Mark.now(self._device)
        newest = {self._entry(request): self._word(request) for request in answered}
        passed = [(entry, word) for entry, word in self._unwritten.items() if word > newest.get(entry, 0)]
        if passed:
            # Mark their predecessors as done, so that slots are free again.
            self._memory.skip_requests(passed)
        self._unwritten.clear()

    def _next_batch(self) -> list[protocol.SelectionRequest]:
        """Return the batch that is published next, if it is the only pending work and can be answered together; otherwise an empty list."""
        first = self._announced[0] if self._announced else None
        if not self._on_other_gpu or self._waiting or not isinstance(first, protocol.SelectionRequest):
            return []
        requests = [*takewhile(lambda each: isinstance(each, protocol.SelectionRequest) and each.number == first.number, self._announced)]
        whole = len(requests) == first.together == len({request.lane for request in requests})
        return requests if whole and len({_batch_key(request) for request in requests}) == 1 else []

    def _answer_ahead(self, requests: Sequence[protocol.SelectionRequest]) -> list[protocol.SelectionRequest]:
        """Launch a batch ahead of its publication, and take other data that has arrived. Return what was published in time."""
        words = [self._word(request) for request in requests]
        # Prepare before the device waits: copies from the host would wait for it.
        inputs, launch = self._answering.prepare(requests, words, again=True)
        number = epoch_word(self._epoch, requests[0].number)
        seen = self._memory.await_words(inputs.asked, inputs.there, number, AHEAD_SECONDS)
        begun = Mark.now(self._device)
        launch()
        done = Mark.now(self._device)
        written, heads = seen()
        # Use the same words as the device.
        there = [request for request in requests if written >= number and self._is_published(request, heads)]
        self._announced = deque(each for each in self._announced if each not in there)
        self._pull(written, heads)
        self._send_replies(there, begun, done)
        return there

    def _is_published(self, request: protocol.SelectionRequest, heads: Sequence[Sequence[int]]) -> bool:
        return heads[self._entry(request)][self._word(request) % 2] == self._word(request)

    def _pull(self, written: int, heads: Sequence[Sequence[int]]) -> None:
        """Take the announced data that the words show as written. Keys announced after a selection request wait until it is answered."""
        taken: list[StagedTokens] = []
        while self._announced and epoch_word(self._epoch, self._announced[0].number) <= written:
            message = self._announced[0]
            if isinstance(message, protocol.Append):
                if self._waiting:
                    break
                taken += (StagedTokens(piece.place, piece.tokens, self._store.first_slot(piece)) for piece in message.pieces)
            elif self._is_published(message, heads):
                # Append the newer one at the end: the oldest is answered first.
                self._skip(self._waiting.pop((message.lane, message.first), None))
                self._waiting[message.lane, message.first] = message
            else:
                self._unwritten[self._entry(message)] = self._word(message)
                self._send_reply(message)
            self._announced.popleft()
        if taken:
            self._store.pull(self._memory, taken)
            self._wait()
            self._send(protocol.PlacesFreed(self._epoch, tuple(each.place for each in taken)))

    def _send_replies(self, requests: Sequence[protocol.SelectionRequest], begun: Mark, done: Mark) -> None:
        """Wait until selection requests are answered, and send the replies."""
        self._wait()
        for request in requests:
            self._send_reply(request, True, begun.until(done), len(requests))

    def _send_reply(self, request: protocol.SelectionRequest, chosen: bool = False, seconds: float = 0.0, together: int = 1) -> None:
        numbers = request.lane, request.first, request.count, request.sequence
        self._send(protocol.SelectionReply(self._epoch, *numbers, chosen, seconds, time.monotonic(), together))


def _batch_key(request: protocol.SelectionRequest) -> tuple[int, int]:
    """Key of the selection requests that can be answered together."""
    return len(request.positions), request.ahead
