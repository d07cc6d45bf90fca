"""KV transfer between a prefill and a decode server (``--disaggregation-transfer-backend progressive``), as the worker sees it.

SGLang's side of the transfer, its queues and its sender and receiver classes, is hooked by hooks/transfer.py. The hooks ask the worker for
this feature. In mode full there is no worker, and the backend transfers full KV alone.
"""

from typing import TYPE_CHECKING

from sglang_ext.config import options
from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.managers.feature import Feature, Worker
from sglang_ext.managers.kv_transfer.arriving_full_kv import ArrivingFullKV
from sglang_ext.managers.kv_transfer.prompt_queries import PromptQueries
from sglang_ext.managers.kv_transfer.quantized.decode_side import QuantizedPrompt, QuantizedPromptAllocator, plan_quantized_prompt
from sglang_ext.managers.spec_decode.request_states import fallback_reason, is_token_only
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


class KVTransfer(Feature):
    """Early decoding, quantized prompts, and the newest queries of prompts.

    Attributes:
        prompt_queries: Converts the newest queries of requests to bytes and back.
    """

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

    def arriving_full_kv(self, req: "Req", tree_cache: "TieredRadixCache") -> ArrivingFullKV | None:
        """Return the provider for a request that decodes early; None if all KV must arrive first.

        A request that cannot draft, or has no tokens to draft, does not need an anchor. A request that decodes early may have to be
        prefilled again. SGLang's second request to the prefill server has tokens only, without adapter, image or embedding.
        """
        if not options.has_early_decoding(self.args) or fallback_reason(req) or req.sampling_params.max_new_tokens <= 1:
            return None
        if not is_token_only(req):
            return None
        self._bind(tree_cache)
        return self._arriving

    def prompt_packing(self) -> tuple[Packing, KVBuffers] | None:
        """Return the packing of quantized prompts, and the buffers; None if prompts are transferred as full KV."""
        return (self._worker.layout.layout, self._worker.buffers) if self.packs_prompts else None

    def plan_early_packing(self, req: "Req") -> QuantizedPrompt | None:
        """Return the transfer plan of a computed prompt that waits for a decode server; None for full KV, or if it is not known yet."""
        worker = self._worker
        if worker.compressed_kv is None or not self.packs_prompts:
            return None
        return plan_quantized_prompt(req, len(req.origin_input_ids), worker.compressed_kv.methods[worker.requests.method_of(req)])

    def quantized_prompt_allocator(self, tree_cache: "TieredRadixCache") -> QuantizedPromptAllocator | None:
        """Create the allocator for prompts that arrive as quantized KV; None if they arrive as full KV."""
        if not self.packs_prompts:
            return None
        self._bind(tree_cache)
        worker, freed_full_kv = self._worker, tree_cache.freed_full_kv
        return None if freed_full_kv is None else QuantizedPromptAllocator(worker.compressed_kv, freed_full_kv, worker.requests)

    def _bind(self, tree_cache: "TieredRadixCache") -> None:
        """Let the worker create its compressed KV before its first forward, if it has none."""
        if self._worker.compressed_kv is None:
            self._worker.bind_tree_cache(tree_cache)
