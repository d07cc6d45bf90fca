"""SGLang's interface to an incoming room at the decode server, from slot allocation until the KV is written."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.utils.network import NetworkAddress

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.progressive.handshakes import CONTROL_VERSION, RoomAbort, RoomMetadata
from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage, page_hashes
from sglang_ext.managers.kv_transfer.progressive.rooms import PromptQueries, RoomWriter
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPromptCodec, QuantizedPromptSlots
from sglang_ext.managers.kv_transfer.wire import LinkError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ProgressiveReceiver(CommonKVReceiver):
    """Receiver of one request. SGLang's scheduler calls it. ``anchor_arrived``, ``succeed`` and ``fail`` are called from threads of links.

    Success is reported once all KV has arrived. For a request with early decoding it is reported once the anchor has arrived. The rest is
    then written to the request's slots while it decodes, and the receiver is handed over to ``ArrivingFullKV``.
    """

    kv_mgr: ProgressiveManager
    bootstrap_room: int
    """The ``link_room`` of this attempt to receive the room. SGLang's class keeps the room here; :attr:`room` has it instead."""

    def __init__(self, mgr: ProgressiveManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.room = bootstrap_room
        # Key in SGLang's tables of requests.
        super().__init__(mgr, bootstrap_addr, random.getrandbits(62))
        self._prompt: Sequence[int] = ()
        self._refused: str | None = None
        self._writer: RoomWriter | None = None
        self._queries: PromptQueries | None = None
        self._row: Callable[[], int] | None = None
        self._quantized_slots: Callable[[], QuantizedPromptSlots] | None = None
        self._start_early: "Callable[[ProgressiveReceiver], None] | None" = None
        self.prefill_again: "Callable[[Req], None] | None" = None
        self.bootstrap_infos = None
        self._created = time.monotonic()

    @property
    def anchor_ready(self) -> bool:
        """Whether all anchors and the auxiliary record are written."""
        return self._writer is not None and self._writer.anchor_ready

    @property
    def complete(self) -> bool:
        """Whether all KV is written, with its residuals."""
        return self._writer is not None and self._writer.complete

    @property
    def failure(self) -> str | None:
        """Why the rest of the KV will not arrive; None while it may."""
        return self._writer.failure

    def set_prompt(self, tokens: Sequence[int], refused: str | None = None) -> None:
        """Set the request's token ids, whose hashes identify its pages, and why it has ended already. Called before ``send_metadata``."""
        self._prompt, self._refused = tokens, refused

    def expect_queries(self, queries: PromptQueries, row: Callable[[], int]) -> None:
        """Accept the newest queries of the prompt. ``row`` returns the request's row once it has one. Called before ``send_metadata``."""
        self._queries, self._row = queries, row

    def expect_quantized(self, coded: Callable[[], QuantizedPromptSlots]) -> None:
        """Ask for the prompt as quantized KV. Called before ``send_metadata``. ``coded`` returns its slots once they are allocated."""
        self._quantized_slots = coded

    def enable_early_decoding(self, begin: "Callable[[ProgressiveReceiver], None]", prefill_again: "Callable[[Req], None]") -> None:
        """Let the request decode on the anchor of its KV. Called before ``send_metadata``.

        ``begin`` is called with this receiver when the request starts to decode. ``prefill_again`` lets the prefill server compute the
        request again, after its slots were freed.
        """
        self._start_early, self.prefill_again = begin, prefill_again

    def anchor_arrived(self) -> None:
        """All anchors and the auxiliary record are written."""
        self.kv_mgr.add_event(self.room, "anchor", self._writer.anchor_size)
        if self._start_early is not None:
            self.kv_mgr.conclude(self.bootstrap_room, None)

    def succeed(self) -> None:
        """All parts are written."""
        self.kv_mgr.add_event(self.room, "complete", self._writer.size)
        self.kv_mgr.conclude(self.bootstrap_room, None)

    def fail(self, reason: str) -> None:
        """The rest of the room will not arrive."""
        self.kv_mgr.conclude(self.bootstrap_room, reason)

    def init(self, prefill_dp_rank: int) -> None:
        """Connect to the known prefill server: refuse a server with other ranks, else look up the address of the matching rank."""
        prefill = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        differs = None if prefill is None else self.kv_mgr.rank_mismatch(prefill)
        if differs is None:
            super().init(prefill_dp_rank)
        else:
            self._give_up(differs)
        if self.bootstrap_infos is not None and self.conclude_state is None:
            # Checked here too: the request may have been refused because there are no slots.
            self._ends_refused()

    def send_metadata(
        self,
        kv_indices: np.ndarray,
        aux_index: int | None = None,
        state_indices: list | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Register the room, then send its metadata to the prefill side.

        The request has SGLang's pages ``kv_indices``, int [pages], for its tokens after ``decode_prefix_len``, and row ``aux_index`` for its
        auxiliary record.
        """
        if self.bootstrap_infos is None:
            self._give_up(f"no prefill rank is known at {self.bootstrap_addr}")
            return
        if self._ends_refused():
            return
        prefix, coded = decode_prefix_len or 0, None if self._quantized_slots is None else self._quantized_slots()
        try:
            self._writer = self._make_writer(kv_indices, aux_index, prefix, coded)
            self.kv_mgr.links.rooms.register(self.bootstrap_room, self._writer.expected, self._writer)
        except LinkError as error:
            self._give_up(str(error))
            return
        self.kv_mgr.add_event(self.room, "expected")
        settings = wire.encode(self.kv_mgr.settings)
        sizes = (*self.kv_mgr.aux.sizes, self._queries.most_bytes if self._queries is not None else 0)
        here = self.kv_mgr.local_ip, self.kv_mgr.rank_port, self.kv_mgr.links.endpoint, settings, sizes
        places = (0, 0) if coded is None else (coded.begin, coded.end)
        metadata = RoomMetadata(CONTROL_VERSION, self.room, *here, prefix, len(self._prompt), self.bootstrap_room, places)
        if not all(self.kv_mgr.send_message(address, metadata) for address in self._prefill_ranks()):
            self._give_up(f"the prefill rank at {self.bootstrap_infos} cannot be reached")
            return
        self.init_time = time.time()

    def poll(self) -> int:
        """Return the state of the transfer (``KVPoll``)."""
        if self.conclude_state is not None:
            return self.conclude_state
        status = self.kv_mgr.check_status(self.bootstrap_room)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        elif status == KVPoll.WaitingForInput and self._check_waiting_timeout() is not None:
            return KVPoll.Failed
        elif status == KVPoll.Bootstrapping and time.monotonic() - self._created > self.kv_mgr.directory.patience:
            waited = f"the request waited {self.kv_mgr.directory.patience:g} s ({self.kv_mgr.directory.problem(self.bootstrap_addr)})"
            self._give_up(f"{self._no_prefill_server()}; {waited}")
            return KVPoll.Failed
        else:
            self.kv_mgr.polls.asked(self.bootstrap_room)
        return status

    def failure_exception(self) -> None:
        """Raise the reason of the failure as ``KVTransferError``. After this call nothing is written to the request's slots."""
        if self.conclude_state is None:
            self.conclude_state = KVPoll.Failed
        self.clear()
        self.kv_mgr.raise_failure(self.bootstrap_room, self.room)

    def clear(self) -> None:
        """Release the request's state. After this call nothing is written to the request's slots, unless it decodes early."""
        if self._queries is not None and self.conclude_state == KVPoll.Success:
            self._queries.write(self._row(), self._writer.queries)
        # With several ranks, some may have all of the KV already. The ranks agree on it when the request runs (ArrivingFullKV),
        # provided that all of them wait.
        early = self.kv_mgr.attn_tp_size > 1 or not self.complete
        if self._start_early is not None and self.conclude_state == KVPoll.Success and early:
            self._start_early(self)
        else:
            self.cancel()
        self._start_early = None
        super().clear()

    def cancel(self) -> None:
        """Stop the writes to the request's slots. When this returns, none is under way."""
        complete = self.complete
        self.kv_mgr.links.rooms.abort(self.bootstrap_room)
        if self._writer is not None and not complete:
            # Earlier writes may still be queued on the device.
            self.kv_mgr.pool.synchronize_links()

    def abort(self) -> None:
        """Abort the request on this side. SGLang also calls this after a failed search for the prefill server."""
        super().abort()
        if self.bootstrap_infos is None and self.bootstrap_addr not in self.kv_mgr.prefill_info_table:
            self.kv_mgr.record_failure(self.bootstrap_room, f"{self._no_prefill_server()}; the request was aborted")

    def _make_writer(self, kv_indices: np.ndarray, aux_index: int, prefix: int, coded: QuantizedPromptSlots | None) -> RoomWriter:
        """Build the writer of the prompt after ``prefix``. A quantized prompt is written to ``coded`` instead of SGLang's pages."""
        pool, codec, prompt = self.kv_mgr.pool, self.kv_mgr.codec, self._prompt
        if coded is None:
            page = self.kv_mgr.kv_args.page_size
            own = (np.asarray(kv_indices, np.int64)[:, None] * page + np.arange(page)).ravel()[: len(prompt) - prefix]
            if len(own) != len(prompt) - prefix:
                raise LinkError(f"{len(own)} slots for {len(prompt) - prefix} tokens of room {self.room}")
        else:
            codec, prefix = QuantizedPromptCodec(pool, coded.packing, coded.buffers, coded.begin, coded.end, codec.page_size), 0
        ends = codec.ends(len(prompt), prefix)
        spans = list(zip([prefix, *ends], ends))
        slots = (torch.from_numpy(own[start - prefix : end - prefix]) if coded is None else coded.slots(start, end) for start, end in spans)
        pages = [PlacedPage(start, each.to(pool.device)) for (start, _), each in zip(spans, slots)]
        if coded is not None:
            # Threads of links read these slot tensors on another stream than the one that computes them.
            pool.synchronize()
        hashes = page_hashes(prompt, ends, prefix, codec.page_size)
        return RoomWriter(codec, self.kv_mgr.aux, aux_index, pages, hashes, self, self._queries)

    def _ends_refused(self) -> bool:
        """End the rooms of both sides if the request has ended before its KV is expected. Return whether it has."""
        if self._refused is None:
            return False
        self._give_up(self._refused)
        self._send_abort_notification()
        return True

    def _no_prefill_server(self) -> str:
        return f"no prefill server answers at {self.bootstrap_addr}, which the request's bootstrap_host and bootstrap_port name"

    def _get_bootstrap_info_from_server(self, *position: int) -> dict[str, Any] | None:
        """Return the address of a prefill rank that the directory has fetched; None if unknown. SGLang's class reads it over HTTP."""
        return self.kv_mgr.prefill_ranks.get(self.bootstrap_addr, {}).get(position)

    def _give_up(self, reason: str) -> None:
        self.fail(reason)
        self.conclude_state = KVPoll.Failed

    def _prefill_ranks(self) -> list[NetworkAddress]:
        return [NetworkAddress(info["rank_ip"], int(info["rank_port"])) for info in self.bootstrap_infos]

    def _send_abort_notification(self) -> None:
        """Tell the prefill ranks that this side ends the room. Overrides SGLang's method."""
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "aborted")
        for address in self._prefill_ranks():
            self.kv_mgr.send_message(address, RoomAbort(self.room, reason[:2048], self.bootstrap_room))
