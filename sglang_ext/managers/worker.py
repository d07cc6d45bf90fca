"""The worker that SGLang's scheduler calls: drafts on compressed KV, verifies on full KV.

It is built in steps: with the model, with the pool, with SGLang's graphs, and with the prefix tree. What running requests
do in an iteration is up to the loop (spec_decode/loop.py). See docs/architecture.md.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ext.command_line import ends_scheduler
from sglang_ext.config import options, selection_options
from sglang_ext.config.disaggregation_options import traveling_codes
from sglang_ext.config.prefill_options import QUANTIZED
from sglang_ext.layers.attention import torch_native, verify_graphs
from sglang_ext.layers.attention.copies import copy_graphs
from sglang_ext.layers.attention.of_model import an_attention, attention_scaling
from sglang_ext.layers.attention.quantized_extend import QuantizedExtend
from sglang_ext.layers.attention.quantized_prefill import QuantizedPrefill
from sglang_ext.layers.forward import Attention, Attentions, BetweenSteps
from sglang_ext.managers import integrity, served_methods
from sglang_ext.managers.cache_rank.on_gpu.device_start import rank_steps
from sglang_ext.managers.cache_rank.start import cache_ranks
from sglang_ext.managers.captured import compile_ahead, recording_steps, unpin_plans, verifier_of, verify_graphs_of
from sglang_ext.managers.disaggregation.arriving import Arriving
from sglang_ext.managers.disaggregation.coded.decode_side import CodedPrompt, CodedPrompts, coded_prompt
from sglang_ext.managers.disaggregation.queries import TravelingQueries
from sglang_ext.managers.memory_plan import HeldMemory, MemoryPlanner
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.offload import full_tier
from sglang_ext.managers.offload.giving_back import GivingBack, HandingOver
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.spec_decode.grammar import NewTokens
from sglang_ext.managers.spec_decode.loop import DecodeLoop, decode_loop
from sglang_ext.managers.spec_decode.requests import RequestStates, fallback_reason, is_named_by_tokens
from sglang_ext.managers.spec_decode.result import RoundResult
from sglang_ext.managers.spec_decode.steps import prefill
from sglang_ext.managers.spec_decode.turns import OnDevice
from sglang_ext.mem_cache.compressed.beside_keys import BesideKeys
from sglang_ext.mem_cache.compressed.chosen_beside import beside
from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.due_copies import longest_tail
from sglang_ext.mem_cache.compressed.formats.chosen_pages import ChosenPages
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows, reserve_queries, tell_written
from sglang_ext.mem_cache.compressed.slot_codes import SlotCodes
from sglang_ext.mem_cache.prefix_cache.codes_alone import CodesAlone
from sglang_ext.mem_cache.prefix_cache.given_back import GivenBack
from sglang_ext.mem_cache.prefix_cache.held_elsewhere import HeldElsewhere
from sglang_ext.mem_cache.prefix_cache.prompts_on_codes import PromptsOnCodes
from sglang_ext.ranks import Ranks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


logger = logging.getLogger(__name__)


class KVWorker(BaseSpecWorker):
    """Verified and lossy decoding inside SGLang's scheduler.

    Built by SGLang with the arguments of any speculative worker; has no draft model.
    """

    @ends_scheduler
    def __init__(self, server_args, gpu_id: int, ps, nccl_port: int, target_worker):
        super().__init__()
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.lossy = server_args.kv_mode == "lossy"
        self.stride = server_args.speculative_num_draft_tokens
        self.layers = attention_scaling(self.model_runner.model)
        self.methods = ServedMethods.of(server_args, self.model_runner, tuple(self.layers))
        self.requests = RequestStates(server_args, self.methods.offers)
        window = self.methods.window
        self.queries = QueryWindows(window, tuple(self.layers), max(self.stride, self.methods.every))
        self.ranks = Ranks.of(self.model_runner.tp_group)
        self.metrics = KVMetrics.create(server_args, self.ranks.first)
        self.strict = integrity.is_strict()
        self.simulation = Simulation.of(server_args.kv_bench_acceptance, torch.device(self.model_runner.device))
        self.attentions = Attentions()
        self.graphs: verify_graphs.VerifyGraphSet | None = None
        self.views: CompressedViews | None = None
        self.loop: DecodeLoop | None = None
        self.new_tokens = NewTokens()
        self.traveling: TravelingQueries | None = None
        # What lies beside the pool and follows its keys.
        self.beside_keys: BesideKeys | None = None
        # Attention of prompts, where that is not exact.
        self.quantized: QuantizedPrefill | None = None
        verify_graphs.plain(self.model_runner)
        torch_native.register()
        reserve_queries(window)
        # Last, as SGLang sizes its pool next, by what is free.
        self.memory = HeldMemory(MemoryPlanner.of(server_args, self.model_runner, self.methods), self.model_runner)

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

    @ends_scheduler
    def alloc_memory_pool(self, **kwargs) -> None:
        """Double the token table for draft rows, before attention backends are built on it; make room for queries and scores."""
        super().alloc_memory_pool(**kwargs)
        args, pool = self.server_args, self.req_to_token_pool
        plan = self.memory.release(pool.size, self.token_to_kv_pool_allocator.size)
        self._rows, width = pool.req_to_token.shape
        width += self.memory.ahead
        table = pool.req_to_token = pool.req_to_token.new_zeros(2 * self._rows, width)
        like = torch.empty(0, dtype=self.model_runner.dtype, device=table.device)
        heads, dim = self.memory.model.query_heads, self.memory.model.head_dim
        self.queries.allocate(plan.rings, heads, dim, like)
        self.traveling = TravelingQueries(self.queries, (len(self.layers), heads, dim), like.dtype)
        self.buffers = KVBuffers.of(self.model_runner.token_to_kv_pool, self.layers, self.methods.first_head)
        bits = selection_options.coded_slots(args)
        if bits:
            self.beside_keys = codes = SlotCodes(self.buffers.keys, self.buffers.layer_ids, bits)
            self.buffers = replace(self.buffers, codes=codes.held)
        served, page_size = self.methods, self.token_to_kv_pool_allocator.page_size
        adaptive, rows = args.kv_head_budgets == "adaptive", selection_options.sends_rows(args)
        self.form = served.form(adaptive, self.buffers, page_size, table, rows)
        if isinstance(self.form, ChosenPages):
            self.beside_keys = self.form.extremes
        if self.beside_keys is not None:
            # Before any graph is captured: graphs tell what they write, too.
            tell_written(self.beside_keys.written)
        if served.scores is not None:
            # Before any graph is captured: graphs write scores, too.
            served.scores.allocate(len(self.buffers.keys[0]), self.model_runner.device, self.model_runner.dtype)
            served.scores.watch(self.model_runner.model)

    @ends_scheduler
    def init_cuda_graphs(self) -> None:
        """Capture steps over copies, where they need it, and verifications; SGLang captured graphs of one token a request."""
        copies, verifier = self._read_copies(), verifier_of(self.server_args, self.model_runner)
        self.attentions = Attentions(None if verifier is None else Attention(verifier), copies)
        self.graphs = verify_graphs_of(self.server_args, self.model_runner, self.queries, verifier)
        if self.server_args.kv_prefill == QUANTIZED:
            self.quantized = self._attend_to_codes(QuantizedPrefill(self.form.form, self.buffers.first_head))

    def _attend_to_codes(self, prefill: QuantizedPrefill) -> QuantizedPrefill:
        """Let attention of prompts read codes."""
        if self.buffers.on_gpu:
            QuantizedExtend(self.model_runner, prefill).install()
        else:
            self.model_runner.attn_backend.prefill = prefill
        return prefill

    def _read_copies(self) -> Attention | None:
        """Let attention read copies that hold no plain tokens; what does so in place of the model's own, None where that can."""
        if self.buffers.on_gpu:
            with recording_steps(self.server_args, self.model_runner, self.queries, self.methods.every):
                return copy_graphs.attention(self.model_runner, self.form)
        self.model_runner.attn_backend.form = self.form
        return None

    def bind_tree_cache(self, tree_cache) -> None:
        """Build the compressed views and the decode loop once the prefix tree exists."""
        args = self.server_args
        self.views = self._views_of(tree_cache)
        if self.buffers.on_gpu:
            unpin_plans(self.model_runner, self.graphs)
            self._warm_up()
        if args.kv_host_gb:
            full_tier.use_host_memory(self, tree_cache)
        early = Arriving(self.ranks) if options.begins_early(args) else None
        codes = self._given_back(tree_cache)
        turns, policy = early or self._turns(codes), None
        if options.offloads(args):
            turns, policy = full_tier.offloading(self, tree_cache)
        tree_cache.serve(self.views, self.forget, not self.lossy, turns.residency, early, codes)
        self.loop = decode_loop(self, turns, policy)

    def _turns(self, codes: GivenBack | None) -> OnDevice:
        """Whose full KV is there, where none is in host memory or on its way."""
        if isinstance(codes, HeldElsewhere):
            return HandingOver(codes)
        return OnDevice() if codes is None else GivingBack(codes)

    def _given_back(self, tree_cache) -> GivenBack | None:
        """What gives full KV back that copies hold, or cache ranks, in mode lossy; None where it stays, for a reason that is logged."""
        kept, senders = options.full_kv_stays(self.server_args), self.views.senders
        here = self.server_args.disaggregation_mode == "null"
        if kept is None and here and senders is not None:
            method = self.views.methods[0]
            most = selection_options.selected(self.server_args)
            takes = f"slots of {most} tokens" if most else f"about {method.share:.2f} of its slots"
            logger.info("sglang-ext: full KV is given back once a cache rank has it; a copy takes %s, and of the newest tokens", takes)
            tail = longest_tail(method, self.token_to_kv_pool_allocator.page_size, self.memory.model.context, self.views.beside is not None)
            return HeldElsewhere(tree_cache, self.views, senders, self._method_of, tail)
        packing = [method for method in self.views.methods if method.packs_all]
        if kept is None and not packing:
            kept = "they leave tokens out"
        if kept is None:
            told = ", ".join(f"{method.share:.2f} of it with {method.name}" for method in packing)
            logger.info("sglang-ext: full KV is given back once a copy holds it, which takes of the pool's slots about %s", told)
            on_codes = self._on_codes(tree_cache) if here else None
            return CodesAlone(tree_cache, self.views, self.form.form, self._method_of, recomputes=here, prompts=on_codes)
        if self.lossy:
            logger.info("sglang-ext: full KV stays beside its copies: %s", kept)
        return None

    def _on_codes(self, tree_cache) -> PromptsOnCodes | None:
        """Prompts that attend to codes; None where they attend to full KV."""
        if self.quantized is None:
            return None
        chunk = self.server_args.chunked_prefill_size
        return PromptsOnCodes(tree_cache, self.views, self._method_of, chunk if chunk and chunk > 0 else None)

    def _method_of(self, req: "Req") -> CopyMethod | None:
        """What will make the copies of a request that waits; None for one that is served with full KV."""
        return None if fallback_reason(req) else self.views.methods[self.requests.method_of(req)]

    def begins_early(self, req: "Req", tree_cache) -> Arriving | None:
        """Where a request of another server's prefill is expected that begins on the anchor of its KV; None where all must be there.

        Who cannot be drafted, or has no token left to draft, has no use of anchors. Who begins early may have to be prefilled again, and
        what SGLang then asks the prefill server names tokens alone: no adapter, image or embedding.
        """
        if not options.begins_early(self.server_args) or fallback_reason(req) or req.sampling_params.max_new_tokens <= 1:
            return None
        if not is_named_by_tokens(req):
            return None
        if self.loop is None:
            self.bind_tree_cache(tree_cache)
        return self.loop.turns

    def packs_prompts(self) -> tuple[Packing, KVBuffers] | None:
        """How this prefill server packs prompts that travel as codes; None where they travel as they are."""
        return (self.form.form, self.buffers) if traveling_codes(self.server_args) else None

    def packed_ahead(self, req: "Req") -> CodedPrompt | None:
        """How a computed prompt will travel whose decode side has no room yet; None as it is, or where that is not known."""
        if self.views is None or not traveling_codes(self.server_args):
            return None
        return coded_prompt(req, len(req.origin_input_ids), self.views.methods[self.requests.method_of(req)])

    def coded_prompts(self, tree_cache) -> CodedPrompts | None:
        """What takes another server's prompts as codes; None where their full KV comes."""
        if not traveling_codes(self.server_args):
            return None
        if self.loop is None:
            self.bind_tree_cache(tree_cache)
        return None if tree_cache.codes is None else CodedPrompts(self.views, tree_cache.codes, self.requests)

    def _views_of(self, tree_cache) -> CompressedViews:
        args, form, served, allocator = self.server_args, self.form, self.methods, self.token_to_kv_pool_allocator
        table = self.req_to_token_pool.req_to_token
        methods = served_methods.copy_methods(args, served.methods, allocator.page_size, form)
        elsewhere, query_heads = None, self.memory.model.query_heads
        requests = min(self._rows - 1, args.max_running_requests or self._rows)
        if selection_options.beside_gpu(args):
            chosen_beside = rank_steps(args, methods[0], table, self.buffers, self.queries, query_heads, served.rotary, requests)
        elif selection_options.ranks(args):
            elsewhere, chosen_beside = cache_ranks(args, methods[0], self.buffers, query_heads, served.rotary, requests), None
        else:
            intervals = selection_options.intervals(args)
            chosen_beside = beside(methods[0], table, self.buffers, query_heads, self.queries, served.rotary, intervals)
        return CompressedViews(
            methods=methods,
            token_table=table,
            rows=self._rows,
            buffers=self.buffers,
            allocator=allocator,
            tree_cache=tree_cache,
            queries=self.queries,
            rotary=served.rotary,
            asked_by=self.requests.asked_by,
            prompt_of=self.requests.prompt_of,
            namespace_of=self.requests.namespace_of,
            form=form,
            elsewhere=elsewhere,
            beside=chosen_beside,
            # Between requests, too: nothing else tells metrics then.
            tended=lambda: self.loop.observe_pool(),
            gives_back=options.full_kv_stays(args) is None,
        )

    def _warm_up(self) -> None:
        """Run once what else the first requests would wait for."""
        self.views.compile_kernels(an_attention(self.model_runner.model).tp_q_head_num)
        compile_ahead(self.views.token_table, self.views.rows - 1)
        if self.graphs is not None:
            self.graphs.warm_up()
        self.queries.warm_up()

    def forget(self, row: int) -> None:
        """Drop the draft state of the request in ``row``: it finished, was aborted or retracted."""
        self.requests.forget(row)
        self.loop.forget(row)
        self.loop.observe_pool()

    def clear_cache_pool(self) -> None:
        """Forget all requests: the scheduler cleared the pool."""
        self.requests.clear()
        if self.loop is not None:
            self.loop.observe_pool()

    def update_weights_from_disk(self, recv_req) -> tuple[bool, str]:
        """Nothing of its own to update; the target's weights are the drafter's."""
        return True, "Succeeded to update model weights."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req) -> tuple[bool, str]:
        """Update the target: the scheduler asks the draft worker where there is one."""
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(self, batch: "ScheduleBatch", on_publish=None) -> GenerationBatchResult:
        """One iteration of SGLang's scheduler: a prefill as it is, a decode drafted and verified."""
        if self.loop is None:
            self.bind_tree_cache(batch.tree_cache)
        self.views.tend()
        if batch.tree_cache.codes is not None:
            batch.tree_cache.codes.write()
        result = self._forward(batch, on_publish)
        self.new_tokens = NewTokens.of(batch, result)
        if batch.tree_cache.host is not None:
            batch.tree_cache.host.tier.forward_launched()
        return result

    def _forward(self, batch: "ScheduleBatch", on_publish) -> GenerationBatchResult:
        if batch.forward_mode.is_idle():
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = BetweenSteps(torch.empty(0, dtype=torch.int64))
            return result
        if batch.forward_mode.is_extend():
            return prefill(self, batch, on_publish)
        return self.loop.decode(batch, on_publish)

    def account(self, batch: "ScheduleBatch", result: GenerationBatchResult) -> None:
        """Count an iteration's outcome, once it is on the host."""
        if isinstance(result, RoundResult):
            self.loop.account(batch, result)
