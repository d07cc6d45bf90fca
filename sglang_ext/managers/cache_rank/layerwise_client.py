"""Client of the cache ranks on CPUs, for an inference rank on a CPU. The host orders the phases, pack by pack of layers (AsyncSpade).

    step t:    apply pack 0 | layers of pack 0 | publish pack 0 | apply pack 1 | layers of pack 1 | publish pack 1 | ...
    step t+1:  apply pack 0 | ...

A pack is published as soon as the queries of its last layer are computed, if its previous selection request was answered. The rank selects
for it while the model computes the other packs. When the next step's attention reaches the pack, the host waits for the reply message, at
most :data:`~.client.WAIT_SECONDS` per step. After the first late selection, the step waits for no others.

While no rank can take a request whose full KV is here, it reads its full KV.
"""

import time
from pathlib import Path
from typing import Literal

import msgspec

from sglang_ext.managers.cache_rank.client import CacheRankClient
from sglang_ext.managers.cache_rank.leases import RankRequest
from sglang_ext.managers.cache_rank.rank_link import Pack, RankUnavailable
from sglang_ext.mem_cache.compressed.async_selector import CompressedKVSource
from sglang_ext.mem_cache.compressed.queries import LayerObserver

# Bytes of a position in the exchange buffer.
POSITION_BYTES = 4
PackEventKind = Literal["reached", "written", "asked", "chosen", "missed"]


class PackTimeline:
    """Appends events to a file, one JSON object per line (benchmarks/sglang_ext_bench/timelines.py). Without a file, it records nothing."""

    def __init__(self, file: str | Path | None) -> None:
        self._file = None if file is None else Path(file).open("ab", buffering=0)

    def add_event(
        self, kind: PackEventKind, pack: tuple[int, int], lane: int = -1, sequence: int = 0, at: float | None = None, seconds: float = 0.0,
        size: int = 0,
    ) -> None:  # fmt: skip
        """Append an event; its time is now unless ``at`` is given."""
        if self._file is not None:
            event = {"kind": kind, "at": time.monotonic() if at is None else at, "first": pack[0], "count": pack[1], "lane": lane}
            event |= {"sequence": sequence, "seconds": seconds, "bytes": size}
            self._file.write(msgspec.json.encode(event) + b"\n")


