"""SGLang's interface to an outgoing room at the prefill server, until its KV is in the link's buffers."""

import itertools
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from sglang_ext.managers.kv_transfer.progressive import compatibility
from sglang_ext.managers.kv_transfer.progressive.decode_peers import DecodePeer
from sglang_ext.managers.kv_transfer.progressive.handshakes import RoomMetadata
from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage, page_hashes
from sglang_ext.managers.kv_transfer.progressive.rooms import QueryReader, RoomEncoder
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPromptCodec
from sglang_ext.managers.kv_transfer.wire import LinkError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds

# The message of SGLang's own class.
ABORTED = "Aborted by AbortReq."
# Bytes of packed prompts at one rank from which no more are packed early. Full KV stays in the pool then.
MAX_PACKED_BYTES = 4 << 30

# Numbers of senders in SGLang's tables.
_numbers = itertools.count(1)


class ProgressiveSender(CommonKVSender):
    """Sender of one request. SGLang's scheduler calls it. ``on_metadata``, ``succeed`` and ``fail`` are called from other threads.

    Success is reported once the whole room is encoded. Its KV may then be freed. The decode side reports later errors.
    """

    kv_mgr: ProgressiveManager
    bootstrap_room: int
    """Number of this sender: several requests may have the same room. SGLang's class has the room here, this one in :attr:`room`."""

    def __init__(self, mgr: ProgressiveManager, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs) -> None:
        self.room = bootstrap_room
        super().__init__(mgr, bootstrap_addr, next(_numbers), *args, **kwargs)
        # Whether the first KV was submitted for encoding. Whether SGLang has finished with the request and no longer polls this sender; a
        # successful room continues to be sent. Whether it was aborted on this side. Used by the scheduler's thread.
        self._is_sending = self._is_cleared = self._is_aborted = False
        self.init_time = time.time()
        self._prompt: Sequence[int] = ()
        self.tokens = 0
        self._read_queries: QueryReader | None = None
        self._packing: tuple[Packing, KVBuffers] | None = None
        self._metadata: RoomMetadata | None = None
        self._peer: DecodePeer | None = None
        self._encoder: RoomEncoder | None = None
        # Pages of a prompt that was packed early, and its range of quantized tokens.
        self._packed: tuple[memoryview, ...] = ()
        self._packed_range: tuple[int, int] | None = None
        # Slots of tokens that do not fill a page yet, and lengths of the pages not sent yet.
        self._slots = np.empty(0, np.int64)
        self._lengths: deque[int] = deque()
        # SGLang sets it where a cached prefix is sent before the forward that may still write it (maybe_send_cached_prefix_chunk).
        self._early_send_wait_event: torch.cuda.Event | None = None

    def set_prompt(
        self,
        tokens: Sequence[int],
        refused: str | None = None,
        packing: tuple[Packing, KVBuffers] | None = None,
        read_queries: QueryReader | None = None,
    ) -> None:
        """Set the request's token ids, whose hashes identify its pages, and wait for the decode side. Called before ``init``.

        ``refused`` says why SGLang has ended the request already; the sender then fails. ``packing`` allows to send the prompt as quantized
        KV in this packing, from a pool with these buffers. ``read_queries`` returns the newest queries, sent with the auxiliary record.
        """
        self._packing, self._read_queries = packing, read_queries
        self._prompt, self.tokens = tokens, len(tokens)
        self.kv_mgr.handshakes.join(self)
        if refused is not None:
            self._give_up(refused)

    @property
    def is_sending_prefix(self) -> bool:
        """Whether SGLang's next send is a cached prefix, sent before the forward of the remaining tokens."""
        return self._early_send_wait_event is not None

    def defer_prefix(self) -> None:
        """Send the cached prefix together with the following tokens instead of now."""
        self._early_send_wait_event = None

    @property
    def is_waiting_packed(self) -> bool:
        """Whether the prompt is packed and waits for slots at the decode side."""
        return self._packed_range is not None

    def pack_early(self, begin: int, end: int, slots: torch.Tensor) -> bool:
        """Pack the prompt into host memory before the decode side has slots, so that its full KV can be freed.

        Tokens ``begin`` to ``end`` are packed as quantized KV; ``slots``, int64 [tokens], are those of the full KV. Returns False, without
        any effect, if the prompt cannot be packed, if ``MAX_PACKED_BYTES`` wait already, or if the request was given up here.
        """
        if self._peer is not None or self._packing is None or self._is_cleared or self.kv_mgr.packed_bytes >= MAX_PACKED_BYTES:
            return False
        codec = self._codec(begin, end)
        ends = codec.ends(len(self._prompt))
        parts = (codec.encode(PlacedPage(start, slots[start:stop])).anchor for start, stop in zip([0, *ends], ends))
        # The pages are copied. Otherwise they would keep the blocks that links need.
        self._packed, self._packed_range = tuple(memoryview(bytes(part)) for part in parts), (begin, end)
        self.kv_mgr.packed_bytes += sum(map(len, self._packed))
        self.kv_mgr.add_event(self.room, "computed")
        return True

    def _take_packed(self) -> tuple[memoryview, ...]:
        """Return and forget the pages of a prompt that was packed early; empty if there are none."""
        packed, self._packed, self._packed_range = self._packed, (), None
        self.kv_mgr.packed_bytes -= sum(map(len, packed))
        return packed

    def on_metadata(self, metadata: RoomMetadata) -> None:
        """Record the metadata of the decode side, which has slots for this request."""
        differs = compatibility.metadata_mismatch(metadata, self.kv_mgr.settings, self.kv_mgr.aux.sizes, self.kv_mgr.has_keys)
        if differs is not None:
            self.kv_mgr.refuse(metadata, differs)
            self.fail(differs)
            return
        # Set first: if this sender ends from now on, it refuses the metadata.
        self._metadata = metadata
        status = self.kv_mgr.request_status.get(self.bootstrap_room)
        if status in (None, KVPoll.Failed):
            reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "the request has ended at the prefill server")
            self.kv_mgr.refuse(metadata, reason)
        if status == KVPoll.Bootstrapping:
            self.kv_mgr.req_to_decode_prefix_len[self.bootstrap_room] = metadata.prefix
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
            if self._is_cleared:
                # The scheduler's thread cleared this sender meanwhile.
                super().clear()

    def succeed(self) -> None:
        """Report success: the link holds the whole room."""
        self.kv_mgr.add_event(self.room, "encoded")
        if not self._is_cleared:
            self.kv_mgr.conclude(self.bootstrap_room, None)

    def fail(self, reason: str) -> None:
        """Record that the rest of the KV will not arrive. SGLang is notified unless it has cleared the request."""
        if self._metadata is not None:
            # The link itself may have failed, while the decode side waits for the room.
            self.kv_mgr.refuse(self._metadata, reason)
        if not self._is_cleared:
            self.kv_mgr.conclude(self.bootstrap_room, reason)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Open the room on the link for ``num_kv_indices`` of SGLang's pages and row ``aux_index`` of the auxiliary records."""
        super().init(num_kv_indices, aux_index)
        metadata = self._metadata
        if metadata is None:
            return
        if metadata.tokens != len(self._prompt):
            self._give_up(
                f"the prompt of bootstrap_room {self.room} has {len(self._prompt)} tokens at the prefill server and {metadata.tokens} at "
                "the decode server: send both servers the same prompt, and each request with a bootstrap_room of its own"
            )
            return
        try:
            self._encoder = self._room(metadata)
            self._peer = self.kv_mgr.peers.open(metadata.endpoint, self._encoder)
        except LinkError as error:
            self._give_up(str(error))

    def _room(self, metadata: RoomMetadata) -> RoomEncoder:
        """Build the encoder of the room, with the pages that the decode side asks for. Raise ``LinkError`` if they cannot be sent."""
        prefix, (begin, end), packed = metadata.prefix, metadata.coded, self._packed_range
        if packed not in (None, metadata.coded):
            raise LinkError(
                f"tokens {packed[0]} to {packed[1]} of the prompt are packed, and the decode server asks for {begin} to {end}: give "
                "both servers the same --page-size and --kv-sparse-from"
            )
        if begin != end and (self._packing is None or prefix):
            raise LinkError(
                f"the decode server asks for tokens {begin} to {end} as quantized KV, which this server cannot send: start both alike"
            )
        codec = self.kv_mgr.codec if begin == end else self._codec(begin, end)
        ends = codec.ends(len(self._prompt), prefix)
        hashes = page_hashes(self._prompt, ends, prefix, codec.page_size)
        starts = [prefix, *ends][: len(ends)]
        self._lengths.extend(stop - start for start, stop in zip(starts, ends))
        return RoomEncoder(metadata.link_room, codec, starts, hashes, self)

    def _codec(self, begin: int, end: int) -> QuantizedPromptCodec:
        packing, buffers = self._packing
        seeds = token_seeds(self._prompt, len(self._prompt), self.kv_mgr.pool.device) if packing.stochastic else None
        return QuantizedPromptCodec(self.kv_mgr.pool, packing, buffers, begin, end, self.kv_mgr.codec.page_size, seeds)

    def send(self, kv_indices: np.ndarray, state_indices: list | None = None, num_kv_tokens: int | None = None) -> None:
        """Send the KV that a forward computed: ``num_kv_tokens`` tokens, or all if None, in SGLang's pages, int [pages]."""
        kv_indices, _, last, _ = self._prepare_send_indices(kv_indices, state_indices)
        self._record_transfer_indices(kv_indices, state_indices)
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        if self._peer is None or self.poll() == KVPoll.Failed:
            return
        if last:
            self.kv_mgr.add_event(self.room, "computed")
        if not self._is_sending:
            self._is_sending = True
            self.kv_mgr.add_event(self.room, "sending")
        page = self.kv_mgr.kv_args.page_size
        slots = (np.asarray(kv_indices, np.int64)[:, None] * page + np.arange(page)).ravel()[:num_kv_tokens]
        self._slots = np.concatenate([self._slots, slots])
        # A packed prompt is complete. Its slots may belong to other requests now.
        pages: list[torch.Tensor | memoryview] = [*self._take_packed()]
        if pages:
            self._lengths.clear()
        while self._lengths and self._lengths[0] <= len(self._slots):
            size = self._lengths.popleft()
            pages.append(torch.from_numpy(self._slots[:size]).to(self.kv_mgr.pool.device))
            self._slots = self._slots[size:]
        if pages or last:
            self._peer.send(self._encoder, tuple(pages), self._record() if last else None, ready)

    def poll(self) -> int:
        """Return the state of the transfer (``KVPoll``)."""
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        elif status == KVPoll.Bootstrapping and self._check_bootstrap_timeout() is not None:
            return KVPoll.Failed
        else:
            self.kv_mgr.polls.asked(self.bootstrap_room)
        return status

    def failure_exception(self) -> None:
        """Raise the reason of the failure as ``KVTransferError``."""
        if self._is_aborted:
            raise KVTransferError(self.room, ABORTED)
        if self.conclude_state is None:
            self.conclude_state = KVPoll.Failed
        self.clear()
        self.kv_mgr.raise_failure(self.bootstrap_room, self.room)

    def clear(self) -> None:
        """Release the request's state. SGLang has finished with it; a successful room continues to be sent."""
        if self._is_cleared:
            return
        self._is_cleared = True
        self._take_packed()
        if self.conclude_state != KVPoll.Success:
            with self.kv_mgr.failure_lock:
                reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "it failed at another rank")
            self._cancel(reason)
        self.kv_mgr.handshakes.leave(self, "the request has ended at the prefill server")
        super().clear()

    def abort(self) -> None:
        """Abort the request on this side and remove all its state, since SGLang does not poll every aborted sender again."""
        super().abort()
        self.clear()
        self._is_aborted = True
        with self.kv_mgr.failure_lock:
            self.kv_mgr.failure_records.pop(self.bootstrap_room, None)

    def _record(self) -> bytes:
        most = self._metadata.aux_sizes[-1]
        return self.kv_mgr.aux.read(self.aux_index) + (self._read_queries(most) if self._read_queries is not None and most else b"")

    def _give_up(self, reason: str) -> None:
        self.fail(reason)
        self._cancel(reason)

    def _cancel(self, reason: str) -> None:
        """Stop sending, and make sure that the decode side does not wait."""
        if self._peer is not None:
            self._peer.cancel(self._encoder, reason)
        elif self._metadata is not None:
            self.kv_mgr.refuse(self._metadata, reason)
        self.kv_mgr.handshakes.leave(self, reason)
