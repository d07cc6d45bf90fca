"""Drafts for requests that wait for their full KV from a prefix store (Lynx, section 5; scenario "remote context retrieval").

The anchors of a stored prefix arrive before its residuals. They are loaded into device slots that nothing else reads. There the rest of the
prompt is computed, then drafts are, one forward in each pass of the scheduler. SGLang does not know of it: the request is in its queue. When the
full KV is restored, these slots are freed, and the request is admitted like any other. Its first round verifies the drafts.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.core import EARLY_ROWS, EarlyDrafts
from sglang_ext.device import to_device
from sglang_ext.layers import forward
from sglang_ext.managers.feature import Worker
from sglang_ext.managers.spec_decode.penalties import Penalty
from sglang_ext.managers.spec_decode.planner import SHORT_ROUND
from sglang_ext.managers.spec_decode.request_states import fallback_reason, is_token_only
from sglang_ext.managers.spec_decode.sampling import LogitRow, RowSampler
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

CHUNK = 64
"""Tokens of a prompt that one forward computes. Other requests wait for it, and it keeps the logits of all its tokens."""
MAX_NEW_TOKENS = 1024
"""Longest rest of a prompt, after the stored prefix, that is computed on anchors. It is computed again on the full KV."""


@dataclass
class WaitingRequest:
    """A request that drafts while it waits.

    Attributes:
        batch: A batch with this request alone, for its forwards and samples.
        sampler: Samples one token.
        seed: Seed of the noise that its drafts and their verification share.
        row: Its row in the token table, which SGLang does not know.
        slots: Its own device slots, int64, for the KV after the node.
        node: The node that its row begins with. It is locked.
        length: Tokens with KV.
        max_drafts: Drafts to make.
        drafts: Its drafts, int64 [1] each, on the device.
    """

    req: Req
    batch: ScheduleBatch
    sampler: RowSampler
    seed: int
    row: int
    slots: torch.Tensor
    node: TieredNode
    length: int
    max_drafts: int
    since: float
    drafts: list[torch.Tensor] = field(default_factory=list)


class AnchorDrafter:
    """Drafts for waiting requests of one rank, as :class:`EarlyDrafter` of stored_prefixes.py. ``max_pending``: limit of a request's pending drafts.

    Attributes:
        requests: Requests that drafted while they waited.
        seconds: Sum of the seconds from the arrival of each to its first draft.
    """

    def __init__(self, worker: Worker, tree: TieredRadixCache, max_pending: int) -> None:
        self._worker, self._tree = worker, tree
        # The first draft is the first token of the output, which the prefill samples. The others are pending in the first round.
        self._max_drafts = 1 + max_pending - SHORT_ROUND
        self._waiting: dict[str, WaitingRequest] = {}
        table = worker.compressed_kv.token_table
        self._free_rows = list(range(len(table) - EARLY_ROWS, len(table)))
        self.requests, self.seconds = 0, 0.0

    @property
    def held_slots(self) -> int:
        """Device slots of the requests that draft."""
        return sum(len(each.slots) for each in self._waiting.values())

    def can_draft(self, req: Req, end: int) -> bool:
        """Whether a request may draft, whose first ``end`` tokens come from the store."""
        prompt, params = len(req.origin_input_ids), req.sampling_params
        is_plain = not (fallback_reason(req) or req.grammar or Penalty.of(req) or req.return_logprob or len(req.output_ids))
        has_room = bool(self._free_rows) and 0 < prompt - end <= MAX_NEW_TOKENS
        return is_plain and has_room and is_token_only(req) and min(self._max_drafts, params.max_new_tokens) > 1

    def start(self, req: Req, begin: int, host_pages: torch.Tensor, since: float) -> None:
        """Load the anchors of a request, unless slots are missing. Returns when the host pages may be overwritten."""
        tree, prompt = self._tree, list(req.origin_input_ids)
        nodes = tree.nodes.walk(RadixKey(req.origin_input_ids[:begin], req.extra_key)) if begin else []
        node = nodes[-1] if nodes else tree.nodes.root
        if not self._free_rows or node.end != begin or not all(each.on_device for each in nodes):
            return
        max_drafts = min(self._max_drafts, req.sampling_params.max_new_tokens)
        count = -(-(len(prompt) + max_drafts - begin) // tree.page_size) * tree.page_size
        tree.inc_lock_ref(node)
        # Eviction beyond these slots would take those of other drafts, and of running requests.
        room = tree.token_to_kv_pool_allocator.available_size() + tree.unused_tokens
        slots = tree.allocate(count) if room >= count else None
        if slots is None:
            tree.dec_lock_ref(node)
            return
        row, seed = self._free_rows.pop(), self._worker.requests.new_seed(req)
        with self._forward_stream():
            # Their memory is freed to this stream, whose forwards and draws read it.
            batch = self._create_batch(req)
            sampler = RowSampler.from_rows(self._worker.model_runner, batch, [LogitRow(0, seed)], logprobs=False)
        loaded = len(host_pages) * tree.page_size
        request = WaitingRequest(req, batch, sampler, seed, row, slots, node, begin + loaded, max_drafts, since)
        self._waiting[req.rid] = request
        tree.host.tier.pool.pages.fill(host_pages)
        load = tree.host.tier.load(host_pages, slots[:loaded])
        tree.host.arrivals.wait(load)
        if tree.host.arrivals.outcome(load).failed:
            self.abort(req.rid)
            return
        with self._forward_stream():
            table, own = self._worker.compressed_kv.token_table, [each.value for each in nodes]
            table[row, : begin + count] = torch.cat([*own, slots]).to(table.dtype)

    def step(self, rid: str) -> bool:
        """Run one forward of a request that drafts: the next tokens of its prompt, or its next draft. Returns False if it needs none."""
        request = self._waiting.get(rid)
        if request is None or len(request.drafts) >= request.max_drafts:
            return False
        with self._forward_stream():
            self._step(request)
        return True

    def _step(self, request: WaitingRequest) -> None:
        runner, table, prompt = self._worker.model_runner, self._worker.compressed_kv.token_table, request.req.origin_input_ids
        begin = request.length
        if request.drafts:
            tokens = request.drafts[-1]
        else:
            tokens = to_device(list(prompt[begin : begin + CHUNK]), table.device)
        count = len(tokens)
        end = request.length = begin + count
        inputs = forward.ForwardInputs(
            tokens=tokens,
            positions=torch.arange(begin, end, device=table.device),
            slots=table[request.row, begin:end].long(),
            rows=to_device([request.row], table.device),
            lengths=to_device([end], table.device),
            lengths_cpu=torch.tensor([end]),
            counts=[count],
        )
        output = forward.run(runner, request.batch, inputs, self._worker.attentions.select(inputs.counts, on_full_kv=True))
        if end < len(prompt):
            return
        if not request.drafts:
            self.requests += 1
            self.seconds += time.monotonic() - request.since
        request.drafts.append(request.sampler.draw(output.next_token_logits[-1:], inputs.positions[-1:]).tokens)

    def finish(self, rid: str) -> None:
        """Free the slots of a request, and keep its drafts for its first round."""
        request = self._waiting.get(rid)
        if request is not None and len(request.drafts) > 1:
            buffers, prompt = self._worker.compressed_kv.buffers, len(request.req.origin_input_ids)
            with self._forward_stream():
                # The KV of the last draft was not computed.
                slots = self._worker.compressed_kv.token_table[request.row, prompt : request.length].long()
                kv = [buffer[slots] for buffer in (*buffers.keys, *buffers.values)]
                drafts = EarlyDrafts(request.seed, torch.cat(request.drafts), kv)
            self._worker.requests.early_drafts[rid] = drafts
        self._free(rid)

    def abort(self, rid: str) -> None:
        """Free the slots of a request, and forget its drafts."""
        self._worker.requests.early_drafts.pop(rid, None)
        self._free(rid)

    def free_all(self) -> None:
        """Free the slots of all requests, because others need them. Their drafts are lost."""
        for rid in list(self._waiting):
            self._free(rid)

    def _free(self, rid: str) -> None:
        request = self._waiting.pop(rid, None)
        if request is not None:
            self._free_rows.append(request.row)
            self._tree.token_to_kv_pool_allocator.free(request.slots)
            self._tree.dec_lock_ref(request.node)

    def _create_batch(self, req: Req) -> ScheduleBatch:
        """A batch with the fields that a forward and a sampler read."""
        worker, tree = self._worker, self._tree
        config = worker.model_runner.model_config
        algorithm = SpeculativeAlgorithm.from_string(worker.server_args.speculative_algorithm)
        pools = worker.req_to_token_pool, tree.token_to_kv_pool_allocator
        batch = ScheduleBatch.init_new([req], *pools, tree, config, enable_overlap=False, spec_algorithm=algorithm)
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, config.vocab_size)
        batch.seq_lens = to_device([len(req.origin_input_ids)], worker.compressed_kv.token_table.device)
        return batch

    @contextmanager
    def _forward_stream(self) -> Iterator[None]:
        """A context whose work runs after the forwards that were launched, and after the scheduler's work so far."""
        runner = self._worker.model_runner
        if torch.device(runner.device).type != "cuda":
            yield
            return
        scheduling = torch.cuda.current_stream()
        with torch.cuda.stream(runner.forward_stream):
            runner.forward_stream.wait_stream(scheduling)
            yield