class LayerwiseClient(CacheRankClient):
    """Client that publishes and applies the selections of packs of layers within steps. ``timeline`` records the events of the packs."""

    timeline = PackTimeline(None)

    def compile_kernels(self) -> None:
        """A CPU has no kernels to compile."""

    def poll(self) -> None:
        for link in self.links:
            link.poll()
        self._process_replies()

    def must_read_full_kv(self, row: int, tokens: int) -> bool:
        free = self.free_blocks()
        if self.has_request(row) or free.take(tokens):
            return False
        full = "memory-full" if any(free.requests) else "no-lane"
        self.missed[full if free.blocks else self.links[0].down_reason] += 1
        return True

    def observe_step(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> LayerObserver | None:
        """See :meth:`AsyncSelector.observe_step`. Sends missing keys first."""
        if not ends:
            return None
        due = self._due_rows(compressed_kv, ends, self.interval, following is not None)
        for link in self.links:
            link.wait(0)
        self._process_replies()
        ready = {row for row in due if self._hand_over_keys(compressed_kv, row) is not None}
        for row in ends:
            if row not in due:
                self._send_missing_keys(compressed_kv, row)
        for link in self.links:
            link.exchange_buffer.publish(self._queries.pool, [])
        # A rank may have ended since its requests were found ready.
        requests = {row: self._requests[row] for row in ends if self.has_request(row)}
        return StepObserver(self, compressed_kv, requests, {row: ends[row] for row in ready if row in requests})

    def on_step_end(self, compressed_kv: CompressedKVSource, ends: dict[int, int], following: int | None) -> None:
        """The observer has done all work."""

    def await_reply(self, request: RankRequest, pack: Pack, seconds: float) -> bool:
        """Wait for the reply to a pack's newest selection request. Return False if it is late."""
        begun, link = time.monotonic(), request.leases.link
        link.wait(0)
        self._process_replies()
        while is_awaited := not request.has_lost_rank and pack.first in request.pending and pack.first in request.unanswered:
            left = begun + seconds - time.monotonic()
            if left <= 0:
                break
            # `wait` rounds down to whole milliseconds.
            link.wait(max(left, 1e-3))
            self._process_replies()
        self.waited += time.monotonic() - begun
        return not is_awaited

    def write(self, compressed_kv: CompressedKVSource, row: int, request: RankRequest, pack: Pack) -> int | None:
        """Write an arrived selection to the compressed KV. Return the bytes of its K and V; None if there is none that can be applied."""
        exchange, target = request.leases.link.exchange_buffer, self._take_target(compressed_kv, row, request, pack)
        if target is None:
            return None
        kept = None if self.sends_rows else exchange.read_selection(target, pack.count)
        if not exchange.is_answered(target.lane, target.word) or (kept is None and not self.sends_rows):
            self.missed["wrong"] += 1
            return None
        is_last = pack.layers.stop == len(self.buffers.keys)
        if kept is None:
            moved = exchange.commit_rows(target, self.buffers.of_layers(pack.layers))
            self.rows += moved
            compressed_kv.num_compressions[compressed_kv.get(row).method] += is_last
        else:
            compressed_kv.write_selection(row, pack.layers, kept)
            moved = kept.numel()
        self.taken += is_last
        return moved * 2 * self.buffers.keys[0].shape[-1] * self.buffers.keys[0].element_size()

    def publish(self, compressed_kv: CompressedKVSource, row: int, request: RankRequest, pack: Pack, end: int) -> None:
        """Publish the queries that a step's layers have just computed, for the next step, if the pack has no open selection request.

        ``end`` is the position after the step's token.
        """
        request.leases.link.wait(0)
        self._process_replies()
        if request.has_lost_rank or pack.first in request.unanswered:
            return
        # Apply a reply received since these layers attended. The rows of the next reply are relative to the result.
        self.write(compressed_kv, row, request, pack)
        # In the next step, the newest query is that of the token at position `end`.
        built = self._build_request(compressed_kv, row, request, pack, end, end)
        if built is None:
            return
        (upload, message), pool, exchange = built, self._queries.pool, request.leases.link.exchange_buffer
        number = exchange.reserve_number()
        exchange.publish(pool, [upload])
        size = pack.count * len(upload.places) * pool.shape[2:].numel() * pool.element_size()
        self.timeline.add_event("asked", pack, request.lane, message.sequence, size=size)
        try:
            request.leases.link.send_message(msgspec.structs.replace(message, number=number))
        except RankUnavailable:
            return  # counted when the request is due again
        request.pending[pack.first] = message
        request.unanswered[pack.first] = message.sequence

    def _process_replies(self) -> None:
        """Process received replies. Replies to selection requests that are not open are ignored."""
        for link in self.links:
            replies, link.replies = link.replies, []
            for reply in replies:
                served = (each for each in self._requests.values() if each.leases.link is link and not each.has_lost_rank)
                request = next((each for each in served if each.lane == reply.lane), None)
                if request is None or request.unanswered.get(reply.first) != reply.sequence:
                    continue
                del request.unanswered[reply.first]
                pending = request.pending.get(reply.first)
                if pending is not None and reply.chosen:
                    size = reply.count * self.buffers.keys[0].shape[1] * pending.keep * POSITION_BYTES
                    pack = reply.first, reply.count
                    self.timeline.add_event("chosen", pack, reply.lane, reply.sequence, reply.at, reply.seconds, size)
                else:
                    request.pending.pop(reply.first, None)


class StepObserver(LayerObserver):
    """Applies each pack's selection when the forward reaches the pack, and publishes a selection request after the pack.

    ``requests`` are those of the step that have a rank, by row. ``due``: position after the step's token, by row, of those that publish.
    """

    def __init__(self, client: LayerwiseClient, compressed_kv: CompressedKVSource, requests: dict[int, RankRequest], due: dict[int, int]):
        self._client, self._compressed_kv, self._requests, self._due = client, compressed_kv, requests, due
        self._left, self._late = client.max_wait_seconds, set[int]()

    def on_layer_start(self, layer: int) -> None:
        for number, (row, request) in enumerate(self._requests.items()):
            for pack in request.leases.link.packs:
                if pack.first == layer:
                    if not number:
                        self._client.timeline.add_event("reached", pack)
                    self._apply(row, request, pack)

    def _apply(self, row: int, request: RankRequest, pack: Pack) -> None:
        client, pending, begun = self._client, request.pending.get(pack.first), time.monotonic()
        if pending is None:
            return
        if client.await_reply(request, pack, self._left):
            size = client.write(self._compressed_kv, row, request, pack)
            if size is not None:
                client.timeline.add_event("written", pack, request.lane, pending.sequence, size=size)
        elif row not in self._late:
            self._late.add(row)
            self._left = 0.0
            # The step continues with the previous selection.
            client.missed["late"] += 1
            client.timeline.add_event("missed", pack, request.lane, pending.sequence)
        self._left = max(0.0, self._left - (time.monotonic() - begun))

    def on_queries_recorded(self, layer: int) -> None:
        for row, end in self._due.items():
            for pack in self._requests[row].leases.link.packs:
                if pack.layers.stop == layer + 1:
                    self._client.publish(self._compressed_kv, row, self._requests[row], pack, end)
