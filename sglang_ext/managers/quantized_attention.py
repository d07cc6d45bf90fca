"""Quantized attention: decoding without full KV (``--kv-mode lossy``), and prompts that attend to quantized KV (``--kv-prefill quantized``)."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_ext.config import options
from sglang_ext.core import RequestState
from sglang_ext.layers.attention.quantized_prefill import QuantizedExtend, QuantizedPrefill
from sglang_ext.layers.kernels.packed import integer_prefill
from sglang_ext.layers.kernels.packed.prompt_codes import PromptCodes
from sglang_ext.managers.feature import Feature, MetricValue, Worker
from sglang_ext.managers.memory_plan import MemoryPlanner
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.quantized_prefill_kv import QuantizedPrefillKV
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)


class QuantizedAttention(Feature):
    """Frees full KV once quantized blocks hold all tokens, and lets prompts attend to quantized KV. ``prefill`` is None if prompts are exact."""

    prefill: QuantizedPrefill | None = None

    def planned_bytes(self, planner: MemoryPlanner, requests: int, tokens: int, rings: int) -> dict[str, int]:
        """Codes of a prompt as long as a row of the token table (layers/attention/quantized_prefill.py)."""
        if not planner.on_gpu or self.args.kv_prefill != options.QUANTIZED:
            return {}
        model, quantizer = planner.model, next(m.quantizer for m in planner.served.methods if m.quantizer is not None)
        partition = quantizer.partition
        token = model.kv_heads * PromptCodes.token_bytes(model.head_dim, model.value_dim, partition)
        if integer_prefill.is_supported_shape(planner.capability, partition, quantizer.block, model.query_heads // model.kv_heads):
            token += model.query_heads * integer_prefill.PrefillQueryCodes.query_bytes(model.head_dim, partition)
        return {"prompt_codes": planner.row_tokens * token}

    def on_graphs_captured(self, worker: Worker) -> None:
        """Let the attention of prompts read quantized KV.

        Raises:
            OptionError: The kernels do not support the model's heads.
        """
        if self.args.kv_prefill != options.QUANTIZED:
            return
        self.prefill = QuantizedPrefill(worker.layout.layout, worker.buffers.first_head)
        if worker.buffers.on_gpu:
            QuantizedExtend(worker.model_runner, self.prefill).install()
        else:
            worker.model_runner.attn_backend.prefill = self.prefill

    def full_kv_provider(self, worker: Worker, tree_cache: TieredRadixCache) -> FullKVProvider | None:
        """Create the provider that frees full KV in mode lossy. None if full KV stays, or a cache rank holds it."""
        compressed_kv, is_single_server = worker.compressed_kv, self.args.disaggregation_mode == "null"
        packing = [method for method in compressed_kv.methods if method.packs_all]
        if options.why_full_kv_stays(self.args) is not None or not packing:
            return None
        shares = ", ".join(f"{method.share:.2f} ({method.name})" for method in packing)
        logger.info("sglang-ext: full KV is freed once it is compressed; compressed KV takes about %s of the full KV's slots", shares)
        parts = tree_cache.nodes, compressed_kv, worker.layout.layout, worker.method_of
        if is_single_server and self.prefill is not None:
            chunk = self.args.chunked_prefill_size
            return FullKVProvider(QuantizedPrefillKV(*parts, chunk=chunk if chunk and chunk > 0 else None))
        return FullKVProvider(QuantizedOnlyKV(*parts, recomputes=is_single_server))

    def computing_prompts(self, batch: ScheduleBatch, states: list[RequestState]) -> AbstractContextManager[None]:
        """A context in which the prompts of ``batch`` attend to quantized KV. ``states`` are the states of its requests."""
        freed_full_kv = batch.tree_cache.freed_full_kv
        if freed_full_kv is not None:
            freed_full_kv.begin_prompts(zip(batch.reqs, [state.cached_prompt_len for state in states], batch.prefix_lens))
        lengths = [prefix + length for prefix, length in zip(batch.prefix_lens, batch.extend_lens)]
        seeds = {state.row: token_seeds(state.prompt, length, batch.seq_lens.device) for state, length in zip(states, lengths)}
        found = {} if freed_full_kv is None else {row: freed_full_kv.block_slots(row) for row in seeds}
        return self.prefill.computing_prompts(seeds, {row: slots for row, slots in found.items() if slots is not None and len(slots)})

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Tokens of quantized-only KV."""
        freed_full_kv = worker.compressed_kv.tree_cache.freed_full_kv
        if isinstance(freed_full_kv, QuantizedOnlyKV):
            yield "codes_alone_tokens", freed_full_kv.tokens
