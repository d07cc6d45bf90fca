"""The worker that SGLang's scheduler calls: drafts on compressed KV, verifies on full KV.

A prefill runs as SGLang's own. What running requests do in an iteration is up to the schedule:
staggered.py or lockstep.py. See docs/request-path.md.
"""

import hashlib
import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ext import options
from sglang_ext.core import LONG_MEMORY, Acceptance, RequestState
from sglang_ext.layers.attention import copy_graphs, plan_memory, torch_native, verify_graphs
from sglang_ext.layers.attention.of_model import attention_scaling, is_attention
from sglang_ext.layers.attention.verify_attention import VerifyAttention
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers import compression, full_tier, integrity, meta_info
from sglang_ext.managers.checked_drafts import CheckedDrafts
from sglang_ext.managers.draft_length import DraftLength, FixedLength
from sglang_ext.managers.eligibility import fallback_reason
from sglang_ext.managers.forward import Attention, Attentions
from sglang_ext.managers.lockstep import Lockstep, RoundResult
from sglang_ext.managers.method_choice import place_of
from sglang_ext.managers.ngram import TokenHistory
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.planner import CURABLE
from sglang_ext.managers.ranks import Ranks
from sglang_ext.managers.sampling import Row, Sampling
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.staggered import Staggered
from sglang_ext.managers.steps import Steps
from sglang_ext.mem_cache import query_window, slot_assignment
from sglang_ext.mem_cache.compressed_views import CompressedViews
from sglang_ext.mem_cache.head_cells import HeadCells
from sglang_ext.mem_cache.kv_buffers import KVBuffers
from sglang_ext.mem_cache.packing import PackedRows, Packing
from sglang_ext.mem_cache.query_window import QueryWindows, Recorded
from sglang_ext.mem_cache.rotary import rotary_of
from sglang_ext.mem_cache.slot_pointers import PointerRows, Pointers
from sglang_ext.method_options import offers
from sglang_ext.metrics import KVMetrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

logger = logging.getLogger(__name__)

# SGLang's seed, under --enable-deterministic-inference, for requests that bring none.
STOCK_DEFAULT_SEED = 42


