"""One cache rank as the inference rank sees it: its process, whether it answers, what it has said; and when another is started."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import zmq

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.process import RankProcess
from sglang_ext.managers.cache_rank.shared_memory import SharedMemory

if TYPE_CHECKING:
    from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBuffer

logger = logging.getLogger(__name__)

# A process that says nothing for so long has ended for all that requests know; it beats every 0.2 s, and between two questions.
SILENCE_SECONDS = 3.0
# Until it is heard first: it loads PyTorch. From then until it is ready it beats from a thread, which waits for compilers.
START_SECONDS, ATTACH_SECONDS = 120.0, 30.0
# Before another is started, doubled with each that ended before it answered; after so many no more are.
RESTART_SECONDS, MAX_STARTS = 0.5, 6
# A process that could be asked for so long is as good as one that answered.
SETTLED_SECONDS = 60.0
# Layers of a pack where they are chosen by what was measured (AsyncSpade, section 4.4): messages take this share of choosing at most.
MIN_PACK, MAX_PACK, MESSAGE_SHARE = 4, 12, 0.1
# Times that this is measured, and how long an answer is waited for: who looks later, as a scheduler that idles, would measure that.
PINGS, PING_SECONDS = 5, 0.02


class RankUnavailable(Exception):
    """The rank cannot be used now; says why, as metrics name it."""


@dataclass(frozen=True)
class RankSettings:
    """What all cache ranks of an inference rank are told.

    Attributes:
        attach: to be told with the epoch of each process.
        pack: layers of a pack; 0 for what is measured.
        threads: of each process.
        silence: seconds without a sign of life after which a process is ended.
    """

    attach: protocol.Attach
    pack: int = 0
    threads: int = 1
    silence: float = SILENCE_SECONDS


class Pack(NamedTuple):
    """Layers that are asked for at once: ``first`` to ``first + count``."""

    first: int
    count: int

    @property
    def layers(self) -> slice:
        """The same."""
        return slice(self.first, self.first + self.count)


def split_into_packs(layers: int, count: int) -> tuple[Pack, ...]:
    """All layers, in packs of ``count`` or fewer, as even as they can be."""
    number = -(-layers // min(count, layers))
    bounds = [layers * each // number for each in range(number + 1)]
    return tuple(Pack(begin, end - begin) for begin, end in zip(bounds, bounds[1:]))


class RankLink:
    """A cache rank, whichever process it is at present.

    Args:
        settings: of all ranks.
        begin: starts a process.

    Attributes:
        epoch: counts the processes; leases name it, and are void with it.
        packs: how layers are divided; known once the rank is :attr:`ready`.
        starts: processes that were started.
        seconds: that the last pack took to choose.
        answers: questions of this process that were answered and wait to be looked at, newest last.
    """

    def __init__(self, settings: RankSettings, begin: Callable[..., RankProcess] = RankProcess):
        self.settings = settings
        self.epoch = 0
        self.packs: tuple[Pack, ...] = ()
        self.starts = 0
        self.seconds = 0.0
        self.answers: list[protocol.SelectionReply] = []
        self._begin = begin
        self._process: RankProcess | None = None
        self._why = "starting"
        self._failures = 0
        self._due = self._ready_since = 0.0
        # Of the process that runs: when it was heard last, whether it was told what it serves, how long it takes.
        self._heard = 0.0
        self._told = False
        self._layer_seconds = 0.0
        self._free_places: list[int] = []
        self._pinged: dict[int, float] = {}
        self._round_trips: list[float] = []

    @property
    def ready(self) -> bool:
        """Whether it can be asked."""
        return bool(self.packs)

    @property
    def has_given_up(self) -> bool:
        """Whether no more processes are started."""
        return self._failures >= MAX_STARTS

    @property
    def down_reason(self) -> str:
        """Why it is not, as metrics name it."""
        return self._why

    @property
    def pid(self) -> int | None:
        """Process id; None while none runs."""
        return None if self._process is None else self._process.pid

    @property
    def memory(self) -> "SharedMemory | ExchangeBuffer":
        """In common with the process that runs."""
        return self._process.memory

    def poll(self) -> None:
        """Hear what it said; end it where it is silent, and start another where none runs. Waits for nothing."""
        if self._process is None:
            if not self.has_given_up and time.monotonic() >= self._due:
                self._start()
            return
        self._hear()
        if self._process is None:
            return
        silence = time.monotonic() - self._heard
        if not self._has_ended() and silence > self._silence:
            self._fail("silent", f"nothing was heard of it for {silence:.1f} s")

    @property
    def _silence(self) -> float:
        """Seconds without a sign of life after which it is ended."""
        if self.ready:
            return self.settings.silence
        return max(ATTACH_SECONDS, self.settings.silence) if self._told else START_SECONDS

    def _has_ended(self) -> bool:
        """Whether the process has; noted then."""
        status = self._process.ended
        if status is not None:
            self._fail("ended", f"it ended with status {status}")
        return status is not None

    def _start(self) -> None:
        self.epoch += 1
        self.starts += 1
        self._heard, self._told, self._pinged, self._round_trips = time.monotonic(), False, {}, []
        shape = self.settings.attach.shape
        self._free_places = list(range(shape.places))
        try:
            self._process = self._begin(shape, self.epoch, self.settings.threads)
        except OSError as error:
            self._fail("ended", f"it was not started: {error}")

    def _fail(self, down_reason: str, told: str) -> None:
        if self.ready and time.monotonic() - self._ready_since >= SETTLED_SECONDS:
            self._failures = 0
        self.packs, self.answers, self._free_places, self._why = (), [], [], down_reason
        if self._process is not None:
            alone = "; those whose full KV it had alone are computed again" if self.settings.attach.shape.rows else ""
            logger.warning("sglang-ext: cache rank (process %s): %s; its requests go without it for now%s", self.pid, told, alone)
            self._process.end()
            self._process = None
        self._due = time.monotonic() + RESTART_SECONDS * 2**self._failures
        self._failures += 1
        if self.has_given_up:
            text = (
                "sglang-ext: cache rank: %d processes ended before they answered; no more are started, and requests go without it until "
                "the server is restarted. The last: %s"
            )
            logger.error(text, MAX_STARTS, told)

    def end(self) -> None:
        """End the process, and start no other."""
        self.packs, self._failures = (), MAX_STARTS
        if self._process is not None:
            self._process.end()
            self._process = None

    def send_message(self, message: protocol.ToRank) -> None:
        """Send a message.

        Raises:
            RankUnavailable: it is not ready, or takes none; then its process is ended.
        """
        if self._process is None:
            raise RankUnavailable(self._why)
        try:
            self._process.socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            if not self._has_ended():
                self._fail("silent", "it takes no more messages")
            raise RankUnavailable(self._why) from None

    @property
    def has_free_place(self) -> bool:
        """Whether :meth:`place` has one."""
        return bool(self._free_places)

    def place(self) -> int | None:
        """A place in memory for keys, taken until the rank has copied them; None where all are."""
        return self._free_places.pop() if self._free_places else None

    def wait(self, seconds: float) -> None:
        """Until it says something, no longer than this; takes what it said."""
        if self._process is not None and self._process.socket.poll(max(0, int(seconds * 1000))):
            self._hear()

    def _hear(self) -> None:
        while self._process is not None:
            try:
                frame = self._process.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = protocol.decode_from_rank(frame)
            except protocol.ProtocolError as error:
                self._fail("wrong", f"it said what is no message: {error}")
                return
            # Of another process nothing can come, but by a fault.
            if message.epoch == self.epoch:
                self._heard = time.monotonic()
                try:
                    self._take(message)
                except RankUnavailable:
                    return

    def _take(self, message: protocol.FromRank) -> None:
        match message:
            case protocol.SelectionReply():
                self._failures = 0
                self.seconds = message.seconds if message.chosen else self.seconds
                self.answers.append(message)
            case protocol.PlacesFreed():
                self._free_places += (place for place in message.places if place not in self._free_places)
            case protocol.Heartbeat() if not self._told:
                self._told = True
                self._process.connected()
                self.send_message(self.settings.attach.with_epoch(self.epoch))
            case protocol.Heartbeat() if message.number in self._pinged:
                self._round_trips.append(time.monotonic() - self._pinged.pop(message.number))
                if len(self._round_trips) == PINGS:
                    self._become_ready()
            case protocol.Attached():
                self._layer_seconds = message.layer_seconds
                self._ping()
            case protocol.AttachRefused():
                self._fail("wrong", f"it refuses: {message.reason}")

    def _ping(self) -> None:
        """Measure how long messages take; answers that take longer than they are waited for are heard later."""
        for number in range(1, PINGS + 1):
            begun = self._pinged[number] = time.monotonic()
            self.send_message(protocol.RankPing(number))
            while number in self._pinged and (left := begun + PING_SECONDS - time.monotonic()) > 0:
                self.wait(left)

    def _become_ready(self) -> None:
        shape, asked = self.settings.attach.shape, self.settings.pack
        count = asked or choose_pack_size(min(self._round_trips), self._layer_seconds)
        self.packs, self._ready_since = split_into_packs(shape.layers, count), time.monotonic()
        logger.info(
            "sglang-ext: cache rank (process %d, start %d) is ready: room for %d tokens, packs of up to %d layers, a message and back "
            "%.2f ms, a layer of 1024 tokens %.2f ms",
            self.pid, self.epoch, self.settings.attach.blocks * protocol.BLOCK, max(pack.count for pack in self.packs),
            min(self._round_trips) * 1e3, self._layer_seconds * 1e3,
        )  # fmt: skip


def choose_pack_size(message_seconds: float, layer_seconds: float) -> int:
    """Layers of a pack, of which messages take no more than a tenth of choosing; 4 to 12."""
    wanted = message_seconds / MESSAGE_SHARE / max(layer_seconds, 1e-9)
    return int(min(MAX_PACK, max(MIN_PACK, wanted)))
