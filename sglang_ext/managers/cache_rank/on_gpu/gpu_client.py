"""What cache ranks on other GPUs choose for the steps of an inference rank: AsyncSpade across GPUs.

After a step in which a request's turn has come, its queries are written to its rank's arena on a second stream, while the next steps run;
so are the keys that the rank lacks, after any step, as places come free. When its turn comes again, as many steps later as ranks need
(pace.py), a kernel waits for the answer, no longer than :data:`WAIT_SECONDS` in a step, and the copy leads to what was chosen; where nothing
came it goes on to lead to what it led to. Whether it came the device alone knows: the host launches and goes on, and counts misses when the
device has told them.

Where steps are verified, turns are counted in them over rounds: a round may have fewer steps than lie between two turns, and drafts that
are rejected take positions back. What a round asked may be taken in a later one, as the copy stands for the same tokens.

Copies themselves are made here, by the keys of this GPU, and anew when many exact tokens follow them: until a rank has a request's keys,
and whenever it has none, the request reads what was chosen then.

Where ranks have values, too, copies are rows, and K and V of what was chosen come with it, as far as a copy lacks them: of which tokens it
holds rows its *record* on the device says (exchange_buffer.py). Full KV may be given back then (prefix_cache/remote_only.py). Without it the copy
is renewed once its rank was sent what it is to stand for: the newest tokens take the places of those that were the newest. Where the rank
has no room for them it stands for what it stood for; where the process is gone, the request is lost, and is to be computed again.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec
import torch

from sglang_ext.device import SideStream
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.leases import MemoryFull, block_hashes
from sglang_ext.managers.cache_rank.rank_link import RankUnavailable, RankLink
from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBuffer, QueryUpload, SelectionTarget
from sglang_ext.managers.cache_rank.on_gpu.gpu_requests import GpuRankRequest, SelectionSubmission, PendingSelection, RowRecord
from sglang_ext.managers.cache_rank.on_gpu.gpu_counters import GpuCounters
from sglang_ext.managers.cache_rank.on_gpu.interval_tuner import IntervalTuner
from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector, compile_lengths
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.row_exchange import NewestRows, renewed
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows

logger = logging.getLogger(__name__)

# That the device waits at most in a step, over all ranks and requests.
WAIT_SECONDS = 0.02


class GpuRankClient(CacheRankClient, AsyncSelector):
    """The requests of one inference rank, each at one of its cache ranks.

    Args:
        links: to the ranks.
        arenas: of each, in the same order.
        method: of all copies; its compressor is :class:`~sglang_ext.mem_cache.compressors.spade.Spade`.
        token_table: int32, SGLang's with the draft rows.
        buffers: the layers of SGLang's pool.
        queries: the newest queries of each request.
        patience: seconds that the device waits at most in a step.

    Attributes:
        missed: choices that were not there, by reason: one for each request and turn.
        waited: seconds that steps have waited on the device.
        rows: of one layer and KV head each, whose K and V came and were taken.
        sends_rows: as :class:`RowSender` has it.
        pace: steps between two choices of a request.
    """

    in_place = True

    def __init__(
        self, links: Sequence[RankLink], arenas: Sequence[ExchangeBuffer], method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers,
        queries: QueryWindows, patience: float = WAIT_SECONDS,
    ):  # fmt: skip
        super().__init__(links, buffers)
        self._arenas = dict(zip(links, arenas))
        self._method, self._table, self._queries, self._patience = method, token_table, queries, patience
        self._side, self._launched, self._since = SideStream(token_table.device), None, 0
        self.sends_rows = arenas[0].shape.rows
        self.pace = IntervalTuner(method.compressor.every)
        self._requests: dict[int, GpuRankRequest] = {}
        # Steps so far, and of each row that is verified the one of its last turn.
        self._steps, self._turns = 0, {}
        self._records: dict[int, RowRecord] = {}
        self._told = {arena: GpuCounters(arena.counters) for arena in arenas}
        self._name = ""
        self._made: Counter[str] | None = None

    @property
    def _known(self) -> dict[int, GpuRankRequest]:
        return self._requests

    def compile_kernels(self) -> None:
        """As :meth:`AsyncSelector.compile_kernels`: by questions that no lane has room for, before any request."""
        # By which copies are made here.
        compile_lengths(self._method, self._table, self.buffers, self._queries.pool.shape[2])
        slots = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        window, record = self._method.compressor.window, None
        if self.sends_rows:
            record = slots.int().expand(len(self.buffers.keys), self.buffers.keys[0].shape[1], -1).contiguous()
            coming = renewed(record, 1, 2, 1, 1)[1]
            self.buffers.move_newest(coming, slots.expand(2), slots)
        for arena in self._arenas.values():
            word = arena.word(1 << 31)
            arena.put_keys([protocol.StagedTokens(0, 1, 0)], self.buffers, slots)
            arena.publish(self._queries.pool, [QueryUpload([0] * window, 0, word, record)])
            arena.apply_selections([SelectionTarget(0, word, 0, 1, 1, slots, record)], self._table, self.buffers, 0.0)
            arena.counters.zero_()

    def poll(self) -> None:
        """As :meth:`AsyncSelector.poll`; takes what the device has counted, too."""
        for link in self.links:
            link.poll()
            # Those that were chosen together took the same seconds, once.
            for (seconds, together), _ in groupby((each.seconds, each.together) for each in link.answers if each.chosen):
                self.pace.answered(seconds, together)
            link.answers.clear()
        for counts in self._told.values():
            grown = counts.look()
            self.missed["late"] += grown["late"] + grown["unasked"]
            self.waited += grown["waited"] / 1e9
            self.rows += grown["rows"]
            self.taken += grown["taken"]
            if self._made is not None and grown["taken"]:
                self._made[self._name] += grown["taken"]

    def on_round_start(self, forwards: int, every: int) -> None:
        """As :meth:`AsyncSelector.begun`. Cache ranks choose their own interval."""
        self.pace.record_round(time.monotonic(), self.waited, forwards)

    def on_step_end(self, compressed_kv: CompressedKVCache, ends: dict[int, int], following: int | None) -> None:
        """As :meth:`AsyncSelector.stepped`."""
        every, self._made = self._steps_between(compressed_kv, ends), compressed_kv.made
        if self._launched is not None:
            self._since += 1
            if self._since >= self._queries.spare:
                # The next step writes where queries lie that the second stream may not have read yet.
                self._settle()
        due = self._due(compressed_kv, ends, every, following is not None)
        # First, or the rank would look at the newer question alone.
        self._take(compressed_kv, self._open_questions(compressed_kv, due))
        for link in self.links:
            link.wait(0)
        behind = [row for row in ends if row not in due and self._is_behind(compressed_kv, row)]
        if due or behind:
            # What that makes is made on the second stream; tables, buffers and pools stay.
            self._launched = self._side.launch(lambda: self._ask(compressed_kv, due, behind, every), ())
        if following == 0:
            # Verification writes over the queries of drafts.
            self._settle()

    def _due(self, compressed_kv: CompressedKVCache, ends: dict[int, int], every: int, verified: bool) -> dict[int, int]:
        """Of ``ends`` the requests whose turn has come."""
        self._steps += 1
        if not verified:
            return {row: end for row, end in ends.items() if not (end - compressed_kv.get(row).covered) % every}
        due = {row: end for row, end in ends.items() if row not in self._turns or self._steps - self._turns[row] >= every}
        self._turns.update(dict.fromkeys(due, self._steps))
        return due

    def _steps_between(self, compressed_kv: CompressedKVCache, rows: Iterable[int]) -> int:
        """Steps between two choices of a request; ``rows``: of all that step. Ranks choose for those alone whose keys they have."""
        at_ranks = Counter(self._requests[row].leases.link for row in rows if self._has_keys(compressed_kv, row))
        before, every = self.pace.every, self.pace.record_step(max(at_ranks.values(), default=0))
        if every != before:
            logger.info(
                "sglang-ext: cache ranks choose every %d steps for each of %d requests at once, as often as they keep up with "
                "(--kv-select-every %d)", every, sum(at_ranks.values()), self.pace.least,
            )  # fmt: skip
        return every

    def _open_questions(self, compressed_kv: CompressedKVCache, rows: Iterable[int]) -> list[tuple[int, GpuRankRequest, PendingSelection]]:
        """Of some requests what was asked for them, of the copies that they still have; none is open afterwards."""
        found = []
        for row in rows:
            request, view = self._requests.get(row), compressed_kv.get(row)
            if request is None:
                continue
            asked, request.asked = request.asked, None
            if asked is not None and not request.has_lost_rank and (asked.covered, asked.keep) == (view.covered, view.own_tokens):
                found.append((row, request, asked))
        return found

    def _has_keys(self, compressed_kv: CompressedKVCache, row: int) -> bool:
        """Whether the rank has, or was sent, the keys that a request's copy stands for."""
        request = self._requests.get(row)
        return request is not None and not request.has_lost_rank and request.lease.held >= compressed_kv.get(row).covered

    def _is_behind(self, compressed_kv: CompressedKVCache, row: int) -> bool:
        """Whether the rank lacks keys of a request that it has begun, of which some can be sent now."""
        request = self._requests.get(row)
        return request is not None and not request.has_lost_rank and request.leases.link.has_free_place and not self._has_keys(compressed_kv, row)

    def _ask(self, compressed_kv: CompressedKVCache, due: dict[int, int], behind: Sequence[int], every: int) -> None:
        """Write queries and keys of some requests to arenas, keys alone of those that are ``behind``, and tell their ranks."""
        whole = {row: end for row, end in due.items() if self._has_keys(compressed_kv, row)}
        # Or these would wait until the rank has taken the keys of others.
        self._ask_for(compressed_kv, whole, every)
        for row in behind:
            # One before it may have taken the last place.
            if self._is_behind(compressed_kv, row):
                with suppress(RankUnavailable, MemoryFull):  # told when its turn comes
                    self._requests[row].extend(self._table[row, : compressed_kv.get(row).covered].long())
        self._ask_for(compressed_kv, {row: end for row, end in due.items() if row not in whole}, every)

    def _ask_for(self, compressed_kv: CompressedKVCache, due: dict[int, int], every: int) -> None:
        """Ask for some requests together, once their ranks have, or are sent, their keys; tell of all that was written, before too."""
        asked: dict[ExchangeBuffer, list[SelectionSubmission]] = {arena: [] for arena in self._arenas.values()}
        for row, end in due.items():
            try:
                request = self._with_keys(compressed_kv, row)
                if request is not None and (question := self._question(compressed_kv, row, request, end, every)):
                    asked[self._arenas[request.leases.link]].append(question)
            except RankUnavailable as error:
                self.missed[str(error)] += 1
            except MemoryFull as error:
                # Of a request that has its full KV here: of another the rank has what its copy stands for.
                self.missed[str(error)] += 1
                self._leave(row)
        for arena, questions in asked.items():
            self._put(arena, questions)

    def _put(self, arena: ExchangeBuffer, questions: Sequence[SelectionSubmission]) -> None:
        """Write questions to an arena, and tell the rank of them; of what was put there before it knows."""
        number = arena.reserve_number() if questions else arena.number
        if arena.has_unannounced:
            arena.publish(self._queries.pool, [each.asked for each in questions])
        for request, ask, _ in questions:
            try:
                request.leases.link.send_message(msgspec.structs.replace(ask, number=number, together=len(questions)))
            except RankUnavailable as error:
                self.missed[str(error)] += 1
            else:
                request.asked = PendingSelection(ask.sequence, ask.covered, ask.keep)

    def _with_keys(self, compressed_kv: CompressedKVCache, row: int) -> GpuRankRequest | None:
        """The request in ``row``, once its rank has, or is sent, the keys that its copy stands for; None before.

        Raises:
            RankUnavailable: no rank is ready, or it takes no messages; or the request is lost.
            MemoryFull: none has room.
        """
        request, covered = self._requests.get(row), compressed_kv.get(row).covered
        if request is not None and request.has_lost_rank:
            if request.alone:
                raise RankUnavailable(request.leases.link.down_reason)
            del self._requests[row]
            request = None
        if request is None:
            request = self._requests[row] = self._opened(compressed_kv, row)
        if request.lease.held < covered and not request.extend(self._table[row, :covered].long()):
            self.missed["hand-over"] += 1
            return None
        return request

    def _opened(self, compressed_kv: CompressedKVCache, row: int) -> GpuRankRequest:
        leases = self._select_rank()
        lease, namespace = leases.open(), compressed_kv.namespace_of(row)
        # Long prompts take a while to name: not before a rank has a lane.
        return GpuRankRequest(leases, lease, () if namespace is None else block_hashes(namespace, compressed_kv.prompt_of(row)))

    def _question(self, compressed_kv: CompressedKVCache, row: int, request: GpuRankRequest, end: int, every: int) -> SelectionSubmission | None:
        """By the queries before ``end``; None where there are none."""
        view, lease, arena = compressed_kv.get(row), request.lease, self._arenas[request.leases.link]
        places, positions = self._queries.newest_places(row, end, self._method.compressor.window)
        record = self._records.get(row)
        if not places or (self.sends_rows and record is None):
            return None
        lease.sequence += 1
        ask = protocol.SelectionRequest(
            lease.lane, 0, arena.shape.layers, lease.sequence, view.covered, view.own_tokens, tuple(positions),
            ahead=end + every - positions[-1],
        )  # fmt: skip
        self._name = view.method
        return SelectionSubmission(request, ask, QueryUpload(places, lease.lane, arena.word(lease.sequence), None if record is None else record.positions))

    def _take(self, compressed_kv: CompressedKVCache, questions: Sequence[tuple[int, GpuRankRequest, PendingSelection]]) -> None:
        """Let copies lead to what was chosen for them, where it is there in time."""
        if questions:
            # What was not put yet would not be waited for.
            self._settle()
        by_arena: dict[ExchangeBuffer, list[SelectionTarget]] = {}
        for row, request, asked in questions:
            arena, view, record = self._arenas[request.leases.link], compressed_kv.get(row), self._records.get(row)
            copy = SelectionTarget(
                request.lease.lane, arena.word(asked.sequence), row, asked.covered, asked.keep, view.own[view.sinks :],
                None if record is None else record.positions,
            )  # fmt: skip
            by_arena.setdefault(arena, []).append(copy)
        for arena, copies in by_arena.items():
            arena.apply_selections(copies, self._table, self.buffers, self._patience / len(by_arena))

    def _settle(self) -> None:
        self._side.wait(self._launched)
        self._launched, self._since = None, 0

    def flush(self, row: int) -> None:
        """As :meth:`AsyncSelector.flush`: full KV and queries are read on the second stream."""
        self._settle()
        if row in self._requests:
            self._requests[row].asked = None

    def flush_all(self) -> None:
        """As :meth:`AsyncSelector.flush_all`."""
        self._settle()
        for request in self._requests.values():
            request.asked = None

    def made(self, row: int, covered: int, kept: torch.Tensor) -> None:
        """As :meth:`AsyncSelector.made`."""
        self._records[row] = RowRecord(kept.int().contiguous(), covered)

    def extend(self, row: int, slots: torch.Tensor) -> bool:
        """As :meth:`AsyncSelector.extend`: on the second stream."""
        request = self._requests.get(row)
        if request is None or request.has_lost_rank:
            return False
        if request.lease.held < len(slots):
            request.leases.link.wait(0)
            self._launched = self._side.launch(lambda: self._send(request, slots), (slots,))
        return request.lease.held >= len(slots)

    def _send(self, request: GpuRankRequest, slots: torch.Tensor) -> None:
        """Send what the rank lacks of a request's tokens in ``slots``, as far as it has room, and places are free."""
        try:
            request.extend(slots)
        except (RankUnavailable, MemoryFull) as error:
            self.missed[str(error)] += 1
        # The rank looks for what it was told of until it is there: with the next questions, of which there may be none for hours.
        self._put(self._arenas[request.leases.link], ())

    def renewed(self, row: int, covered: int, keep: int) -> NewestRows:
        """As :meth:`AsyncSelector.renewed`."""
        before = self._records[row]
        positions, coming = renewed(before.positions, before.covered, covered, keep, self._method.compressor.recent)
        self._records[row] = RowRecord(positions, covered)
        return coming

    def holds(self, row: int) -> int:
        """As :meth:`RowSender.holds`."""
        request = self._requests.get(row)
        return 0 if request is None or request.has_lost_rank or row not in self._records else request.lease.held

    def leave_slots(self, row: int, alone: bool) -> None:
        """As :meth:`RowSender.leave_slots`: the second stream reads them."""
        self._settle()
        if alone and row in self._requests:
            self._requests[row].alone = True

    def is_lost(self, row: int) -> bool:
        """As :meth:`RowSender.is_lost`."""
        request = self._requests.get(row)
        return request is not None and request.alone and request.has_lost_rank

    def forget(self, row: int) -> None:
        """As :meth:`AsyncSelector.forget`: its rank has room for others."""
        self._records.pop(row, None)
        self._turns.pop(row, None)
        self._leave(row)

    def _leave(self, row: int) -> None:
        request = self._requests.pop(row, None)
        if request is None:
            return
        if not request.has_lost_rank:
            try:
                request.leases.close(request.lease)
            except RankUnavailable:
                # With the process all its leases went.
                return

    def forget_all(self) -> None:
        """As :meth:`AsyncSelector.forget_all`."""
        self.flush_all()
        self._records.clear()
        self._turns.clear()
        for row in list(self._requests):
            self._leave(row)
