"""The worker that SGLang's scheduler calls: drafts on compressed KV, verifies on full KV.

It is built in steps: with the model, with the KV pool, with SGLang's CUDA graphs, and with the prefix tree. The decode loop
(spec_decode/decode_loop.py) runs the rounds of running requests. See docs/architecture.md.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.config import options, selection_options
from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.config.prefill_options import QUANTIZED
from sglang_ext.layers.attention import torch_native, verify_graphs
from sglang_ext.layers.attention.compressed import decode_graphs
from sglang_ext.layers.attention.model_layers import first_attention_layer, attention_scaling
from sglang_ext.layers.attention.quantized_extend import QuantizedExtend
from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.forward import AttentionOverride, AttentionOverrides, KVDraftInput
from sglang_ext.managers import integrity, served_methods
from sglang_ext.managers.cache_rank.launch import start_cache_ranks
from sglang_ext.managers.graph_capture import compile_slot_kernel, record_step_queries, unpin_plans, create_verify_attention, capture_verify_graphs
from sglang_ext.managers.kv_transfer.arriving_full_kv import ArrivingFullKV
from sglang_ext.managers.kv_transfer.quantized.decode_side import QuantizedPrompt, QuantizedPromptAllocator, plan_quantized_prompt
from sglang_ext.managers.kv_transfer.prompt_queries import PromptQueries
from sglang_ext.managers.memory_plan import ReservedMemory, MemoryPlanner
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.kv_offload import full_tier
from sglang_ext.managers.kv_offload.lossy_full_kv import QuantizedOnlyFullKV, RemoteOnlyFullKV
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.managers.simulated_acceptance import SimulatedAcceptance
from sglang_ext.managers.spec_decode.grammar import UnprocessedTokens
from sglang_ext.managers.spec_decode.decode_loop import DecodeLoop, decode_loop
from sglang_ext.managers.spec_decode.request_states import RequestStates, fallback_reason, is_token_only
from sglang_ext.managers.spec_decode.round_result import RoundResult
from sglang_ext.managers.spec_decode.draft import prefill
from sglang_ext.managers.spec_decode.full_kv import ResidentFullKV
from sglang_ext.mem_cache.compressed.key_derived_data import KeyDerivedData
from sglang_ext.mem_cache.compressed.async_selector import create_stream_selector
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.policy import max_tail
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, reserve_queries, set_key_write_callback
from sglang_ext.mem_cache.compressed.slot_codes import SlotCodes
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV
from sglang_ext.mem_cache.prefix_cache.quantized_prompts import QuantizedPrompts
from sglang_ext.tp_ranks import TPRanks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


logger = logging.getLogger(__name__)


class KVWorker(BaseSpecWorker):
    """Verified and lossy decoding inside SGLang's scheduler.

    SGLang creates it with the arguments of any speculative worker. It has no draft model.
    """

    @exit_on_refusal
    def __init__(self, server_args, gpu_id: int, ps, nccl_port: int, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.lossy = server_args.kv_mode == "lossy"
        self.max_verify_tokens = server_args.speculative_num_draft_tokens
        self.layers = attention_scaling(self.model_runner.model)
        self.methods = ServedMethods.of(server_args, self.model_runner, tuple(self.layers))
        self.requests = RequestStates(server_args, self.methods.offered_methods)
        window = self.methods.window
        self.queries = QueryWindows(window, tuple(self.layers), max(self.max_verify_tokens, self.methods.every))
        self.ranks = TPRanks.from_group(self.model_runner.tp_group)
        self.metrics = KVMetrics.create(server_args, self.ranks.first)
        self.strict = integrity.is_strict()
        self.simulation = SimulatedAcceptance.of(server_args.kv_bench_acceptance, torch.device(self.model_runner.device))
        self.attentions = AttentionOverrides()
        self.graphs: verify_graphs.VerifyGraphSet | None = None
        self.compressed_kv: CompressedKVCache | None = None
        self.loop: DecodeLoop | None = None
        self.unprocessed_tokens = UnprocessedTokens()
        self.prompt_queries: PromptQueries | None = None
        # Data beside the KV pool that follows its keys.
        self.key_derived_data: KeyDerivedData | None = None
        # Attention of prompts, if it is not exact.
        self.quantized_prefill: QuantizedPrefill | None = None
        verify_graphs.use_plain_decoding(self.model_runner)
        torch_native.register()
        reserve_queries(window)
        # Reserve last, because SGLang sizes its pool next, by the free memory.
        self.memory = ReservedMemory(MemoryPlanner.of(server_args, self.model_runner, self.methods), self.model_runner)

    @property
    def draft_worker(self) -> None:
        """None: the target model drafts."""
        return None

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Backends for which SGLang keeps the lengths on the host. The worker plans rounds and compressed KV by these lengths."""
        return (*super().spec_v2_attn_backends, self)

    # SGLang reads this attribute of each backend above.
    needs_cpu_seq_lens = True

    @exit_on_refusal
    def alloc_memory_pool(self, **kwargs) -> None:
        """Double the token table for draft rows before attention backends are built on it. Allocate memory for queries and scores."""
        super().alloc_memory_pool(**kwargs)
        args, pool = self.server_args, self.req_to_token_pool
        plan = self.memory.release(pool.size, self.token_to_kv_pool_allocator.size)
        self._rows, width = pool.req_to_token.shape
        width += self.memory.ahead
        table = pool.req_to_token = pool.req_to_token.new_zeros(2 * self._rows, width)
        like = torch.empty(0, dtype=self.model_runner.dtype, device=table.device)
        heads, dim = self.memory.model.query_heads, self.memory.model.head_dim
        self.queries.allocate(plan.rings, heads, dim, like)
        self.prompt_queries = PromptQueries(self.queries, (len(self.layers), heads, dim), like.dtype)
        self.buffers = KVBuffers.from_pool(self.model_runner.token_to_kv_pool, self.layers, self.methods.first_head)
        bits = selection_options.slot_code_bits(args)
        if bits:
            self.key_derived_data = codes = SlotCodes(self.buffers.keys, self.buffers.layer_ids, bits)
            self.buffers = replace(self.buffers, codes=codes.held)
        served, page_size = self.methods, self.token_to_kv_pool_allocator.page_size
        adaptive, receives_rows = args.kv_head_budgets == "adaptive", selection_options.has_remote_values(args)
        self.layout = served.layout(adaptive, self.buffers, page_size, table, receives_rows)
        if isinstance(self.layout, PagePointerLayout):
            self.key_derived_data = self.layout.extremes
        if self.key_derived_data is not None:
            # Set it before any graph is captured, because graphs also call it for the keys that they write.
            set_key_write_callback(self.key_derived_data.on_keys_written)
        if served.scores is not None:
            # Allocate them before any graph is captured, because graphs write scores, too.
            served.scores.allocate(len(self.buffers.keys[0]), self.model_runner.device, self.model_runner.dtype)
            served.scores.watch(self.model_runner.model)

    @exit_on_refusal
    def init_cuda_graphs(self) -> None:
        """Capture graphs of verifications, and of steps over compressed KV if it needs its own. SGLang captured those of plain decoding."""
        compressed, verifier = self._compressed_attention(), create_verify_attention(self.server_args, self.model_runner)
        self.attentions = AttentionOverrides(None if verifier is None else AttentionOverride(verifier), compressed)
        self.graphs = capture_verify_graphs(self.server_args, self.model_runner, self.queries, verifier)
        if self.server_args.kv_prefill == QUANTIZED:
            self.quantized_prefill = self._use_quantized_prefill(QuantizedPrefill(self.layout.layout, self.buffers.first_head))

    def _use_quantized_prefill(self, prefill: QuantizedPrefill) -> QuantizedPrefill:
        """Let the attention of prompts read quantized KV."""
        if self.buffers.on_gpu:
            QuantizedExtend(self.model_runner, prefill).install()
        else:
            self.model_runner.attn_backend.prefill = prefill
        return prefill

    def _compressed_attention(self) -> AttentionOverride | None:
        """Attention over compressed KV that does not consist of plain tokens; None if the model's own attention reads it."""
        if self.buffers.on_gpu:
            with record_step_queries(self.server_args, self.model_runner, self.queries, self.methods.every):
                return decode_graphs.create_attention(self.model_runner, self.layout)
        self.model_runner.attn_backend.layout = self.layout
        return None

    def bind_tree_cache(self, tree_cache) -> None:
        """Create the compressed KV cache and the decode loop, once the prefix tree exists."""
        args = self.server_args
        self.compressed_kv = self._create_compressed_kv(tree_cache)
        if self.buffers.on_gpu:
            unpin_plans(self.model_runner, self.graphs)
            self._warm_up()
        if args.kv_host_gb:
            full_tier.attach_host_tier(self, tree_cache)
        early = ArrivingFullKV(self.ranks) if options.has_early_decoding(args) else None
        freed_full_kv = self._create_freed_full_kv(tree_cache)
        full_kv, policy = early or self._full_kv_provider(freed_full_kv), None
        if options.can_offload_full_kv(args):
            full_kv, policy = full_tier.create_offloaded_full_kv(self, tree_cache)
        tree_cache.bind(self.compressed_kv, self.forget, not self.lossy, full_kv.residency, early, freed_full_kv)
        self.loop = decode_loop(self, full_kv, policy)

    def _full_kv_provider(self, freed_full_kv: FreedFullKV | None) -> ResidentFullKV:
        """Create the provider for a server whose full KV is never offloaded or arriving."""
        if isinstance(freed_full_kv, RemoteOnlyKV):
            return RemoteOnlyFullKV(freed_full_kv)
        return ResidentFullKV() if freed_full_kv is None else QuantizedOnlyFullKV(freed_full_kv)

    def _create_freed_full_kv(self, tree_cache) -> FreedFullKV | None:
        """Create the object that frees full KV in lossy mode, once compressed KV or cache ranks hold it; None if full KV stays."""
        reason, row_sender = options.why_full_kv_stays(self.server_args), self.compressed_kv.row_sender
        is_single_server = self.server_args.disaggregation_mode == "null"
        if reason is None and is_single_server and row_sender is not None:
            method = self.compressed_kv.methods[0]
            most = selection_options.max_selected_tokens(self.server_args)
            takes = f"slots of {most} tokens" if most else f"about {method.share:.2f} of the full KV's slots"
            logger.info("sglang-ext: full KV is freed once a cache rank has it; compressed KV takes %s, plus slots for the newest tokens", takes)
            tail = max_tail(method, self.token_to_kv_pool_allocator.page_size, self.memory.model.context)
            return RemoteOnlyKV(tree_cache, self.compressed_kv, row_sender, self._method_of, tail)
        packing = [method for method in self.compressed_kv.methods if method.packs_all]
        if reason is None and not packing:
            reason = "the methods drop tokens"
        if reason is None:
            shares = ", ".join(f"{method.share:.2f} ({method.name})" for method in packing)
            logger.info("sglang-ext: full KV is freed once it is compressed; compressed KV takes about %s of the full KV's slots", shares)
            prompts = self._quantized_prompts(tree_cache) if is_single_server else None
            return QuantizedOnlyKV(tree_cache, self.compressed_kv, self.layout.layout, self._method_of, recomputes=is_single_server, prompts=prompts)
        if self.lossy:
            logger.info("sglang-ext: full KV stays beside the compressed KV: %s", reason)
        return None

    def _quantized_prompts(self, tree_cache) -> QuantizedPrompts | None:
        """Create the state of prompts that attend to quantized KV; None if they attend to full KV."""
        if self.quantized_prefill is None:
            return None
        chunk = self.server_args.chunked_prefill_size
        return QuantizedPrompts(tree_cache, self.compressed_kv, self._method_of, chunk if chunk and chunk > 0 else None)

    def _method_of(self, req: "Req") -> CompressionMethod | None:
        """The compression method of a waiting request; None if it is served with full KV."""
        return None if fallback_reason(req) else self.compressed_kv.methods[self.requests.method_of(req)]

    def arriving_full_kv(self, req: "Req", tree_cache) -> ArrivingFullKV | None:
        """Return the provider for a request that decodes early; None if all KV must arrive first.

        A request that cannot draft, or has no tokens to draft, does not need an anchor. A request that decodes early may have to be
        prefilled again. SGLang's second request to the prefill server has tokens only, without adapter, image or embedding.
        """
        if not options.has_early_decoding(self.server_args) or fallback_reason(req) or req.sampling_params.max_new_tokens <= 1:
            return None
        if not is_token_only(req):
            return None
        if self.loop is None:
            self.bind_tree_cache(tree_cache)
        return self.loop.full_kv

    def prompt_packing(self) -> tuple[Packing, KVBuffers] | None:
        """Return the packing of quantized prompts, and the buffers; None if prompts are transferred as full KV."""
        return (self.layout.layout, self.buffers) if quantized_transfer_settings(self.server_args) else None

    def plan_early_packing(self, req: "Req") -> QuantizedPrompt | None:
        """Return the transfer plan of a computed prompt that waits for a decode server; None for full KV, or if it is not known yet."""
        if self.compressed_kv is None or not quantized_transfer_settings(self.server_args):
            return None
        return plan_quantized_prompt(req, len(req.origin_input_ids), self.compressed_kv.methods[self.requests.method_of(req)])

    def quantized_prompt_allocator(self, tree_cache) -> QuantizedPromptAllocator | None:
        """Create the allocator for prompts that arrive as quantized KV; None if they arrive as full KV."""
        if not quantized_transfer_settings(self.server_args):
            return None
        if self.loop is None:
            self.bind_tree_cache(tree_cache)
        return None if tree_cache.freed_full_kv is None else QuantizedPromptAllocator(self.compressed_kv, tree_cache.freed_full_kv, self.requests)

    def _create_compressed_kv(self, tree_cache) -> CompressedKVCache:
        args, layout, served, allocator = self.server_args, self.layout, self.methods, self.token_to_kv_pool_allocator
        table = self.req_to_token_pool.req_to_token
        methods = served_methods.copy_methods(args, served.methods, allocator.page_size, layout)
        query_heads = self.memory.model.query_heads
        requests = min(self._rows - 1, args.max_running_requests or self._rows)
        if selection_options.ranks(args):
            async_selector = start_cache_ranks(args, methods[0], table, self.buffers, self.queries, query_heads, served.rotary, requests)
        else:
            intervals = selection_options.selection_intervals(args)
            async_selector = create_stream_selector(methods[0], table, self.buffers, query_heads, self.queries, served.rotary, intervals)
        return CompressedKVCache(
            methods=methods,
            token_table=table,
            rows=self._rows,
            buffers=self.buffers,
            allocator=allocator,
            tree_cache=tree_cache,
            queries=self.queries,
            rotary=served.rotary,
            method_index_of=self.requests.method_index_of,
            prompt_of=self.requests.prompt_of,
            namespace_of=self.requests.namespace_of,
            layout=layout,
            async_selector=async_selector,
            # Also called between requests, when nothing else updates the metrics.
            on_processes_changed=lambda: self.loop.observe_pool(),
            frees_full_kv=options.why_full_kv_stays(args) is None,
        )

    def _warm_up(self) -> None:
        """Run each kernel once, so that the first requests do not wait for compilation."""
        self.compressed_kv.compile_kernels(first_attention_layer(self.model_runner.model).tp_q_head_num)
        compile_slot_kernel(self.compressed_kv.token_table, self.compressed_kv.rows - 1)
        if self.graphs is not None:
            self.graphs.warm_up()
        self.queries.warm_up()

    def forget(self, row: int) -> None:
        """Drop the draft state of the request in ``row``, which finished, was aborted or was retracted."""
        self.requests.forget(row)
        self.loop.forget(row)
        self.loop.observe_pool()

    def clear_cache_pool(self) -> None:
        """Drop all requests, because the scheduler cleared the pool."""
        self.requests.clear()
        if self.loop is not None:
            self.loop.observe_pool()

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """Do nothing: the target's weights are the drafter's."""
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req) -> tuple[bool, str]:
        """Update the target model. SGLang calls the draft worker, if there is one."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(self, batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
        """Run one iteration of SGLang's scheduler: a prefill as in SGLang, or a decode round."""
        if self.loop is None:
            self.bind_tree_cache(batch.tree_cache)
        self.compressed_kv.poll()
        if batch.tree_cache.freed_full_kv is not None:
            batch.tree_cache.freed_full_kv.write_restored()
        result = self._forward(batch, on_publish)
        self.unprocessed_tokens = UnprocessedTokens.from_result(batch, result)
        if batch.tree_cache.host is not None:
            batch.tree_cache.host.tier.on_forward_launched()
        return result

    def _forward(self, batch: "ScheduleBatch", on_publish) -> GenerationBatchResult:
        if batch.forward_mode.is_idle():
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = KVDraftInput(torch.empty(0, dtype=torch.int64))
            return result
        if batch.forward_mode.is_extend():
            return prefill(self, batch, on_publish)
        return self.loop.decode(batch, on_publish)

    def account(self, batch: "ScheduleBatch", result: GenerationBatchResult) -> None:
        """Count the outcome of an iteration, once it is on the host."""
        if isinstance(result, RoundResult):
            self.loop.account(batch, result)
