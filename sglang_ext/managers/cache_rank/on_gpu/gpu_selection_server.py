"""A cache rank on a GPU: takes keys and questions out of the arena of another one (exchange_buffer.py), and writes there what it chose; where it has
values, too, K and V of those tokens that the copy of a request lacks.

Messages come as soon as the inference rank's host has launched what writes to the arena: what they tell of is taken when the arena says
that it is there. Questions of several requests are answered together, of each request the newest. Where nothing else is to be done until
the next ones are put, all that answers them (selection_runner.py) is launched *ahead*, behind a kernel that waits for them, so that they wait for
no launches; what was not put in time is not answered, and the host looks then what was. On a CPU, for tests, PyTorch chooses.
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

# That the device, and the host, wait at most for questions for which tokens are chosen ahead: a beat comes in between.
AHEAD_SECONDS = BEAT_SECONDS / 2


class GpuSelectionServer(SelectionServer):
    """Serves one inference rank over one socket and an arena.

    Args:
        socket: connected to it.
        descriptor: of the arena on a CPU; None on a GPU, where its handle comes with the first message.
        epoch: of this process.
        device: on which is chosen.
    """

    def __init__(self, socket: zmq.Socket, descriptor: int | None, epoch: int, device: torch.device):
        super().__init__(socket, descriptor, epoch, device)
        self._by_kernels, self._apart = descriptor is None, False
        self._coming: deque[protocol.Append | protocol.SelectionRequest] = deque()
        # Of each lane the newest question that was not written, as its place was taken.
        self._unasked: dict[int, int] = {}

    @property
    def _busy(self) -> bool:
        return bool(self._coming) or super()._busy

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
        self._keys, self._apart = GpuKeys(self._store, told.scaling, self._device), told.apart
        kinds = self._method, self._rotary, self._device, self._by_kernels
        self._answering = SelectionRunner(self._memory, self._keys, self._store, *kinds)

    def _probe(self) -> float:
        """Seconds that choosing takes a layer, once all kernels are there."""
        shape, tokens = self._memory.shape, min(PROBED, self._store.blocks * BLOCK)
        self._keys.clear(tokens)
        if self._by_kernels:
            try:
                self._meet_lengths(tokens)
            except torch.OutOfMemoryError as error:
                self._refuse_room("choices beside what it holds", error)
            except OptionError as error:
                self._refuse(f"its GPU does not choose: {error}")
        for _ in range(2):
            begun = time.perf_counter()
            self._keys.pull(self._memory, [StagedTokens(0, 1, 0)])
            self._answer_none(tokens, tokens)
            self._wait()
        return (time.perf_counter() - begun) / shape.layers

    def _refuse_room(self, what: str, error: torch.OutOfMemoryError) -> NoReturn:
        self._refuse(
            f"its GPU has no room for {what}: pass --kv-cache-rank-gb with fewer GB, or let --kv-cache-rank-gpu name another ({error})"
        )

    def _answer_none(self, tokens: int, cleared: int) -> None:
        """Do all that answers a question among so many tokens, those that were cleared, over and over. Its word is that which lanes begin
        with."""
        shape = self._memory.shape
        keep = max(1, min(shape.most, tokens // 8))
        ask = protocol.SelectionRequest(0, 0, shape.layers, 0, tokens, keep, tuple(range(shape.window)))
        self._answering.hold(0, torch.arange(tokens, device=self._device) % cleared)
        prepared = self._answering.prepare([ask], [self._word(ask)], again=True)
        self._memory.await_words(prepared.inputs.asked, prepared.inputs.there, epoch_word(self._epoch, 0), AHEAD_SECONDS)()
        prepared.launch()
        self._answering.forget(0)

    def _meet_lengths(self, cleared: int) -> None:
        """Choose once in contexts of each length for which a kernel is another, up to all tokens that are held, by keys of those that were
        cleared: no request of such a length waits for compilers, or for a kernel to be loaded."""
        from sglang_ext.layers.kernels.select_tokens import compile_ahead, kernel_lengths

        longest, always = self._store.blocks * BLOCK, (self._method.sinks, self._method.recent)
        compile_ahead(self._keys.buffers.keys[0], self._memory.shape.query_heads, always, longest)
        # Of the memory of the longest the others take theirs.
        for length in reversed(kernel_lengths(longest)):
            self._answer_none(length, cleared)
        self._wait()

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _word(self, ask: protocol.SelectionRequest) -> int:
        return epoch_word(self._epoch, ask.sequence)

    def _asked(self, ask: protocol.SelectionRequest) -> None:
        shape = self._memory.shape
        if ask.count != shape.layers or ask.lane >= shape.lanes or not ask.keep <= min(ask.covered, shape.most):
            raise ProtocolError(f"{ask} goes beyond {shape}")
        self._coming.append(ask)

    def _append(self, told: protocol.Append) -> None:
        last = max(piece.place for piece in told.pieces)
        if last >= self._memory.shape.places:
            raise ProtocolError(f"place {last} was named, of {self._memory.shape.places}")
        self._coming.append(told)

    def _lease(self, told: protocol.Lease) -> None:
        super()._lease(told)
        self._answering.forget(told.lane)

    def _drop(self, lane: int) -> list[protocol.SelectionRequest]:
        asks = [each for each in self._coming if isinstance(each, protocol.SelectionRequest) and each.lane == lane]
        self._coming = deque(each for each in self._coming if each not in asks)
        self._answering.forget(lane)
        return super()._drop(lane) + asks

    def _skip(self, ask: protocol.SelectionRequest | None) -> None:
        if ask is not None:
            self._memory.skip_requests([(ask.lane, self._word(ask))])
        super()._skip(ask)

    def _answer_next(self) -> None:
        # Keys that came with questions are part of what these take.
        begun, answered = Mark.now(self._device), []
        if self._coming:
            self._pull(*self._memory.read_words())
        if coming := self._coming_together():
            answered += self._answer_ahead(coming)
            begun = Mark.now(self._device)
        for _, group in groupby(sorted(self._questions.all(), key=_alike), key=_alike):
            answered += self._answer(list(group), begun)
            begun = Mark.now(self._device)
        newest = {ask.lane: self._word(ask) for ask in answered}
        passed = [(lane, word) for lane, word in self._unasked.items() if word > newest.get(lane, 0)]
        if passed:
            # What came before them in their lanes is done with: places are free again.
            self._memory.skip_requests(passed)
        self._unasked.clear()

    def _coming_together(self) -> list[protocol.SelectionRequest]:
        """The questions that are put next, where they are all that is to be done until then, and can be answered together; else none."""
        if not self._apart or self._questions.waiting or not self._coming or not isinstance(self._coming[0], protocol.SelectionRequest):
            return []
        first = self._coming[0]
        asks = [*takewhile(lambda each: isinstance(each, protocol.SelectionRequest) and each.number == first.number, self._coming)]
        whole = len(asks) == first.together == len({ask.lane for ask in asks})
        return asks if whole and len({_alike(ask) for ask in asks}) == 1 else []

    def _answer_ahead(self, asks: Sequence[protocol.SelectionRequest]) -> list[protocol.SelectionRequest]:
        """Answer the questions that are put next as soon as they are put; those of them that were. What else is there then is taken."""
        words = [self._word(ask) for ask in asks]
        # Before the device waits, for which copies from the host would wait.
        (inputs, launch), number = self._answering.prepare(asks, words, again=True), epoch_word(self._epoch, asks[0].number)
        seen = self._memory.await_words(inputs.asked, inputs.there, number, AHEAD_SECONDS)
        begun = Mark.now(self._device)
        launch()
        done = Mark.now(self._device)
        written, heads = seen()
        # By the words that tell the device which are there.
        there = [ask for ask in asks if written >= number and self._is_put(ask, heads)]
        self._coming = deque(each for each in self._coming if each not in there)
        self._pull(written, heads)
        self._tell(there, begun, done)
        return there

    def _is_put(self, ask: protocol.SelectionRequest, heads: Sequence[Sequence[int]]) -> bool:
        return heads[ask.lane][self._word(ask) % 2] == self._word(ask)

    def _pull(self, written: int, heads: Sequence[Sequence[int]]) -> None:
        """Take of what messages told what is in the arena, by its words; keys that came after questions not before these are answered."""
        taken: list[StagedTokens] = []
        while self._coming and epoch_word(self._epoch, self._coming[0].number) <= written:
            message = self._coming[0]
            if isinstance(message, protocol.Append):
                if self._questions.waiting:
                    break
                taken += (StagedTokens(piece.place, piece.tokens, self._store.first_slot(piece)) for piece in message.pieces)
            elif self._is_put(message, heads):
                self._skip(self._questions.add(message))
            else:
                self._unasked[message.lane] = self._word(message)
                self._say(self._about(message, False, 0.0))
            self._coming.popleft()
        if taken:
            self._keys.pull(self._memory, taken)
            self._wait()
            self._say(protocol.PlacesFreed(self._epoch, tuple(each.place for each in taken)))

    def _answer(self, asks: Sequence[protocol.SelectionRequest], begun: Mark) -> Sequence[protocol.SelectionRequest]:
        """Answer questions that are there, with as many queries, for a token as far ahead; these. ``begun``: when what they take did."""
        self._answering.prepare(asks, [self._word(ask) for ask in asks]).launch()
        self._tell(asks, begun, Mark.now(self._device))
        return asks

    def _tell(self, asks: Sequence[protocol.SelectionRequest], begun: Mark, done: Mark) -> None:
        """Say that questions were answered, once they are."""
        self._wait()
        for ask in asks:
            self._say(self._about(ask, True, begun.until(done), len(asks)))


def _alike(ask: protocol.SelectionRequest) -> tuple[int, int]:
    """Those with equal ones are answered together."""
    return len(ask.positions), ask.ahead
