"""The transfer manager of one rank: state shared by its senders or receivers, and the thread that receives control messages. On the decode
side, also the prefill servers that it knows.

SGLang's decode scheduler reads a bootstrap server over HTTP in its own thread. A bootstrap server that accepts connections and does not
answer then stops all requests of the decode server for 5 s per attempt. The directory never waits: the scheduler polls it.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import requests
import zmq
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, KVTransferError, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.limits import LinkLimits, NetworkInterface, PollThrottle
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.progressive import compatibility, handshakes
from sglang_ext.managers.kv_transfer.progressive.compatibility import compile_kernels, make_codec
from sglang_ext.managers.kv_transfer.progressive.decode_peers import MAX_TOTAL_BYTES, DecodePeers
from sglang_ext.managers.kv_transfer.progressive.handshakes import Control, Handshakes, RoomFailure, RoomMetadata
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferEventKind, TransferTimeline, link_metrics
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream, WireError, encode
from sglang_ext.managers.metrics import MetricSet
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory

logger = logging.getLogger(__name__)

# Bootstrap servers that are read at once.
MAX_FETCHES = 16
# Seconds: for one HTTP response, between two attempts at one address, and that a request waits for its prefill server.
FETCH_TIMEOUT, RETRY_INTERVAL, PATIENCE = 5.0, 1.0, 30.0

# Share of the free host memory that a decode server pins at start for the anchors of all its ranks; pool_buffers.py has a limit per rank.
PINNED_SHARE = 0.25

# A prefill rank's position: data parallel, context parallel, tensor parallel and pipeline rank.
RankPosition = tuple[int, int, int, int]
# For each prefill rank that this decode rank needs, ``rank_ip`` and ``rank_port`` of its control socket.
RankAddresses = dict[RankPosition, dict[str, Any]]
PrefillServer = tuple[PrefillServerInfo, RankAddresses]


@dataclass
class FetchAttempts:
    """Attempts to fetch one address: when a request last polled it, the running one, and why the last one failed."""

    polled: float
    running: Future[PrefillServer] | None = None
    retry_at: float = 0.0
    problem: str = "it does not answer"


class PrefillDirectory:
    """Fetches prefill servers by bootstrap address. At most one fetch per address runs at a time. Used by one thread.

    ``fetch`` reads one bootstrap server, in a background thread. Any exception is a failed attempt; the next follows after
    ``retry_interval`` seconds. A request without a prefill server fails after ``patience`` seconds. Addresses that are polled no more are
    forgotten.
    """

    def __init__(self, fetch: Callable[[str], PrefillServer], retry_interval: float = RETRY_INTERVAL, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._fetch, self._retry_interval = fetch, retry_interval
        self._executor = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-bootstrap")
        self._attempts: dict[str, FetchAttempts] = {}

    def poll(self, address: str) -> PrefillServer | None:
        """Return the prefill server once it is fetched. Until then, start a fetch if none runs, and return None. Does not block."""
        now = time.monotonic()
        self._attempts = {other: each for other, each in self._attempts.items() if now - each.polled <= self.patience}
        attempts = self._attempts.setdefault(address, FetchAttempts(now))
        attempts.polled = now
        if attempts.running is None and now >= attempts.retry_at:
            attempts.running = self._executor.submit(self._fetch, address)
        if attempts.running is None or not attempts.running.done():
            return None
        done, attempts.running = attempts.running, None
        error = done.exception()
        if error is None:
            del self._attempts[address]
            return done.result()
        if attempts.problem != str(error):
            logger.warning("the bootstrap server at %s cannot be read: %s; next attempt in %g s", address, error, self._retry_interval)
        attempts.problem, attempts.retry_at = str(error), now + self._retry_interval
        return None

    def problem(self, address: str) -> str:
        """Why the last attempt at an address failed."""
        attempts = self._attempts.get(address)
        return FetchAttempts.problem if attempts is None else attempts.problem


def fetch_prefill_server(address: str, resolve: Callable[[PrefillServerInfo], list[RankPosition]]) -> PrefillServer:
    """Read the topology of a prefill server, and the addresses of the ranks that ``resolve`` returns, from its bootstrap server.

    Raises:
        requests.RequestException: The server does not answer within ``FETCH_TIMEOUT``, or answers with an error status.
    """
    info = PrefillServerInfo(**_get_route(address, (-1, -1, -1, -1)))
    return info, {position: _get_route(address, position) for position in resolve(info)}


def _get_route(address: str, position: RankPosition) -> dict[str, Any]:
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    response = requests.get(f"http://{address}/route", params=dict(zip(names, position)), timeout=FETCH_TIMEOUT)
    response.raise_for_status()
    return response.json()


class ProgressiveManager(CommonKVManager):
    """Manager of one prefill rank or one decode rank.

    The prefill side has ``handshakes``, ``peers`` and ``packed_bytes``. The decode side has ``links``, ``directory`` and ``prefill_ranks``.

    Attributes:
        has_keys: Whether links are encrypted.
        packed_bytes: Bytes of packed prompts that wait for decode ranks.
        prefill_ranks: Control addresses of the ranks of each known prefill server, by bootstrap address.

    Raises:
        OptionError: The model's pool cannot be transferred, or the flags do not allow to make links.
    """

    @exit_on_refusal
    def __init__(self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerArgs, is_mla_backend: bool = False):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        try:
            self.pool = compatibility.describe_pool(args, server_args.get_model_config(), self.attn_tp_size)
            self.codec = make_codec(server_args.kv_reference, self.pool, server_args.kv_bench_codec)
            self.settings = compatibility.make_settings(server_args, self.pool, self.codec, self.attn_tp_rank, self.attn_tp_size)
            keys = None if server_args.kv_link_keys is None else LinkKeys.read(Path(server_args.kv_link_keys))
            self.has_keys = keys is not None
            recorded = server_args.kv_bench_timeline is not None and self.attn_tp_rank == 0
            self.timeline = TransferTimeline(server_args.kv_bench_timeline) if recorded else None
            self._start(keys, server_args.kv_link_gbps, link_metrics(server_args, disaggregation_mode.value))
        except LinkError as error:
            raise OptionError(f"--disaggregation-transfer-backend progressive: {error}") from error
        self.aux = AuxRecords(args)
        self.polls = PollThrottle()
        threading.Thread(target=self._listen, name="kv-control", daemon=True).start()

    def _start(self, keys: LinkKeys | None, gbps: float | None, metrics: MetricSet) -> None:
        # Done at start, not with the first page, because pinning and compiling take long.
        blocks = self.pool.blocks
        limits = LinkLimits().with_part_bytes(self.codec.most_bytes(Stream.ANCHOR))
        if self.pool.device.type == "cuda":
            compile_kernels(self.codec, self.disaggregation_mode == DisaggregationMode.DECODE)
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.handshakes, self.packed_bytes = Handshakes(self.refuse), 0
            logger.info(
                "sglang-ext: encoded pages that wait for decode servers take at most %.1f GiB of host memory in this rank, for all of them",
                MAX_TOTAL_BYTES / (1 << 30),
            )
            # Each host of a server runs the same number of its ranks.
            interface = NetworkInterface(gbps, max(1, self.attn_tp_size // self.server_args.nnodes))
            self.peers = DecodePeers(lambda endpoint: Link(endpoint, self.settings, limits, interface, keys, metrics))
        else:
            endpoint = compatibility.receiving_endpoint(self.local_ip, self.kv_args.engine_rank, keys)
            self.links = LinkServer(endpoint, self.settings, limits, keys, blocks.take_unshared, metrics)
            if self.codec.has_residual:
                # Anchors stay in host memory until their residuals arrive.
                blocks.expect(int(AvailableMemory.find().available * PINNED_SHARE) // self.attn_tp_size)
            self.directory = PrefillDirectory(lambda address: fetch_prefill_server(address, self._resolve_ranks))
            self.prefill_ranks: dict[str, RankAddresses] = {}
            self._start_heartbeat_checker_thread()

    def refuse(self, metadata: RoomMetadata, reason: str) -> None:
        """Tell a decode rank that a room will not be sent."""
        self.send_message(NetworkAddress(metadata.host, metadata.port), RoomFailure(metadata.room, reason[:2048], metadata.link_room))

    def send_message(self, address: NetworkAddress, message: Control) -> bool:
        """Send a message to another manager without waiting. Return False if too many messages are queued already."""
        # The manager's own sockets are not used: they block the scheduler for 30 s if a peer has died.
        socket, lock = CommonKVReceiver._connect(address.to_tcp(), is_ipv6=address.is_ipv6)
        try:
            with lock:
                socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("%s cannot be reached, %s is not sent: %s", address.to_tcp(), type(message).__name__, error)
            return False
        return True

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Advance a request, named by a sender's number or a receiver's ``link_room``. A failed request stays failed. For any thread."""
        with self.failure_lock:
            # SGLang's own method replaces the status "failed", because it is the smallest.
            if self.request_status.get(bootstrap_room) != KVPoll.Failed:
                CommonKVManager.update_status(self, bootstrap_room, status)

    def conclude(self, number: int, reason: str | None) -> None:
        """Mark a sender's number, or a receiver's ``link_room``, as successful (None) or failed, unless it has ended. For any thread."""
        if self.request_status.get(number) in (None, KVPoll.Failed, KVPoll.Success):
            return
        if reason is None:
            self.update_status(number, KVPoll.Success)
        else:
            self.record_failure(number, reason)
            self.update_status(number, KVPoll.Failed)

    def submit_prefill_recompute(self, kv_receiver: CommonKVReceiver, payload: dict) -> None:
        """On the decode side, let the prefill server compute a request again, under a new request id."""
        # The prefill server may still run the first request, and refuses a second one with its id. SGLang also treats an id that starts
        # like an aborted id as the same request.
        super().submit_prefill_recompute(kv_receiver, payload | {"rid": f"again-{uuid4().hex}-{payload['rid']}"})

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return whether a prefill server is known. Starts to fetch an unknown one. Does not block; SGLang polls it."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        found = self.directory.poll(bootstrap_addr)
        if found is None:
            return False
        with self.connection_lock:
            self.prefill_info_table[bootstrap_addr], self.prefill_ranks[bootstrap_addr] = found
        return True

    def rank_mismatch(self, prefill: PrefillServerInfo) -> str | None:
        """Return why this decode rank cannot receive KV from a prefill server with this topology; None if it can."""
        for flag, theirs, ours in (
            ("--tp-size", prefill.attn_tp_size, self.attn_tp_size),
            ("--dp-size", prefill.dp_size, 1),
            ("--pp-size", prefill.pp_size, 1),
            ("--attn-cp-size", prefill.attn_cp_size, 1),
        ):
            if theirs != ours:
                return (
                    f"{flag} is {theirs} at the prefill server and {ours} at the decode server; backend progressive needs equal ranks: "
                    "start both alike, or use --disaggregation-transfer-backend mooncake"
                )
        for flag, theirs, ours in (
            ("--page-size", prefill.page_size, self.kv_args.page_size),
            ("--kv-cache-dtype", prefill.kv_cache_dtype, self.kv_cache_dtype_str),
        ):
            if theirs not in (None, ours):
                return f"{flag} is {theirs} at the prefill server and {ours} at the decode server: start both with the same {flag}"
        return None

    def _resolve_ranks(self, prefill: PrefillServerInfo) -> list[RankPosition]:
        if self.rank_mismatch(prefill) is not None:
            # The receivers of its requests report the reason.
            return []
        self._resolve_rank_mapping(prefill)
        return [(0, cp, tp, pp) for cp in prefill.target_cp_ranks for tp in prefill.target_tp_ranks for pp in prefill.target_pp_ranks]

    def add_event(self, room: int, kind: TransferEventKind, number: int = 0) -> None:
        """Record an event of a room in the timeline, if there is one."""
        if self.timeline is not None:
            self.timeline.add_event(room, kind, number=number)

    def raise_failure(self, number: int, room: int) -> NoReturn:
        """Raise the reason why a request failed, as ``KVTransferError``. ``room`` is the request's room, for the message."""
        with self.failure_lock:
            reason = self.failure_records.pop(number, None)
        raise KVTransferError(room, reason or "it failed at another rank", is_from_another_rank=reason is None)

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        rooms = self.addr_to_rooms_tracker[bootstrap_addr]
        rooms.difference_update([room for room in rooms.copy() if room not in self.request_status])

    def _listen(self) -> None:
        while True:
            frames = self.server_socket.recv_multipart()
            try:
                self._hear(handshakes.decode_control(frames[0] if len(frames) == 1 else b""))
            except WireError as error:
                logger.warning("ignored a control message: %s", error)
            except Exception:
                logger.exception("a control message could not be handled")

    def _hear(self, message: Control) -> None:
        if isinstance(message, RoomFailure):
            if self.disaggregation_mode == DisaggregationMode.DECODE:
                self.conclude(message.link_room, f"the prefill side ended it: {message.reason}")
        elif self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.handshakes.take(message)
