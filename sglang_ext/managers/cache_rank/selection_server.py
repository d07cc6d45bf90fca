"""The server loop of a cache rank: stores keys, and selects the tokens of each request's next step with the server's method
(compressors/spade.py).

With values, the rank also sends K and V of selected tokens that the request's compressed KV lacks. The loop waits for messages, copies
keys as they arrive, and serves selection requests one after another. Of two selection requests for the same request and pack it serves
only the newer. The process ends on SIGTERM, and when its parent process has ended.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import zmq

from sglang_ext.core import run_periodically
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.key_store import KeyStore
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_REASON_CHARS, VERSION, ProtocolError
from sglang_ext.managers.cache_rank.shared_memory import SharedMemory, map_memory
from sglang_ext.mem_cache.compressed.row_exchange import missing_mask
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.contracts.compressor import ContextKV, Part
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.predictors import query_predictor

BEAT_SECONDS = 0.2
# Tokens of the selection at start that measures its duration.
PROBE_TOKENS = 1024


@dataclass
class SelectionQueue:
    """Waiting selection requests, oldest first; only the newest for each request and pack."""

    waiting: dict[tuple[int, int], protocol.SelectionRequest] = field(default_factory=dict)

    def add(self, selection_request: protocol.SelectionRequest) -> protocol.SelectionRequest | None:
        """Add a selection request. Return the one that it replaces, or None."""
        # Append at the end: the oldest selection request is served first.
        older = self.waiting.pop((selection_request.lane, selection_request.first), None)
        self.waiting[selection_request.lane, selection_request.first] = selection_request
        return older

    def drop(self, lane: int) -> list[protocol.SelectionRequest]:
        """Remove and return the selection requests of a lane."""
        return [self.waiting.pop(key) for key in [key for key in self.waiting if key[0] == lane]]

    def all(self) -> list[protocol.SelectionRequest]:
        """Remove and return all waiting selection requests, oldest first."""
        taken, self.waiting = [*self.waiting.values()], {}
        return taken

    def next(self) -> protocol.SelectionRequest | None:
        """Remove and return the oldest selection request; None if the queue is empty."""
        return self.waiting.pop(next(iter(self.waiting))) if self.waiting else None


class SelectionServer:
    """Serves one inference rank over one socket.

    Args:
        socket: Socket connected to the inference rank.
        descriptor: Descriptor of the memory that both map.
        epoch: Epoch of this process.
        device: Device that runs the selection.
    """

    def __init__(self, socket: zmq.Socket, descriptor: int | None, epoch: int, device: torch.device = torch.device("cpu")):
        self._socket = socket
        self._device = device
        self._descriptor = descriptor
        self._epoch = epoch
        self._queue = SelectionQueue()
        self._memory: SharedMemory | None = None
        self._taken: list[int] = []
        # Guards the socket, because another thread may send heartbeats.
        self._sending, self._last_heartbeat = threading.Lock(), 0.0

    def serve(self, is_running: Callable[[], bool]) -> None:
        """Run until ``is_running`` returns False. It is called several times a second.

        Raises:
            ProtocolError: The inference rank sent an invalid message.
        """
        self._send(protocol.Heartbeat(self._epoch))
        while is_running():
            self._receive(0 if self._busy else int(BEAT_SECONDS * 1000))
            self._answer_next()
            if time.monotonic() - self._last_heartbeat > BEAT_SECONDS:
                self._beat()

    @property
    def _busy(self) -> bool:
        """Whether work waits, so that the loop must not block for the next message."""
        return bool(self._queue.waiting)

    def _beat(self) -> None:
        """Send a heartbeat. Skip it if the queue is full because an idle inference rank does not read."""
        self._last_heartbeat = time.monotonic()
        with suppress(zmq.Again), self._sending:
            self._socket.send(protocol.encode(protocol.Heartbeat(self._epoch)), zmq.NOBLOCK)

    def _send(self, message: protocol.FromRank) -> None:
        with self._sending:
            self._socket.send(protocol.encode(message))
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
        if self._taken:
            self._send(protocol.PlacesFreed(self._epoch, tuple(self._taken)))
            self._taken = []

    def _handle(self, message: protocol.ToRank) -> None:
        match message:
            case protocol.Attach():
                self._attach(message)
            case protocol.RankPing():
                self._send(protocol.Heartbeat(self._epoch, message.number))
            case _ if self._memory is None:
                raise ProtocolError(f"the first message must be Attach, not {type(message).__name__}")
            case protocol.SelectionRequest():
                self._on_selection_request(message)
            case protocol.Append():
                self._append(message)
            case protocol.Lease():
                self._lease(message)
            case protocol.Free():
                for selection_request in self._drop(message.lane):
                    self._skip(selection_request)
                self._store.free(message.lane)

    def _on_selection_request(self, selection_request: protocol.SelectionRequest) -> None:
        self._skip(self._queue.add(selection_request))

    def _append(self, told: protocol.Append) -> None:
        memory = self._memory
        for piece in told.pieces:
            self._store.append(piece, memory.keys[piece.place], memory.values[piece.place] if memory.shape.rows else None)
            self._taken.append(piece.place)

    def _lease(self, told: protocol.Lease) -> None:
        self._store.lease(told)

    def _drop(self, lane: int) -> list[protocol.SelectionRequest]:
        """Remove and return the selection requests of a lane."""
        return self._queue.drop(lane)

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
        raise ProtocolError(reason)

    def _open(self, told: protocol.Attach) -> None:
        """Allocate the key store, and map the shared memory."""
        self._store = KeyStore(told.shape, told.blocks, told.scaling, told.bits)
        self._memory = map_memory(told.shape, self._descriptor)
        os.close(self._descriptor)

    def _probe(self) -> float:
        """Return seconds of one layer's selection, measured the second time because the first is slower."""
        tokens, shape = min(PROBE_TOKENS, self._store.blocks * BLOCK), self._memory.shape
        self._store.held.write(0, torch.zeros(shape.layers, tokens, shape.kv_heads, shape.dim))
        queries = self._memory.get_queries(0, 1, slice(0, 1), 1)
        for _ in range(2):
            begun = time.perf_counter()
            self._choose(torch.arange(tokens), slice(0, 1), queries, (tokens,), max(1, tokens // 8))
        return time.perf_counter() - begun

    def _answer_next(self) -> None:
        selection_request = self._queue.next()
        if selection_request is None:
            return
        begun, memory, layers = time.perf_counter(), self._memory, slice(selection_request.first, selection_request.first + selection_request.count)
        shape = memory.shape
        is_valid = layers.stop <= shape.layers and selection_request.lane < shape.lanes
        if not is_valid or selection_request.keep > min(selection_request.covered, shape.most):
            raise ProtocolError(f"{selection_request} goes beyond {shape}")
        queries = memory.get_queries(selection_request.lane, selection_request.sequence, layers, len(selection_request.positions))
        slots = self._store.slots(selection_request.lane, selection_request.covered)
        kept = self._choose(slots, layers, queries, selection_request.positions, selection_request.keep)
        if self._store.rows is not None:
            self._put_rows(selection_request, slots, kept)
        memory.put_selection(
            self._epoch, selection_request.lane, selection_request.sequence, selection_request.first, selection_request.covered, kept
        )
        self._send(self._build_reply(selection_request, True, time.perf_counter() - begun))

    def _put_rows(self, selection_request: protocol.SelectionRequest, slots: torch.Tensor, kept: torch.Tensor) -> None:
        """Write K and V of selected positions, int64 [pack layers, kv_heads, keep], that the compressed KV lacks."""
        memory, layers = self._memory, slice(selection_request.first, selection_request.first + selection_request.count)
        fresh = missing_mask(kept, memory.get_held(selection_request.lane, selection_request.sequence, layers, selection_request.keep))
        row_keys, row_values = memory.rows(selection_request.lane, selection_request.sequence)
        for layer, (these, positions) in enumerate(zip(fresh, kept), selection_request.first):
            heads, index = these.nonzero(as_tuple=True)
            keys, values = self._store.rows.read(layer, slots[positions[heads, index]], heads)
            row_keys[layer, heads, index], row_values[layer, heads, index] = keys, values
        memory.put_fresh(selection_request.lane, selection_request.sequence, selection_request.first, fresh)

    def _choose(
        self, slots: torch.Tensor, layers: slice, queries: torch.Tensor, positions: tuple[int, ...], keep: int
    ) -> torch.Tensor:
        """Select the positions that the heads of a pack of layers read: int64 [layers, kv_heads, keep], ascending."""
        # Gather the keys once, for all uses during scoring.
        buffers, places = self._store.gather_keys(layers, slots), torch.arange(len(slots))
        context = ContextKV(buffers, places, queries, torch.tensor(positions), self._rotary)
        return self._method.select(context, [Part(0, len(slots), keep)])[0]

    def _skip(self, selection_request: protocol.SelectionRequest | None) -> None:
        if selection_request is not None:
            self._send(self._build_reply(selection_request, False, 0.0))

    def _build_reply(self, selection_request: protocol.SelectionRequest, chosen: bool, seconds: float, together: int = 1) -> protocol.SelectionReply:
        return protocol.SelectionReply(
            self._epoch, selection_request.lane, selection_request.first, selection_request.count, selection_request.sequence, chosen, seconds,
            time.monotonic(), together,
        )
