"""Both sides of the transfer backend ``progressive`` in one process: pools, and managers whose control plane is a function call."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until

from sglang_ext.managers.kv_transfer.limits import NetworkInterface, PollThrottle
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.progressive.compatibility import make_codec
from sglang_ext.managers.kv_transfer.progressive.decode_peers import DecodePeers
from sglang_ext.managers.kv_transfer.progressive.handshakes import Handshakes, RoomFailure
from sglang_ext.managers.kv_transfer.progressive.manager import PrefillDirectory, ProgressiveManager, fetch_prefill_server
from sglang_ext.managers.kv_transfer.progressive.page_codec import UNIT
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import AuxRecords, PoolBuffers
from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext.managers.kv_transfer.wire import LinkSettings

LAYERS, HEADS, KEY_DIM, VALUE_DIM, SLOTS, AUX_ROWS = 2, 2, 16, 8, 1024, 8
ADDRESS = "127.0.0.1:1"
PAGE = 16
# Of a request at the decode server, in the token table.
ROW = 3


def make_pool(
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    seed: int = 0,
    value_dim: int = VALUE_DIM,
    key_dim: int = KEY_DIM,
    kind: type[PoolBuffers] = PoolBuffers,
) -> PoolBuffers:
    """A pool of random numbers with auxiliary records of two rows, in tensors that it keeps alive."""
    made = torch.Generator().manual_seed(seed)
    dims = [key_dim] * LAYERS + [value_dim] * LAYERS
    tensors = [torch.randn(SLOTS, HEADS, dim, generator=made).to(dtype) for dim in dims]
    aux = [torch.randint(0, 1 << 30, (AUX_ROWS, width), generator=made, dtype=torch.int32) for width in (16, 3)]
    args = SimpleNamespace(
        kv_data_ptrs=[each.data_ptr() for each in tensors],
        kv_data_lens=[each.nbytes for each in tensors],
        kv_item_lens=[each[0].nbytes * page_size for each in tensors],
        aux_data_ptrs=[each.data_ptr() for each in aux],
        aux_item_lens=[each[0].nbytes for each in aux],
        page_size=page_size,
        engine_rank=0,
        tensors=tensors,
        aux=aux,
    )
    return kind(args, dtype, HEADS, key_dim, value_dim, torch.device("cpu"))


class WatchedPool(PoolBuffers):
    """Tells of each wait for the device. ``told`` is called with the kind of wait: ``all`` or ``links``."""

    def watch(self, told: Callable[[str], None]) -> None:
        """From now on."""
        object.__setattr__(self, "told", told)

    def synchronize(self) -> None:
        """Told, and done."""
        getattr(self, "told", lambda kind: None)("all")
        super().synchronize()

    def synchronize_links(self) -> None:
        """Told, and done."""
        getattr(self, "told", lambda kind: None)("links")
        super().synchronize_links()


def rows(pool: PoolBuffers, slots: torch.Tensor) -> torch.Tensor:
    """What the pool holds there, uint8 [tokens, bytes]."""
    return torch.cat([each[slots].view(torch.uint8).flatten(1) for each in pool.tensors], 1)


class Manager:
    """A rank's manager without sockets: its peer's is called instead. What it does with rooms is the real one's."""

    update_status, check_status = ProgressiveManager.update_status, CommonKVManager.check_status
    record_failure, conclude = CommonKVManager.record_failure, ProgressiveManager.conclude
    raise_failure, add_event = ProgressiveManager.raise_failure, ProgressiveManager.add_event

    def __init__(self, reference: str, pool: PoolBuffers) -> None:
        self.pool, self.aux = pool, AuxRecords(pool.args)
        self.codec, self.kv_args = replace(make_codec(reference, pool), page_size=UNIT), pool.args
        kind = str(pool.dtype).removeprefix("torch.")
        named = self.codec.name, self.codec.version, self.codec.options, self.codec.reference
        self.settings = LinkSettings("0f" * 16, kind, LAYERS, HEADS, KEY_DIM, VALUE_DIM, self.codec.page_size, *named, 0, 1)
        self.timeline: TransferTimeline | None = None
        self.has_keys = False
        self.polls = PollThrottle()
        self.request_status: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.failure_lock = threading.Lock()
        self.kv_cache_dtype_str = "auto"
        self.attn_tp_size, self.attn_dp_rank, self.local_ip, self.rank_port = 1, 0, "127.0.0.1", 1
        # What SGLang's classes look at.
        self.attn_cp_size = self.pp_size = 1
        self.attn_cp_rank = self.pp_rank = 0
        self.is_mla_backend = self.is_hybrid_mla_backend = False
        self.is_dummy_cp_rank = self.enable_all_cp_ranks_for_transfer = self.enable_staging = False
        self.req_to_decode_prefix_len, self.transfer_infos = {}, {}
        self.required_prefill_response_num_table, self.prefill_response_tracker = {}, {}
        self.addr_to_rooms_tracker = defaultdict(set)
        self.prefill_info_table = {ADDRESS: prefill_info()}
        self.bootstrap_timeout = self.waiting_timeout = 60.0