class KVWorker(BaseSpecWorker):
    """Verified and lossy decoding inside SGLang's scheduler.

    Built by SGLang with the arguments of any speculative worker; has no draft model.
    """

    def __init__(self, server_args, gpu_id: int, ps, nccl_port: int, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.lossy = server_args.kv_mode == "lossy"
        self.stride = server_args.speculative_num_draft_tokens
        self.layers = attention_scaling(self.model_runner.model)
        kv_heads, rank = self._attention.tp_k_head_num, self.model_runner.ps.tp_rank
        self.scores = compression.slot_scores_of(server_args, tuple(self.layers), kv_heads, rank)
        self.offers = offers(server_args)
        self.methods = compression.methods_of(server_args, len(self.layers), kv_heads, rank, self.scores)
        self.rotary = None
        for offer, method in zip(self.offers, self.methods):
            if method.needs_rotary:
                self.rotary = rotary_of(self.model_runner.model, is_attention, offer.name)
        window = max(method.compressor.window for method in self.methods)
        self.queries = QueryWindows(window, tuple(self.layers), self.stride, self._scores_by_queries)
        self.states: dict[int, RequestState] = {}
        # Of all requests; a new one is expected to be like them.
        self.typical = Acceptance(memory=LONG_MEMORY)
        self.ranks = Ranks.of(self.model_runner.tp_group)
        self.metrics = KVMetrics.create(server_args, self.ranks.first)
        self.strict = integrity.is_strict()
        device = torch.device(self.model_runner.device)
        self.simulation = Simulation.from_environment(device, server_args.kv_schedule)
        self.views: CompressedViews | None = None
        self.schedule: Staggered | Lockstep | None = None
        self._admitted = 0
        self._graphs: verify_graphs.VerifyGraphSet | None = None
        self._check_graphs: verify_graphs.VerifyGraphSet | None = None
        self.attentions = Attentions()
        self.packed_rows: PackedRows | None = None
        self.head_cells: HeadCells | None = None
        self.pointer_rows: PointerRows | None = None
        self.history: TokenHistory | None = None
        verify_graphs.plain(self.model_runner)
        torch_native.register()
        query_window.reserve_queries(window)

    @property
    def draft_worker(self) -> None:
        """None: the target model drafts."""
        return None

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Asks SGLang for the lengths on the host: copies are made and rounds are planned by them."""
        return (*super().spec_v2_attn_backends, self)

    # Read by SGLang, of the above.
    needs_cpu_seq_lens = True

    def alloc_memory_pool(self, **kwargs) -> None:
        """Double the token table for draft rows, before attention backends are built on it; make room for scores."""
        super().alloc_memory_pool(**kwargs)
        pool = self.req_to_token_pool
        rows, width = pool.req_to_token.shape
        # SGLang reserves slots ahead of the context's end; they must not reach the next row.
        width += get_alloc_reserve_per_decode(self.server_args) + self.server_args.page_size
        pool.req_to_token = torch.zeros(
            (2 * rows, width), dtype=pool.req_to_token.dtype, device=pool.req_to_token.device
        )
        self._rows = rows
        self.buffers = KVBuffers.of(self.model_runner.token_to_kv_pool, self.layers)
        quantizer = next((method.quantizer for method in self.methods if method.quantizer is not None), None)
        if quantizer is not None:
            # Before any graph is captured, as what follows: graphs read what rows begin with.
            packing = Packing.of(quantizer, self.buffers, self.token_to_kv_pool_allocator.page_size, self.rotary)
            self.packed_rows = PackedRows.of_table(packing, pool.req_to_token)
        if self.server_args.kv_head_budgets == "adaptive":
            self.head_cells = HeadCells.of(self.buffers, 2 * rows)
        if any(method.compressor.points for method in self.methods):
            pointers = Pointers.of(self.buffers, self.token_to_kv_pool_allocator.page_size)
            self.pointer_rows = PointerRows.of_table(pointers, pool.req_to_token)
        if self.server_args.kv_ngram_tokens:
            # Answers of a round, and what is proposed after its last draft, go beyond a context's end.
            self.history = TokenHistory(rows, width + 2 * self.stride, pool.req_to_token.device)

        if self.scores is not None:
            # Before any graph is captured: graphs write scores, too.
            self.scores.allocate(len(self.buffers.keys[0]), self.model_runner.device, self.model_runner.dtype)
            self.scores.watch(self.model_runner.model)

    def init_cuda_graphs(self) -> None:
        """Capture steps over copies, where they need it, and verifications; SGLang captured graphs of one token a request."""
        copies, verifier = self._read_copies(), None
        backend = self.model_runner.decode_attention_backend_str
        if backend in ("triton", "fa3") and not self.lossy:
            # Where no graph is replayed; fa3 takes equal numbers of tokens only.
            verifier = VerifyAttention(self.model_runner)
        self.attentions = Attentions(None if verifier is None else Attention(verifier), copies)
        if self.lossy:
            return
        if self.server_args.kv_schedule != "lockstep" or self.model_runner.decode_cuda_graph_runner is None:
            return
        attention = self._attention
        widths = options.verify_widths(self.server_args)
        tokens = max(self.server_args.cuda_graph_config.decode.bs) * widths[-1]
        if options.offloads(self.server_args):
            tokens = max(tokens, options.WIDE_REQUESTS * self.stride)
        like = torch.empty(0, dtype=self.model_runner.dtype, device=self.model_runner.device)
        with self.queries.capturing(tokens, attention.tp_q_head_num, attention.qk_head_dim, like):
            own = verifier if backend == "triton" else None
            captured = [verify_graphs.capture(self.model_runner, width, own) for width in widths]
            for width in options.wide_widths(self.server_args):
                captured.append(verify_graphs.capture(self.model_runner, width, own, options.WIDE_REQUESTS))
        self._graphs = verify_graphs.VerifyGraphSet(captured)
        if self.server_args.kv_ngram_tokens:
            # Planned on the device, where alone the lengths are known.
            planned_there = verifier or VerifyAttention(self.model_runner)
            width = 1 + self.server_args.kv_ngram_tokens
            captured = [verify_graphs.capture(self.model_runner, width, planned_there)]
            self._check_graphs = verify_graphs.VerifyGraphSet(captured)

    def _read_copies(self) -> Attention | None:
        """Let attention read copies that hold no plain tokens; what does so in place of the model's own, None where that can."""
        if self.buffers.on_gpu:
            return copy_graphs.attention(self.model_runner, self.packed_rows, self.head_cells, self.pointer_rows)
        own = self.model_runner.attn_backend
        own.packed_rows, own.head_cells, own.pointer_rows = self.packed_rows, self.head_cells, self.pointer_rows
        return None

    @property
    def _attention(self) -> torch.nn.Module:
        """Any of the model's attention layers."""
        return next(module for module in self.model_runner.model.modules() if is_attention(module))

    def bind_tree_cache(self, tree_cache) -> None:
        """Build the compressed views once the prefix tree exists."""
        args, allocator = self.server_args, self.token_to_kv_pool_allocator
        self.views = CompressedViews(
            methods=compression.copy_methods(
                args, self.methods, allocator.page_size, self.packed_rows, self.pointer_rows
            ),
            token_table=self.req_to_token_pool.req_to_token,
            rows=self._rows,
            buffers=self.buffers,
            allocator=allocator,
            tree_cache=tree_cache,
            queries=self.queries,
            rotary=self.rotary,
            asked_by=lambda row: self.states[row].method,
            prompt_of=lambda row: self.states[row].prompt,
            packed_rows=self.packed_rows,
            head_cells=self.head_cells,
            pointer_rows=self.pointer_rows,
        )
        if self.buffers.on_gpu:
            self._unpin_plans()
            self._warm_up()
        if args.kv_host_gb:
            full_tier.use_host_memory(self, tree_cache)
        if args.kv_host_gb and self.scores is not None:
            tree_cache.on_load = self.scores.forget
        tree_cache.views = self.views
        tree_cache.on_release = self.forget
        tree_cache.insert_generated = not self.lossy
        if args.kv_schedule == "lockstep":
            longest = options.longest_draft(args)
            auto = args.kv_draft_length == "auto"
            lengths = DraftLength(longest, options.verify_widths(args)) if auto else FixedLength(longest)
            pace = Pace(lengths, torch.device(self.model_runner.device), self.metrics, self.ranks)
            self.schedule = self._lockstep(pace, Steps(self))
        else:
            self.schedule = Staggered(self)
        logger.info(
            "sglang-ext: --kv-mode %s, %s, draft length %s, schedule %s",
            args.kv_mode,
            ", ".join(f"compressor {offer.name} with budget {offer.budget}" for offer in self.offers),
            *(args.kv_draft_length, args.kv_schedule),
        )

    def _lockstep(self, pace: Pace, steps: Steps) -> Lockstep:
        """The schedule of rounds: rolling where full KV may leave the device."""
        args = self.server_args
        if options.offloads(args):
            return full_tier.rolling(self, self._graphs, pace, steps)
        checked = None
        if self.history is not None:
            checked = CheckedDrafts(steps, self.history, args.kv_ngram_tokens, self._check_graphs)
        return Lockstep(self, self._graphs, self.simulation, pace, steps, checked)

    @property
    def _captured(self) -> list[verify_graphs.VerifyGraphSet]:
        """All captured verifications, full ones and those of proposals."""
        return [graphs for graphs in (self._graphs, self._check_graphs) if graphs is not None]

    def _unpin_plans(self) -> None:
        """Rounds are launched further ahead of the device than SGLang's forwards (plan_memory.py)."""
        captured = [graph.attn_backend for graphs in self._captured for graph in graphs.graphs]
        backends = [self.model_runner.attn_backend, *captured]
        count = sum(plan_memory.unpin(backend) for backend in backends)
        if count:
            logger.info("sglang-ext: FlashInfer's plans of %s wrappers are not in pinned memory", count)

    def _warm_up(self) -> None:
        """Run once what else the first requests would wait for."""
        self.views.compile_kernels(self._attention.tp_q_head_num)
        slot_assignment.compile_ahead(self.views.token_table, self.views.rows - 1)
        for graphs in self._captured:
            graphs.warm_up()
        # Row 0 is no request's.
        self.queries.keep_replayed((Recorded(0, 0, self.stride, 0),))
        self.queries.forget(0)

    def forget(self, row: int) -> None:
        """Drop the draft state of the request in ``row``: it finished, was aborted or retracted."""
        self.states.pop(row, None)
        self.schedule.forget(row)
        self.metrics.observe_pool(self.views, self.schedule.verifications)

    def clear_cache_pool(self) -> None:
        """Forget all requests: the scheduler cleared the pool."""
        self.states.clear()

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """Nothing of its own to update; the target's weights are the drafter's."""
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req) -> tuple[bool, str]:
        """Nothing of its own to update."""
        return True, "Succeeded to update model weights."

    def update_weights_from_tensor(self, recv_req) -> tuple[bool, str]:
        """Update the target: the scheduler asks the draft worker where there is one."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(self, batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
        """One iteration of SGLang's scheduler: a prefill as it is, a decode drafted and verified."""
        if self.schedule is None:
            self.bind_tree_cache(batch.tree_cache)
        result = self._forward(batch, on_publish)
        if batch.tree_cache.host_tier is not None:
            batch.tree_cache.host_tier.forward_launched()
        return result

    def _forward(self, batch: "ScheduleBatch", on_publish) -> GenerationBatchResult:
        if batch.forward_mode.is_idle():
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = BetweenSteps(torch.empty(0, dtype=torch.int64))
            return result
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        states = [self.states[req.req_pool_idx] for req in batch.reqs]
        return self.schedule.decode(batch, states, on_publish)

    def account(self, batch: "ScheduleBatch", result: GenerationBatchResult) -> None:
        """Count an iteration's outcome, once it is on the host."""
        if isinstance(result, RoundResult):
            self.schedule.account(batch, result)

    def _prefill(self, batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
        """SGLang's own prefill; its first tokens are sampled like all others (sampling.py)."""
        # First, as queries are kept by the method that a request asks for.
        states = [self._admit(req, matched) for req, matched in zip(batch.reqs, batch.prefix_lens)]
        rows, start = [], 0
        for req, prefix, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens):
            rows.append(Recorded(req.req_pool_idx, start, start + length, prefix))
            start += length
        if on_publish is not None:
            # The lengths are known before the forward: the scheduler shall prepare the next round while it runs.
            on_publish(batch.seq_lens)
        with self.queries.recording(tuple(rows)):
            result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        sampling = Sampling.of(
            self.model_runner,
            batch,
            [self.sampling_row(i, state) for i, state in enumerate(states)],
            batch.return_logprob,
        )
        output = result.logits_output
        sampled = sampling.draw(output.next_token_logits, batch.seq_lens - 1)
        self.schedule.begin(states, sampled.tokens)
        if batch.return_logprob:
            sampled.fill_logprobs(output, list(range(len(states))))
        result.next_token_ids = sampled.tokens
        result.next_draft_input = BetweenSteps(sampled.tokens)
        result.new_seq_lens = batch.seq_lens
        return result

    def _admit(self, req: "Req", matched: int) -> RequestState:
        """The draft state of a request whose prompt (or a chunk of it) is computed, after ``matched`` tokens."""
        old = self.states.get(req.req_pool_idx)
        if old is not None:
            # An earlier chunk of the same prompt.
            return old
        self._admitted += 1
        state = RequestState(
            rid=req.rid,
            row=req.req_pool_idx,
            seed=noise_seed(req, self.server_args, self._admitted),
            matched=matched,
            prompt=req.origin_input_ids,
            # The frontend refuses names that are none.
            method=place_of(self.offers, req.sampling_params.custom_params) or 0,
            fallback=fallback_reason(req),
            acceptance=Acceptance.expecting(self.typical.probability),
        )
        meta_info.resume(req, state)
        self.states[req.req_pool_idx] = state
        if self.history is not None:
            self.history.begin(state.row, [*req.origin_input_ids, *req.output_ids])
        return state

    def _scores_by_queries(self, row: int) -> bool:
        """Whether the method of the request in ``row`` wants its queries; of a row that is nobody's, too."""
        state = self.states.get(row)
        return state is None or self.methods[state.method].compressor.window > 0

    def sampling_row(self, index: int, state: RequestState, drafts: tuple[int, ...] = ()) -> Row:
        """A row of logits of the request at ``index``; those never drafted take SGLang's own noise."""
        return Row(index, state.seed if state.fallback in CURABLE else None, drafts)


def noise_seed(req: "Req", server_args, admitted: int) -> int:
    """The request's sampling seed, or one of its own: equal on all ranks, different each time."""
    if req.sampling_params.sampling_seed is not None:
        return req.sampling_params.sampling_seed
    if server_args.enable_deterministic_inference:
        return STOCK_DEFAULT_SEED
    name = f"{server_args.random_seed}/{admitted}/{req.rid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
