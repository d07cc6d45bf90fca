"""KV transfer between a prefill and a decode server (``--disaggregation-transfer-backend progressive``), as the worker sees it.

SGLang's side of the transfer, its queues and its sender and receiver classes, is hooked by hooks/transfer.py. The hooks ask the worker for
this feature. In mode full there is no worker, and the backend transfers full KV alone.

Early decoding: requests decode on anchors while their residuals are being transferred (Lynx, section 5). Such a request drafts on its own
row, whose slots hold the values of the anchor. The residual is written into the same slots. Once all residuals are written, the drafts are
verified, and the request is an ordinary one. Before that, drafts on an anchor are not output, and the KV is not inserted into a prefix tree.
"""

from typing import TYPE_CHECKING

from sglang_ext.config import options
from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.core import TPRanks
from sglang_ext.managers.feature import Feature, Worker
from sglang_ext.managers.kv_transfer.progressive.rooms import PromptQueries
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPrompt, QuantizedPromptAllocator, plan_quantized_prompt
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.managers.spec_decode.request_states import fallback_reason, is_token_only
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import RemotePrefill

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


class ArrivingFullKV(FullKVProvider):
    """Full-KV provider for requests whose full KV may still arrive over a link. ``ranks`` must agree on which KV has arrived."""

    def __init__(self, ranks: TPRanks = TPRanks()) -> None:
        self._ranks = ranks
        self._arrivals: dict[int, ProgressiveReceiver] = {}
        # By row: whether all KV has arrived (True), or the rest will not arrive (False).
        self._outcomes: dict[int, bool] = {}
        self.early = self

    def expect(self, row: int, arrival: "ProgressiveReceiver") -> None:
        """Register the request in a row, which decodes on its anchor. Called on all ranks between the same two rounds."""
        self._arrivals[row] = arrival

    def on_round_start(self, reqs: "list[Req]", drafting: dict[int, tuple], iteration_seconds: float | None) -> None:
        """Update the arrived requests: KV that is complete on all ranks can be verified at the end of this round."""
        waiting = sorted(self._arrivals.keys() - self._outcomes.keys())
        if not waiting:
            return
        seen = [(self._arrivals[row].complete, self._arrivals[row].failure is not None) for row in waiting]
        for row, *ranks in zip(waiting, *self._ranks.gather(seen), strict=True):
            if any(failed for _, failed in ranks):
                self._outcomes[row] = False
            elif all(complete for complete, _ in ranks):
                self._outcomes[row] = True

    def is_early(self, row: int) -> bool:
        """Return whether a request drafts on its anchor, or has pending drafts that were made on it."""
        return row in self._arrivals

    def has_arrived(self, row: int) -> bool:
        """Return whether all KV of an early request has arrived."""
        return self._outcomes.get(row, False)

    def is_lost(self, row: int) -> bool:
        """Return whether the rest of a request's KV will not arrive."""
        return self._outcomes.get(row) is False

    def remote_prefill(self, row: int) -> RemotePrefill | None:
        """Return the function with which the prefill server computes an early request again; None for other requests."""
        return self._arrivals[row].prefill_again if row in self._arrivals else None

    def end_early_decoding(self, row: int) -> None:
        """Make an early request an ordinary one: all of its drafts are verified at the end of this round."""
        self.forget(row)

    def forget(self, row: int) -> None:
        """Remove the request in ``row``, which ended or is an ordinary one. Its slots are no longer written to."""
        arrival = self._arrivals.pop(row, None)
        self._outcomes.pop(row, None)
        if arrival is not None:
            arrival.cancel()


class KVTransfer(Feature):
    """Early decoding, quantized prompts, and the newest queries of prompts."""

    prompt_queries: PromptQueries
    _worker: Worker
    _arriving: ArrivingFullKV | None = None

    def on_graphs_captured(self, worker: Worker) -> None:
        """Prepare for the first request."""
        model = worker.memory.model
        self._worker = worker
        self.prompt_queries = PromptQueries(worker.queries, (model.layers, model.query_heads, model.head_dim), worker.model_runner.dtype)

    @property
    def packs_prompts(self) -> bool:
        """Whether prompts are transferred as quantized KV."""
        return bool(quantized_transfer_settings(self.args))

    def full_kv_provider(self, worker: Worker, tree_cache: "TieredRadixCache") -> ArrivingFullKV | None:
        """Create the provider of a server whose requests decode early. None if all KV must arrive first."""
        if options.has_early_decoding(self.args):
            self._arriving = ArrivingFullKV(worker.ranks)
        return self._arriving

    def arriving_full_kv(self, req: "Req") -> ArrivingFullKV | None:
        """Return the provider for a request that decodes early; None if all KV must arrive first."""
        # A request that cannot draft, or has no tokens to draft, does not need an anchor.
        if not options.has_early_decoding(self.args) or fallback_reason(req) or req.sampling_params.max_new_tokens <= 1:
            return None
        # It may have to be prefilled again. SGLang's second request has tokens only, without adapter, image or embedding.
        if not is_token_only(req):
            return None
        return self._arriving

    def prompt_packing(self) -> tuple[Packing, KVBuffers] | None:
        """Return the packing of quantized prompts, and the buffers; None if prompts are transferred as full KV."""
        return (self._worker.layout.layout, self._worker.buffers) if self.packs_prompts else None

    def plan_early_packing(self, req: "Req") -> QuantizedPrompt | None:
        """Return the transfer plan of a computed prompt that waits for a decode server; None for full KV, or if it is not known yet."""
        worker = self._worker
        if not self.packs_prompts:
            return None
        return plan_quantized_prompt(req, len(req.origin_input_ids), worker.compressed_kv.methods[worker.requests.method_of(req)])

    def quantized_prompt_allocator(self, tree_cache: "TieredRadixCache") -> QuantizedPromptAllocator | None:
        """Create the allocator for prompts that arrive as quantized KV; None if they arrive as full KV."""
        if not self.packs_prompts:
            return None
        worker, freed_full_kv = self._worker, tree_cache.freed_full_kv
        return None if freed_full_kv is None else QuantizedPromptAllocator(worker.compressed_kv, freed_full_kv, worker.requests)