def prefill_info(tp_size: int = 1) -> PrefillServerInfo:
    """What the decode side knows of the prefill server."""
    named = {"target_tp_rank": 0, "target_tp_ranks": [0], "target_cp_ranks": [0], "target_pp_ranks": [0]}
    return PrefillServerInfo(tp_size, 1, 1, 1, 16, "auto", True, required_dst_info_num=1, required_prefill_response_num=1, **named)


class PrefillManager(Manager):
    """Of the prefill side."""

    def __init__(self, reference: str, pool: PoolBuffers, limits, gbps: float | None = None, **of_peers: int) -> None:
        super().__init__(reference, pool)
        self.decode: DecodeManager | None = None
        self.made: list[Link] = []
        self.handshakes, self.packed_bytes = Handshakes(self.refuse), 0
        interface = NetworkInterface(gbps)

        def connect(endpoint: str) -> Link:
            self.made.append(link := Link(endpoint, self.settings, limits, interface))
            return link

        self.peers = DecodePeers(connect, **of_peers)

    def refuse(self, metadata, reason: str) -> None:
        """As over the control plane."""
        self.decode._hear(RoomFailure(metadata.room, reason, metadata.link_room))

    def close(self) -> None:
        """End its links."""
        for link in self.made:
            link.close()


class DecodeManager(Manager):
    """Of the decode side."""

    disaggregation_mode, _hear = DisaggregationMode.DECODE, ProgressiveManager._hear
    try_ensure_parallel_info, rank_mismatch = ProgressiveManager.try_ensure_parallel_info, ProgressiveManager.rank_mismatch
    _resolve_ranks, _resolve_rank_mapping = ProgressiveManager._resolve_ranks, CommonKVManager._resolve_rank_mapping

    def __init__(self, reference: str, pool: PoolBuffers, limits, endpoint: str) -> None:
        super().__init__(reference, pool)
        self.connection_lock = threading.Lock()
        self.directory = PrefillDirectory(lambda address: fetch_prefill_server(address, self._resolve_ranks), retry_interval=0.1)
        self.prefill_ranks: dict[str, dict] = {}
        self.prefill: PrefillManager | None = None
        self.connection_pool = {f"{ADDRESS}_0_0_0": [{"rank_ip": "127.0.0.1", "rank_port": 1, "is_dummy": False}]}
        self.links = LinkServer(endpoint, self.settings, limits)
        self.said: list = []

    def send_message(self, address, message) -> bool:
        """As over the control plane; what it said is kept."""
        self.said.append(message)
        self.prefill.handshakes.take(message)
        return True

    def close(self) -> None:
        """End its links."""
        self.links.close()


def settled(end) -> bool:
    """Whether a sender or receiver succeeded or failed."""
    return end.poll() in (KVPoll.Success, KVPoll.Failed)


def pages_of(tokens: int, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """SGLang's pages for so many tokens, in no order, and the tokens' slots."""
    pages = np.array(random.Random(seed).sample(range(SLOTS // PAGE), -(-tokens // PAGE)), np.int64)
    return pages, torch.from_numpy((pages[:, None] * PAGE + np.arange(PAGE)).ravel()[:tokens])


def send(sender: ProgressiveSender, pages: np.ndarray, tokens: int, chunks: Sequence[int], aux_index: int = 3) -> None:
    """Send whole pages of each chunk, and the rest with the last, as SGLang's scheduler does. ``chunks`` are their ends, in pages."""
    sender.init(len(pages), aux_index)
    begin = 0
    for end in (*chunks, len(pages)):
        last = end == len(pages)
        sender.send(pages[begin:end], num_kv_tokens=(tokens if last else end * PAGE) - begin * PAGE)
        begin = end


def transfer(
    both: Any, room: int, prompt: Sequence[int], prefix: int = 0, chunks: Sequence[int] = (), receiver_first: bool = True
) -> tuple[ProgressiveSender, ProgressiveReceiver, torch.Tensor, torch.Tensor]:
    """Send a room between servers (conftest.py). Returns its sender and receiver, and the slots on both sides."""
    tokens = len(prompt) - prefix
    source, here = pages_of(tokens, room)
    target, there = pages_of(tokens, room + 1)

    def receive() -> ProgressiveReceiver:
        receiver = both.receiver(room, prompt)
        receiver.send_metadata(target, 5, decode_prefix_len=prefix)
        return receiver

    receiver = receive() if receiver_first else None
    sender = both.sender(room, prompt)
    if receiver is None:
        assert sender.poll() == KVPoll.Bootstrapping
        receiver = receive()
    assert sender.poll() == KVPoll.WaitingForInput and sender.pop_decode_prefix_len() == prefix
    send(sender, source, tokens, chunks)
    return sender, receiver, here, there


def begun_early(both: Any, prompt: Sequence[int]) -> tuple[ProgressiveSender, torch.Tensor, torch.Tensor, Any]:
    """Send a room whose request begins on its anchor. Returns its sender, the slots on both sides, and what is to come."""
    rest: list[Any] = []
    both.begin = rest.append
    sender, receiver, here, there = transfer(both, 7, prompt)
    until(lambda: receiver.poll() == KVPoll.Success)
    receiver.clear()
    return sender, here, there, rest[0]
