"""The worker that SGLang's scheduler calls: drafts on compressed KV, verifies on full KV.

Initialization has four stages: model, KV pool, CUDA graphs, prefix tree. Then the decode loop runs the rounds (docs/architecture.md).
"""

import logging

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.config import options
from sglang_ext.core import EARLY_ROWS, TPRanks
from sglang_ext.layers.attention import torch_native
from sglang_ext.layers.forward import AttentionOverride, AttentionOverrides, use_plain_decoding
from sglang_ext.managers import graph_capture
from sglang_ext.managers.feature import FeatureType, create_full_kv_provider, create_selector, load_features
from sglang_ext.managers.memory_plan import MemoryPlanner, ReservedMemory
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.served_methods import ServedMethods, copy_methods
from sglang_ext.managers.spec_decode.decode_loop import DecodeLoop, create_decode_loop
from sglang_ext.managers.spec_decode.request_states import RequestStates, fallback_reason
from sglang_ext.managers.spec_decode.round_result import KVDraftInput, RoundResult
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache, CompressionMethod
from sglang_ext.mem_cache.compressed.queries import QueryWindows, reserve_queries, set_key_write_callback
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)


class KVWorker(BaseSpecWorker):
    """Verified and lossy decoding inside SGLang's scheduler, without a draft model. Features read what ``Worker`` of feature.py lists."""

    # The target model drafts.
    _draft_worker = None

    @exit_on_refusal
    def __init__(self, server_args, gpu_id: int, ps, nccl_port: int, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        # SGLang creates the prefix tree later, with the target worker at hand (plugin.py:create_tree).
        target_worker.kv_worker = self
        self.model_runner = target_worker.model_runner
        self.lossy = server_args.kv_mode == "lossy"
        self.max_verify_tokens = server_args.speculative_num_draft_tokens
        self.features = load_features(server_args)
        self.methods = ServedMethods.of(server_args, self.model_runner)
        self.requests = RequestStates(server_args, self.methods.offered_methods)
        window = self.methods.window
        self.queries = QueryWindows(window, tuple(self.methods.scaling), max(self.max_verify_tokens, self.methods.selection_interval))
        self.ranks = TPRanks.from_group(self.model_runner.tp_group)
        self.metrics = KVMetrics.create(server_args, self.ranks.first, self.features)
        self.attentions = AttentionOverrides()
        self.graphs: graph_capture.VerifyGraphSet | None = None
        self.compressed_kv: CompressedKVCache | None = None
        self.loop: DecodeLoop | None = None
        # SGLang creates its backends and graphs for one token per request.
        use_plain_decoding(self.model_runner)
        torch_native.register()
        reserve_queries(window)
        # Reserve last, because SGLang sizes its pool next, by the free memory.
        planner = MemoryPlanner.of(server_args, self.model_runner, self.methods, self.features)
        self.memory = ReservedMemory(planner, self.model_runner)

    def feature(self, kind: type[FeatureType]) -> FeatureType | None:
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """SGLang copies lengths to the host if any listed object sets ``needs_cpu_seq_lens``. The worker needs them to plan."""
        return (*super().spec_v2_attn_backends, self)

    needs_cpu_seq_lens = True

    @exit_on_refusal
    def alloc_memory_pool(self, **kwargs) -> None:
        """Double the token table for draft rows before attention backends are built on it. Allocate memory for queries and scores."""
        super().alloc_memory_pool(**kwargs)
        args, pool = self.server_args, self.req_to_token_pool
        plan = self.memory.release(pool.size, self.token_to_kv_pool_allocator.size)
        self._rows, width = pool.req_to_token.shape
        width += self.memory.ahead
        # The last rows are those of requests that draft while they wait.
        early_rows = EARLY_ROWS if options.drafts_on_stored_anchors(args) else 0
        table = pool.req_to_token = pool.req_to_token.new_zeros(2 * self._rows + early_rows, width)
        query_template = torch.empty(0, dtype=self.model_runner.dtype, device=table.device)
        self.queries.allocate(plan.rings, self.memory.model.query_heads, self.memory.model.head_dim, query_template)
        served, page_size = self.methods, self.token_to_kv_pool_allocator.page_size
        self.buffers, codes = served.buffers(args, self.model_runner.token_to_kv_pool)
        self.layout = served.layout(args, self.buffers, page_size, table)
        self.key_derived_data = codes or self.layout.key_derived_data
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
        args, runner, interval = self.server_args, self.model_runner, self.methods.selection_interval
        compressed = graph_capture.create_compressed_attention(args, runner, self.queries, interval, self.layout, self.buffers.on_gpu)
        verifier = graph_capture.create_verify_attention(args, runner)
        self.attentions = AttentionOverrides(None if verifier is None else AttentionOverride(verifier), compressed)
        self.graphs = graph_capture.capture_verify_graphs(args, runner, self.queries, verifier)
        for feature in self.features:
            feature.on_graphs_captured(self)

    @torch.no_grad()
    def bind_tree_cache(self, tree_cache: TieredRadixCache) -> None:
        """Create the compressed KV cache and the decode loop. SGLang has created the prefix tree, and serves no request yet.

        Compiles kernels, starts cache ranks, and attaches host memory and the prefix store to the tree.
        """
        self.compressed_kv = self._create_compressed_kv(tree_cache)
        if self.buffers.on_gpu:
            graph_capture.unpin_plans(self.model_runner, self.graphs)
            # Run each kernel once, so that no request waits for compilation.
            self.compressed_kv.compile_kernels(self.memory.model.query_heads)
            graph_capture.compile_slot_kernel(self.compressed_kv.token_table, self.compressed_kv.rows - 1)
            if self.graphs is not None:
                self.graphs.warm_up()
            self.queries.warm_up()
        provider = create_full_kv_provider(self, tree_cache)
        if self.lossy and provider.freed_full_kv is None:
            why = options.why_full_kv_stays(self.server_args) or "the methods do not pack all tokens"
            logger.info("sglang-ext: full KV stays beside the compressed KV: %s", why)
        tree_cache.bind(self.compressed_kv, self.forget, not self.lossy, provider.residency, provider.early, provider.freed_full_kv)
        self.loop = create_decode_loop(self, provider)
        if self.buffers.on_gpu:
            # The first forward runs on another stream, and does not wait for this one.
            torch.cuda.synchronize()

    @property
    def max_requests(self) -> int:
        return min(self._rows - 1, self.server_args.max_running_requests or self._rows)

    def method_of(self, req: Req) -> CompressionMethod | None:
        return None if fallback_reason(req) else self.compressed_kv.methods[self.requests.method_of(req)]

    def _create_compressed_kv(self, tree_cache: TieredRadixCache) -> CompressedKVCache:
        args, allocator = self.server_args, self.token_to_kv_pool_allocator
        methods = copy_methods(args, self.methods.methods, allocator.page_size, self.layout)
        return CompressedKVCache(
            methods=methods,
            token_table=self.req_to_token_pool.req_to_token,
            rows=self._rows,
            buffers=self.buffers,
            allocator=allocator,
            tree_cache=tree_cache,
            queries=self.queries,
            rotary=self.methods.rotary,
            state_of=self.requests.get,
            layout=self.layout,
            async_selector=create_selector(self, methods[0]),
            # Also called between requests, when nothing else updates the metrics.
            on_processes_changed=self._observe_pool,
            frees_full_kv=options.why_full_kv_stays(args) is None,
        )

    def forget(self, row: int) -> None:
        """Drop the draft state of the request in ``row``, which finished, was aborted or was retracted."""
        self.requests.forget(row)
        self.loop.forget(row)
        self._observe_pool()

    def clear_cache_pool(self) -> None:
        """Drop all requests, because the scheduler cleared the pool."""
        self.requests.clear()
        self._observe_pool()

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """Do nothing: the target's weights are the drafter's."""
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req) -> tuple[bool, str]:
        """Update the target model. SGLang calls the draft worker, if there is one."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish=None) -> GenerationBatchResult:
        """Run one iteration of SGLang's scheduler: a prefill as in SGLang, or a decode round."""
        self.compressed_kv.poll()
        if batch.tree_cache.freed_full_kv is not None:
            batch.tree_cache.freed_full_kv.write_restored()
        result = self._forward(batch, on_publish)
        self.requests.record_result(batch, result)
        return result

    def _forward(self, batch: ScheduleBatch, on_publish) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self.loop.prefill(batch, on_publish)
        if not batch.forward_mode.is_idle():
            return self.loop.decode(batch, on_publish)
        result = self.target_worker.forward_batch_generation(batch)
        result.next_draft_input = KVDraftInput(torch.empty(0, dtype=torch.int64))
        return result

    def account(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Count the outcome of a decode round, once it is on the host. Ignores results of other forwards."""
        if isinstance(result, RoundResult):
            self.loop.report.account(batch, result)
        self._observe_pool()

    def _observe_pool(self) -> None:
        """Report the contents of the pool, and the values of features."""
        self.metrics.observe_pool(self.compressed_kv, (value for feature in self.features for value in feature.metrics(self)))
