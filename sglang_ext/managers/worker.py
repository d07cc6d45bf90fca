"""The worker that SGLang's scheduler calls: drafts on compressed KV, verifies on full KV.

One iteration of a running batch: plan a step for each request, run them in one forward, sample,
accept, report. See docs/request-path.md.
"""

import hashlib
import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_ext.core import RequestState, Step
from sglang_ext.layers.attention import torch_native
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers import forward, integrity, meta_info, results, sampling
from sglang_ext.managers.eligibility import fallback_reason
from sglang_ext.managers.planner import CURABLE, Planner
from sglang_ext.mem_cache import query_window
from sglang_ext.mem_cache.compressed_views import CompressedViews
from sglang_ext.mem_cache.compressors import create
from sglang_ext.mem_cache.query_window import QueryWindows, Recorded
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
        self.stride = server_args.kv_draft_length + 1
        self.compressor = create(server_args.kv_compressor)
        self.queries = QueryWindows(self.compressor.window)
        self.states: dict[int, RequestState] = {}
        self.metrics = KVMetrics.create(server_args)
        self.strict = integrity.is_strict()
        self._admitted = 0
        self.planner: Planner | None = None
        torch_native.register()
        query_window.reserve_queries(self.compressor.window)

    @property
    def draft_worker(self) -> None:
        """None: the target model drafts."""
        return None

    def alloc_memory_pool(self, **kwargs) -> None:
        """Double the token table for draft rows, before attention backends are built on it."""
        super().alloc_memory_pool(**kwargs)
        pool = self.req_to_token_pool
        rows, width = pool.req_to_token.shape
        # SGLang reserves slots ahead of the context's end; they must not reach the next row.
        width += get_alloc_reserve_per_decode(self.server_args) + self.server_args.page_size
        pool.req_to_token = torch.zeros(
            (2 * rows, width), dtype=pool.req_to_token.dtype, device=pool.req_to_token.device
        )
        self._rows = rows

    def bind_tree_cache(self, tree_cache) -> None:
        """Build the compressed views once the prefix tree exists."""
        views = CompressedViews(
            compressor=self.compressor,
            budget=self.server_args.kv_budget,
            token_table=self.req_to_token_pool.req_to_token,
            rows=self._rows,
            kv_pool=self.model_runner.token_to_kv_pool,
            allocator=self.token_to_kv_pool_allocator,
            tree_cache=tree_cache,
            layers=attention_scaling(self.model_runner.model),
            queries=self.queries,
        )
        tree_cache.views = views
        tree_cache.on_release = self.forget
        tree_cache.insert_generated = not self.lossy
        self.planner = Planner(views, self.server_args.kv_draft_length, self.lossy)
        logger.info(
            "sglang-ext: --kv-mode %s, compressor %s, budget %s, draft length %s",
            self.server_args.kv_mode,
            self.server_args.kv_compressor,
            self.server_args.kv_budget,
            self.server_args.kv_draft_length,
        )

    def forget(self, row: int) -> None:
        """Drop the draft state of the request in ``row``: it finished, was aborted or retracted."""
        self.states.pop(row, None)
        self.metrics.observe_pool(self.planner.views)

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
        if self.planner is None:
            self.bind_tree_cache(batch.tree_cache)
        if batch.forward_mode.is_idle():
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = BetweenSteps()
            return result
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._decode(batch)

    def _prefill(self, batch: "ScheduleBatch") -> GenerationBatchResult:
        """SGLang's own prefill; its first tokens are sampled like all others (sampling.py)."""
        rows, start = [], 0
        for req, length in zip(batch.reqs, batch.extend_lens):
            rows.append(Recorded(req.req_pool_idx, start, start + length))
            start += length
        with self.queries.recording(tuple(rows)):
            result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        states = [self._admit(req) for req in batch.reqs]
        lengths = batch.seq_lens.tolist()
        rows = [self._sampling_row(i, s, length - 1) for i, (s, length) in enumerate(zip(states, lengths))]
        output = result.logits_output
        sampled = sampling.sample(self.model_runner, batch, output.next_token_logits, rows)
        for state, token in zip(states, sampled.tokens):
            state.bonus = token
        if batch.return_logprob:
            sampled.fill_logprobs(output, list(range(len(rows))), stride=1)
        result.next_token_ids = torch.tensor(sampled.tokens, dtype=torch.int64)
        result.next_draft_input = BetweenSteps()
        result.new_seq_lens = batch.seq_lens
        return result

    def _admit(self, req: "Req") -> RequestState:
        """The draft state of a request whose prompt (or a chunk of it) was computed."""
        old = self.states.get(req.req_pool_idx)
        if old is not None:
            # An earlier chunk of the same prompt.
            return old
        self._admitted += 1
        state = RequestState(
            rid=req.rid,
            row=req.req_pool_idx,
            seed=noise_seed(req, self.server_args, self._admitted),
            bonus=0,
            fallback=fallback_reason(req),
        )
        meta_info.resume(req, state)
        self.states[req.req_pool_idx] = state
        return state

    def _decode(self, batch: "ScheduleBatch") -> GenerationBatchResult:
        states = [self.states[req.req_pool_idx] for req in batch.reqs]
        steps = self.planner.plan(batch.reqs, states, batch.seq_lens.tolist())
        layout = forward.lay_out(steps, self.req_to_token_pool.req_to_token)
        if self.strict:
            integrity.check(steps, layout.slots, self.planner.views)
        with self.queries.recording(self._to_record(steps, layout)):
            output = forward.run(self.model_runner, batch, steps, layout)
        rows = self._sampling_rows(steps)
        sampled = sampling.sample(self.model_runner, batch, output.next_token_logits, rows)
        outcomes = [
            results.accept(step, start, sampled, req.grammar)
            for req, step, start in zip(batch.reqs, steps, layout.starts)
        ]
        for req, step, outcome in zip(batch.reqs, steps, outcomes):
            self._account(req, step, outcome)
        self.metrics.observe_pool(self.planner.views)
        return results.batch_result(batch, outcomes, sampled, output, self.stride)

    def _sampling_rows(self, steps: list[Step]) -> list[sampling.Row]:
        return [
            self._sampling_row(i, step.state, step.position + j, step.drafts_before(j))
            for i, step in enumerate(steps)
            for j in range(len(step.tokens))
        ]

    def _sampling_row(
        self, index: int, state: RequestState, position: int, drafts: tuple[int, ...] = ()
    ) -> sampling.Row:
        return sampling.Row(index, position, None if is_ineligible(state) else state.seed, drafts)

    def _to_record(self, steps: list[Step], layout: forward.Layout) -> tuple[Recorded, ...]:
        """Queries over exact KV; in lossy mode there are none after the prompt, so all."""
        return tuple(
            Recorded(step.state.row, start, start + len(step.tokens))
            for step, start in zip(steps, layout.starts)
            if step.emits and not is_ineligible(step.state)
        )

    def _account(self, req: "Req", step: Step, outcome: results.Accepted) -> None:
        if step.emits:
            self.queries.drop_newest(step.state.row, len(step.tokens) - len(outcome.tokens))
            meta_info.fill(req, step.state)
        self.metrics.observe(step, len(outcome.tokens))


def is_ineligible(state: RequestState) -> bool:
    """Whether a request is served with full KV for good, not only until it has a copy."""
    return state.fallback not in CURABLE


def noise_seed(req: "Req", server_args, admitted: int) -> int:
    """The request's sampling seed, or one of its own: equal on all ranks, different each time."""
    if req.sampling_params.sampling_seed is not None:
        return req.sampling_params.sampling_seed
    if server_args.enable_deterministic_inference:
        return STOCK_DEFAULT_SEED
    name = f"{server_args.random_seed}/{admitted}/{req.rid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def attention_scaling(model: torch.nn.Module) -> dict[int, float]:
    """Scaling of query-key products by layer index, from the model's attention layers."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return {layer.layer_id: layer.scaling for layer in layers}
