"""The receiver's end of links: one socket for all senders, a thread that reads it, and a thread that passes complete parts to their rooms'
sinks.

The server grants each sender a window of bytes, and grants bytes again as they arrive. It stops granting while many complete bytes wait for
their room's sink, so a slow sink slows down its senders.

An invalid or unexpected message ends its connection, never the thread. The sender then reconnects and sends the missing parts.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import zmq

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.connection import ProtocolViolation, ReceivedPart, SenderConnection
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.incoming_rooms import IncomingRoom, IncomingRooms
from sglang_ext.managers.kv_transfer.limits import LinkLimits
from sglang_ext.managers.kv_transfer.server_socket import ServerSocket
from sglang_ext.managers.kv_transfer.transfer_metrics import stream_label
from sglang_ext.managers.kv_transfer.wire import MAX_ACKS, LinkError, LinkSettings, PageHeader, RoomShape, settings_mismatch, version_mismatch
from sglang_ext.managers.metrics import MetricSet

logger = logging.getLogger(__name__)

# Maximum of messages read in a row; seconds between timeout checks; seconds without messages before small grants are sent.
MAX_IN_A_ROW, CHECK_SECONDS, POLL_SECONDS = 64, 0.1, 0.001
# While there is much to read: number of grants per window, and per limit of residual bytes.
GRANTS, GRANTS_OF_RESIDUALS = 8, 2


class LinkServer:
    """Rooms of any number of senders that this process receives. All methods may be called from any thread.

    Args:
        settings: Settings of this end, which the senders' must equal.
        keys: Key pair of both ends; None for no encryption, on this machine only.
        take: Allocates this many bytes, in which parts are assembled and which sinks may keep. Called by the server's thread.

    Raises:
        LinkError: The endpoint is refused or in use (endpoints.py).
    """

    def __init__(
        self,
        endpoint: str,
        settings: LinkSettings,
        limits: LinkLimits = LinkLimits(),
        keys: LinkKeys | None = None,
        take: Callable[[int], bytearray | np.ndarray] = bytearray,
        metrics: MetricSet = MetricSet(),
    ) -> None:
        self._metrics = metrics
        self._settings, self._limits, self._take_memory = settings, limits, take
        # A sender of residuals can continue with these grants alone.
        self._most_ungranted = min(limits.window_bytes // GRANTS, limits.residual_bytes // GRANTS_OF_RESIDUALS)
        self._socket = ServerSocket(endpoint, keys)
        self.endpoint = self._socket.endpoint
        self.rooms = IncomingRooms(self.endpoint, limits.finished_rooms, partial(self._socket.call, self._tell), metrics)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-checksums")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-writes")
        self._closing = False
        # Used by the server's thread only.
        self._peers: dict[bytes, SenderConnection] = {}
        self._links: dict[bytes, SenderConnection] = {}
        self._heard: dict[bytes, float] = {}
        self._to_grant: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name=f"kv-links of {self.endpoint}", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """End all rooms and the thread. Wait for the thread at most ``timeout`` seconds."""
        self.rooms.close()
        self._closing = True
        self._socket.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        reason = "the receiver closed its links"
        try:
            self._serve()
        except Exception:
            logger.exception("the links of %s ended; rooms on them fail", self.endpoint)
            reason = "an internal error ended the receiver's links; the log has it"
        self._closing = True
        for room in self.rooms.close():
            self.rooms.fail(room, reason)
        for address in list(self._peers):
            self._drop_connection(address)
        self._socket.close()
        self._reader.shutdown()
        # All rooms have ended, so queued writes are dropped. A sink that closes the server does not wait for itself.
        self._writer.shutdown(wait=False)

    def _serve(self) -> None:
        checked = time.monotonic()
        while not self._closing:
            if not self._socket.wait(POLL_SECONDS if self._to_grant else CHECK_SECONDS):
                for address in list(self._to_grant):
                    self._grant(self._peers[address])
            drained = self._read_messages()
            self._socket.run_calls()
            now = time.monotonic()
            # Reading may have taken long: a sender is silent only if all messages were read.
            if drained and now - checked > CHECK_SECONDS:
                checked = now
                self._drop_silent_senders(now)

    def _read_messages(self) -> bool:
        """Read and handle some messages. Return whether all were read."""
        for _ in range(MAX_IN_A_ROW):
            received = self._socket.receive()
            if received is None:
                return True
            self._handle(*received)
        return False

    def _handle(self, address: bytes, frames: list[zmq.Frame]) -> None:
        peer = self._peers.get(address)
        try:
            if not frames or len(frames) > 2:
                raise wire.WireError(f"a message of {len(frames)} frames; one or two are read")
            message = wire.decode_from_sender(frames[0].buffer)
            if isinstance(message, wire.Hello):
                self._hello(address, message)
                return
            if peer is None:
                raise ProtocolViolation("no Hello was received on this connection")
            self._heard[peer.link] = time.monotonic()
            if isinstance(message, wire.Frame) != (len(frames) == 2):
                raise ProtocolViolation(f"a {type(message).__name__} of {len(frames)} frames")
            match message:
                case wire.Ping():
                    self._send(peer.address, wire.Pong())
                case wire.Open(room, shape):
                    self._open(peer, room, shape)
                case wire.Cancel(room, reason):
                    self._cancel(peer, room, reason)
                case wire.Frame():
                    self._frame(peer, message, frames[1].buffer)
        except (ProtocolViolation, wire.WireError) as error:
            self._metrics.count("kv_link_refused_frames", 1, "protocol")
            # A peer without Hello may be any program. It is answered only if its message is valid.
            if peer is not None:
                logger.warning("%s received an invalid message of a sender: %s; the sender has to reconnect", self.endpoint, error)
                self._drop_connection(address)
            if peer is not None or isinstance(error, ProtocolViolation):
                self._send(address, wire.HelloFirst(str(error)[:1024]))

    def _hello(self, address: bytes, hello: wire.Hello) -> None:
        differs = version_mismatch(wire.VERSION, hello.protocol)
        if differs is None:
            differs = settings_mismatch(self._settings, wire.decode_settings(hello.settings))
        if differs is not None:
            logger.error("%s refuses a sender: %s", self.endpoint, differs)
            self._send(address, wire.Refused(differs))
            return
        if hello.link in self._heard:
            self._metrics.count("kv_link_reconnects", 1)
        if hello.link in self._links:
            self._drop_connection(self._links[hello.link].address)
        self._drop_connection(address)
        self._peers[address] = self._links[hello.link] = SenderConnection(
            address, hello.link, self._limits.window_bytes, self._take_memory, self._reader
        )
        self._heard[hello.link] = time.monotonic()
        self._metrics.count("kv_links", 1)
        self._send(address, wire.Welcome(self._limits.window_bytes))

    def _open(self, peer: SenderConnection, room: int, shape: RoomShape) -> None:
        state = self.rooms.open(room, peer.link)
        if state is None and self.rooms.finished(room, peer.link) is not None:
            self._send(peer.address, wire.Have.of(room, shape, {stream: range(shape.parts(stream)) for stream in wire.Stream}))
        elif state is None:
            self._send(peer.address, wire.Ended(room, "unknown room: it was not registered here, or the receiver was restarted"))
        elif state.link != peer.link:
            self._send(peer.address, wire.Ended(room, "another sender opened it before"))
        elif shape != state.expected.shape:
            self.rooms.fail(state, f"the sender announces {shape}; expected is {state.expected.shape}")
        else:
            self._send(peer.address, state.have())
            self.rooms.finish(state)

    def _cancel(self, peer: SenderConnection, room: int, reason: str) -> None:
        state = self.rooms.get(room)
        if state is not None and state.link in (None, peer.link):
            self.rooms.fail(state, f"the sender ended it: {reason}", tell=False)

    def _frame(self, peer: SenderConnection, frame: wire.Frame, payload: memoryview) -> None:
        peer.take(len(payload))
        self._to_grant.add(peer.address)
        state = self.rooms.get(frame.header.room)
        if state is None or state.link != peer.link:
            # The room was aborted or has failed, which the sender was told, or it is complete.
            peer.drop(frame.header.stream)
            self._acknowledge_again(peer, frame, len(payload))
            return
        self._metrics.count("kv_link_received_bytes", len(payload), stream_label(frame.header.stream, state.expected.shape))
        try:
            self._part(peer, state, frame, payload)
        except LinkError as error:
            self.rooms.fail(state, str(error))
        self._grant_if_much(peer)

    def _acknowledge_again(self, peer: SenderConnection, frame: wire.Frame, size: int) -> None:
        """Acknowledge a retransmitted part of a finished room: parts of a broken connection had finished it meanwhile."""
        header = frame.header
        shape = self.rooms.finished(header.room, peer.link)
        number = None if shape is None or frame.offset + size < header.size else shape.part(header.stream, header.page, header.layers)
        if number is not None:
            peer.acked.append(wire.Acked(header.room, header.stream, number))

    def _part(self, peer: SenderConnection, state: IncomingRoom, frame: wire.Frame, payload: memoryview) -> None:
        header = frame.header
        agreed = self._settings.codec, self._settings.tp_rank
        try:
            if (header.codec, header.rank) != agreed:
                raise LinkError(f"received a part of codec {header.codec!r} and rank {header.rank}; agreed on is {agreed}")
            number = state.part(header)
        except LinkError:
            self._metrics.count("kv_link_refused_frames", 1, "bounds")
            raise
        whole = peer.assemble(frame, payload)
        if whole is not None:
            peer.waiting += header.size
            self._writer.submit(self._write, peer, state, number, whole)

    def _write(self, peer: SenderConnection, state: IncomingRoom, number: int, whole: ReceivedPart) -> None:
        """Pass a part to its room's sink if its checksum is correct. Called by the writer thread."""
        header, reply = whole.header, None
        try:
            if not whole.has_valid_checksum():
                reply = wire.Retransmit(state.number, header.stream, number)
            elif state.write(number, header, whole.content):
                reply = wire.Acked(state.number, header.stream, number)
                self.rooms.finish(state)
        except LinkError as error:
            self.rooms.fail(state, str(error))
        except Exception:
            logger.exception("a part of room %d cannot be written", state.number)
            self.rooms.fail(state, "an internal error ended it; the receiver's log has it")
        self._socket.call(self._report_written, peer, header, reply)

    def _report_written(self, peer: SenderConnection, header: PageHeader, reply: wire.Acked | wire.Retransmit | None) -> None:
        """Acknowledge a part that the writer has finished, unless its room has ended (None), and send grants that waited for it."""
        peer.waiting -= header.size
        if self._peers.get(peer.address) is not peer:
            return
        self._to_grant.add(peer.address)
        if isinstance(reply, wire.Retransmit):
            self._request_again(peer, header, reply)
        elif reply is not None:
            peer.acked.append(reply)
        self._grant_if_much(peer)

    def _request_again(self, peer: SenderConnection, header: PageHeader, again: wire.Retransmit) -> None:
        self._metrics.count("kv_link_refused_frames", 1, "checksum")
        state = self.rooms.get(again.room)
        if state is None or state.link != peer.link:
            return
        if state.can_retry(again.stream, again.part, self._limits.repeats):
            self._send(peer.address, again)
        else:
            self.rooms.fail(
                state, f"{header.stream} of page {header.page} was received with a wrong checksum {self._limits.repeats + 1} times"
            )

    def _grant_if_much(self, peer: SenderConnection) -> None:
        if peer.ungranted > self._most_ungranted or len(peer.acked) >= MAX_ACKS:
            self._grant(peer)

    def _grant(self, peer: SenderConnection) -> None:
        self._to_grant.discard(peer.address)
        received = peer.grant(self._limits.window_bytes)
        if received is not None:
            self._send(peer.address, received)

    def _tell(self, link: bytes, note: wire.Ended) -> None:
        # An unreachable sender opens the room again when it is back.
        if link in self._links:
            self._send(self._links[link].address, note)

    def _drop_silent_senders(self, now: float) -> None:
        """Fail the rooms of senders that are silent for too long, and remove those senders."""
        gone = {link for link, heard in self._heard.items() if now - heard > self._limits.resume_seconds}
        if not gone:
            return
        for state in self.rooms.opened_by(gone):
            self.rooms.fail(state, f"its sender is silent for {self._limits.resume_seconds:g} s", tell=False)
        for link in gone:
            del self._heard[link]
            if link in self._links:
                self._drop_connection(self._links[link].address)

    def _drop_connection(self, address: bytes) -> None:
        peer = self._peers.pop(address, None)
        self._to_grant.discard(address)
        if peer is not None and self._links.get(peer.link) is peer:
            del self._links[peer.link]
            self._metrics.count("kv_links", -1)

    def _send(self, address: bytes, message: wire.FromReceiver) -> None:
        if not self._socket.send(address, wire.encode(message)):
            # The peer is gone, or does not read. It sends Hello when it is back.
            self._drop_connection(address)
