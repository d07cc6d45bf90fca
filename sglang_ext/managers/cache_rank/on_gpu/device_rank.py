"""A cache rank on a GPU: takes keys and questions out of the arena of another one (arena.py), and writes there what it chose; where it has
values, too, K and V of those tokens that the copy of a request lacks.

Messages come as soon as the inference rank's host has launched what writes to the arena: what they tell of is taken when the arena says
that it is there. Questions of several requests are answered together, of each request the newest. Where nothing else is to be done until
the next ones are put, all that chooses for them is launched *ahead*, behind a kernel that waits for them, so that they wait for no launches;
the host looks what was put then, and lets answers follow, or chooses anew where it is something else. On a CPU, for tests, PyTorch chooses.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby, takewhile

import torch
import zmq

from sglang_ext.device import Mark, to_device
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.keys import KeyStore
from sglang_ext.managers.cache_rank.on_gpu.arena import ArenaError, word_of
from sglang_ext.managers.cache_rank.on_gpu.device_keys import DeviceKeys
from sglang_ext.managers.cache_rank.on_gpu.mapped_arena import MappedArena
from sglang_ext.managers.cache_rank.protocol import BLOCK, ProtocolError
from sglang_ext.managers.cache_rank.rank import BEAT_SECONDS, PROBED, CacheRank
from sglang_ext.mem_cache.compressors.spade import attention
from sglang_ext.mem_cache.selection.on_gpu import GpuChoice
from sglang_ext.mem_cache.selection.top_tokens import mark_always, top_tokens

# That the device, and the host, wait at most for questions for which tokens are chosen ahead: a beat comes in between.
AHEAD_SECONDS = BEAT_SECONDS / 2


class DeviceRank(CacheRank):
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
        self._coming: deque[protocol.Append | protocol.Ask] = deque()
        # Of each lane, how many tokens and where they lie, int32.
        self._places: dict[int, torch.Tensor] = {}
        # Of the lanes and lengths that were asked for last, all of these: int32 [questions, most].
        self._table: tuple[list[tuple[int, int]], torch.Tensor] | None = None
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
            self._memory = MappedArena(told.shape, self._device, told.arena, self._descriptor)
        except ArenaError as error:
            self._refuse(str(error))
        except torch.OutOfMemoryError as error:
            what = "full KV" if told.shape.rows else "keys"
            self._refuse(
                f"its GPU has no room for {what} of {told.blocks * BLOCK} tokens: pass --kv-cache-rank-gb with as many GB as it has, or "
                f"let --kv-cache-rank-gpu name another ({error})"
            )
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._keys = DeviceKeys(self._store, told.scaling, self._device)
        self._buffers, self._apart = self._keys.buffers, told.apart

    def _probe(self) -> float:
        """Seconds that choosing takes a layer, once all kernels are there."""
        shape, tokens = self._memory.shape, min(PROBED, self._store.blocks * BLOCK)
        self._keys.clear(tokens)
        if self._by_kernels:
            try:
                self._meet_lengths(tokens)
            except torch.OutOfMemoryError as error:
                self._refuse(
                    "its GPU has no room for choices beside what it holds: pass --kv-cache-rank-gb with fewer GB, or let "
                    f"--kv-cache-rank-gpu name another ({error})"
                )
        keep, positions = max(1, min(shape.most, tokens // 8)), tuple(range(shape.window))
        ask, places = protocol.Ask(0, 0, shape.layers, 1, tokens, keep, positions), torch.arange(tokens, device=self._device).int()
        for _ in range(2):
            begun = time.perf_counter()
            self._memory.read_words()
            self._memory.await_words(word_of(self._epoch, 0), AHEAD_SECONDS)()
            self._keys.pull(self._memory, 0, 1, 0)
            self._push([ask], [places], self._chosen([ask], [places]))
            self._memory.answer([(0, word_of(self._epoch, 0), False)])
            self._wait()
        self._table = None
        return (time.perf_counter() - begun) / shape.layers

    def _meet_lengths(self, cleared: int) -> None:
        """Choose once in contexts of each length for which a kernel is another, up to all tokens that are held, by keys of those that were
        cleared: no request of such a length waits for compilers, or for a kernel to be loaded."""
        from sglang_ext.layers.kernels.choose_tokens import compile_ahead, lengths_apart

        shape, longest = self._memory.shape, self._store.blocks * BLOCK
        always = self._method.sinks, self._method.recent
        compile_ahead(self._buffers.keys[0], shape.query_heads, always, longest)
        # Of the memory of the longest the others take theirs.
        for length in reversed(lengths_apart(longest)):
            keep, places = max(1, min(shape.most, length // 8)), (torch.arange(length, device=self._device) % cleared).int()
            self._chosen([protocol.Ask(0, 0, shape.layers, 1, length, keep, tuple(range(shape.window)))], [places])
        self._wait()

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _word(self, ask: protocol.Ask) -> int:
        return word_of(self._epoch, ask.sequence)

    def _asked(self, ask: protocol.Ask) -> None:
        shape = self._memory.shape
        if ask.count != shape.layers or ask.lane >= shape.lanes or not ask.keep <= min(ask.covered, shape.most):
            raise ProtocolError(f"{ask} goes beyond {shape}")
        self._coming.append(ask)

    def _append(self, told: protocol.Append) -> None:
        if told.place >= self._memory.shape.places:
            raise ProtocolError(f"place {told.place} was named, of {self._memory.shape.places}")
        self._coming.append(told)

    def _lease(self, told: protocol.Lease) -> None:
        super()._lease(told)
        self._forget_places(told.lane)

    def _drop(self, lane: int) -> list[protocol.Ask]:
        asks = [each for each in self._coming if isinstance(each, protocol.Ask) and each.lane == lane]
        self._coming = deque(each for each in self._coming if each not in asks)
        self._forget_places(lane)
        return super()._drop(lane) + asks

    def _skip(self, ask: protocol.Ask | None) -> None:
        if ask is not None:
            self._memory.answer([(ask.lane, self._word(ask), False)])
        super()._skip(ask)

    def _answer_next(self) -> None:
        # Keys that came with questions are part of what these take.
        begun, chosen = Mark.now(self._device), None
        if self._coming:
            self._pull(*self._memory.read_words())
        if coming := self._coming_together():
            begun, chosen = self._choose_ahead(coming)
        asks = sorted(self._questions.all(), key=_alike)
        for _, group in groupby(asks, key=_alike):
            self._answer(list(group), begun, chosen if asks == coming else None)
            begun = Mark.now(self._device)
        answered = {ask.lane: self._word(ask) for ask in asks}
        passed = [(lane, word, False) for lane, word in self._unasked.items() if word > answered.get(lane, 0)]
        if passed:
            # What came before them in their lanes is done with: places are free again.
            self._memory.answer(passed)
        self._unasked.clear()

    def _coming_together(self) -> list[protocol.Ask]:
        """The questions that are put next, where they are all that is to be done until then, and can be answered together; else none."""
        if not self._apart or self._questions.waiting or not self._coming or not isinstance(self._coming[0], protocol.Ask):
            return []
        first = self._coming[0]
        asks = [*takewhile(lambda each: isinstance(each, protocol.Ask) and each.number == first.number, self._coming)]
        whole = len(asks) == first.together == len({ask.lane for ask in asks})
        return asks if whole and len({_alike(ask) for ask in asks}) == 1 else []

    def _choose_ahead(self, asks: Sequence[protocol.Ask]) -> tuple[Mark, torch.Tensor]:
        """Choose for questions as soon as they are put, and take what is there then: when the device no longer waited for them, which may
        be while the host still launches, and what was chosen, as :meth:`_chosen`, of use if all of them are there."""
        places = [self._held(ask) for ask in asks]
        # Before the device waits, for which copies from the host would wait.
        self._placed(asks, places)
        words, begun = self._memory.await_words(word_of(self._epoch, asks[0].number), AHEAD_SECONDS), Mark.now(self._device)
        chosen = self._chosen(asks, places)
        self._pull(*words())
        return begun, chosen

    def _pull(self, written: int, heads: Sequence[Sequence[int]]) -> None:
        """Take of what messages told what is in the arena, by its words."""
        taken = []
        while self._coming and word_of(self._epoch, self._coming[0].number) <= written:
            message = self._coming.popleft()
            if isinstance(message, protocol.Append):
                self._keys.pull(self._memory, message.place, message.tokens, self._store.start(message))
                taken.append(message.place)
            elif heads[message.lane][self._word(message) % 2] == self._word(message):
                self._skip(self._questions.add(message))
            else:
                self._unasked[message.lane] = self._word(message)
                self._say(self._about(message, False, 0.0))
        if taken:
            self._wait()
            self._say(protocol.Taken(self._epoch, tuple(taken)))

    def _answer(self, asks: Sequence[protocol.Ask], begun: Mark, chosen: torch.Tensor | None = None) -> None:
        """Answer questions with as many queries, for a token as far ahead, by what was ``chosen`` for them, or is now.

        Args:
            asks: the questions.
            begun: when what they take did.
            chosen: as :meth:`_chosen` has it.
        """
        places = [self._held(ask) for ask in asks]
        self._push(asks, places, self._chosen(asks, places) if chosen is None else chosen)
        self._memory.answer([(ask.lane, self._word(ask), True) for ask in asks])
        done = Mark.now(self._device)
        self._wait()
        seconds = begun.until(done)
        for ask in asks:
            self._say(self._about(ask, True, seconds, len(asks)))

    def _held(self, ask: protocol.Ask) -> torch.Tensor:
        """Where the tokens of a question lie: int32 [covered]."""
        known = self._places.get(ask.lane)
        if known is None or len(known) < ask.covered:
            known = self._store.slots(ask.lane, ask.covered).int().to(self._device)
            self._places[ask.lane] = known
        return known[: ask.covered]

    def _forget_places(self, lane: int) -> None:
        self._places.pop(lane, None)
        self._table = None

    def _placed(self, asks: Sequence[protocol.Ask], places: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where the tokens of questions lie, int32 [questions, most]: made anew where other tokens are asked for than before."""
        asked = [(ask.lane, ask.covered) for ask in asks]
        if self._table is None or self._table[0] != asked:
            self._table = asked, torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True)
        return self._table[1]

    def _push(self, asks: Sequence[protocol.Ask], places: Sequence[torch.Tensor], chosen: torch.Tensor) -> None:
        """Write to the arena what was chosen: rows, or positions alone."""
        lanes, keeps = [ask.lane for ask in asks], [ask.keep for ask in asks]
        if self._store.rows is not None:
            self._memory.push_rows(lanes, keeps, chosen, self._placed(asks, places), self._keys.sent)
            return
        self._memory.push_chosen([(ask.lane, self._word(ask), ask.keep) for ask in asks], chosen)

    def _chosen(self, asks: Sequence[protocol.Ask], places: Sequence[torch.Tensor]) -> torch.Tensor:
        """Positions, int32 [layers, requests, kv_heads, most], ascending, of each question as many as it wants; where rows are sent the
        bits of their scores behind them, [2, ...]."""
        pulled = self._memory.pull_queries([(ask.lane, self._word(ask)) for ask in asks], len(asks[0].positions))
        queries = pulled.transpose(2, 3)
        positions = to_device([list(ask.positions) for ask in asks], self._device)
        most, scored = max(ask.keep for ask in asks), self._store.rows is not None
        if not self._by_kernels:
            found = [self._chosen_here(*each) for each in zip(asks, places, queries[:, None], positions[:, None])]
            padded = [torch.nn.functional.pad(each, (0, most - each.shape[-1])) for each in found]
            return torch.stack(padded, -3) if scored else torch.stack(padded, -3)[0]
        from sglang_ext.layers.kernels.choose_tokens import Contexts

        lengths = tuple(ask.covered for ask in asks)
        numbers = to_device([[i, ask.covered, ask.keep, 0] for i, ask in enumerate(asks)], self._device)
        contexts = Contexts(self._placed(asks, places), numbers, lengths, (self._method.sinks, self._method.recent))
        choice = GpuChoice(self._method.predictor, self._buffers, queries.shape[2], self._rotary)
        return choice.choose(contexts, lambda requests, layers: queries[requests, layers], positions, asks[0].ahead, most, scored)

    def _chosen_here(self, ask: protocol.Ask, places: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of one question, positions and bits of scores: int32 [2, layers, kv_heads, keep]."""
        predicted, slots = self._method.predictor.predict(queries, positions, self._rotary, ask.ahead), places.long()
        layers = enumerate(zip(predicted.unbind(1), self._buffers.scaling))
        scores = torch.stack([attention(query, self._buffers.scored(at, slots), scaling) for at, (query, scaling) in layers])
        kept = top_tokens(scores[None], ask.keep, self._method.sinks, self._method.recent)[0]
        marked = mark_always(scores, self._method.sinks, self._method.recent)
        return torch.stack([kept.int(), marked.gather(-1, kept).view(torch.int32)])


def _alike(ask: protocol.Ask) -> tuple[int, int]:
    """Those with equal ones are answered together."""
    return len(ask.positions), ask.ahead
