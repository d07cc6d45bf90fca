"""What this plugin takes on the device beside SGLang's KV pool: counted here, and taken off the pool (:class:`ReservedMemory`).

Whoever takes such memory has its size from here, or the plan from there. Not counted are the intermediate results of steps and captured
verifications, partial sums of attention among them, which lie, as those of SGLang's own graphs, in what ``--mem-fraction-static`` leaves.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_ext.config import options, selection_options
from sglang_ext.config.prefill_options import QUANTIZED
from sglang_ext.core import OptionError
from sglang_ext.layers.attention import verify_attention
from sglang_ext.layers.attention.model_layers import first_attention_layer, attention_scaling
from sglang_ext.layers.kernels.hack import specialized_prefill
from sglang_ext.layers.kernels.hack.prompt_codes import PromptCodes
from sglang_ext.layers.kernels.packed import packed_decode
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.compressors.each_step.quest import Quest
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.host_tier.tier import staging_bytes
from sglang_ext.mem_cache.selection.scoring_keys import KeySpec
from sglang_ext.mem_cache.selection.on_gpu import planned_bytes as choice_bytes

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ext.arguments import KVServerArgs


# Of the memory for KV, what rings of queries take at most, and rings that there are in any case, where as many requests run.
RINGS_SHARE, LEAST_RINGS = 1 / 64, 16
# As many times as much where cache ranks have full KV: more requests run at once, and each leaves queries in every step.
RINGS_OF_ROWS = 4
# Of each of FlashInfer's wrappers on the device, for its plan; and wrappers of a backend beside those of its graphs.
PLAN_BYTES, OTHER_WRAPPERS = 8 << 20, 4
# Page tables that SGLang's fa3 backend has for graphs of verifications.
PAGE_TABLES = 3


@dataclass(frozen=True)
class ModelSizes:
    """A model as one rank holds it.

    Attributes:
        layers: that attend.
        query_heads, kv_heads: of a layer, on this rank.
        head_dim, value_dim: of a query or key, and of a value.
        number_bytes: of a number in queries, keys and values.
        vocabulary: tokens.
        context: tokens of the longest.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    number_bytes: int
    vocabulary: int
    context: int

    @classmethod
    def of(cls, model_runner: "ModelRunner") -> "ModelSizes":
        """Those of a loaded model."""
        attention, config = first_attention_layer(model_runner.model), model_runner.model_config
        return cls(
            layers=len(attention_scaling(model_runner.model)),
            query_heads=attention.tp_q_head_num,
            kv_heads=attention.tp_k_head_num,
            head_dim=attention.qk_head_dim,
            value_dim=attention.v_head_dim,
            number_bytes=model_runner.dtype.itemsize,
            vocabulary=config.vocab_size,
            context=config.context_len,
        )

    @property
    def query_bytes(self) -> int:
        """Bytes of a token's queries in all layers."""
        return self.layers * self.query_heads * self.head_dim * self.number_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim) * self.number_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device beside SGLang's KV pool, by what they are for; what a server does not need is 0.

    Attributes:
        rings: requests whose newest queries are kept at once.
        query_rings: those queries, for methods that score keys by them.
        draft_rows: a second row of the token table for each request, and wider rows.
        compressed_tables: what draft rows begin with, where that is not tokens.
        pending_drafts: drafts that wait for full KV.
        scores: predicted scores of all slots, and the network that gives them.
        key_codes: keys of all slots in few bits, by which tokens are chosen.
        extremes: least and largest numbers of all pages, by which pages are chosen.
        staging: buffers through which full KV goes to host memory and back.
        workspaces: what attention of verifications works in.
        selection_workspaces: what choices of tokens, or of pages, by queries of steps work in.
        exchange_buffers: through which cache ranks on other GPUs get keys and queries, at most; where these send rows, records of copies, too.
        prompt_codes: codes of a layer's keys and values, of the longest prompt, and what one kernel leaves another of its queries.
        logits: of the largest captured verification.
    """

    rings: int = 0
    query_rings: int = field(default=0, metadata={"name": "query rings"})
    draft_rows: int = field(default=0, metadata={"name": "draft rows of the token table"})
    compressed_tables: int = field(default=0, metadata={"name": "tables of copies"})
    pending_drafts: int = field(default=0, metadata={"name": "gathered drafts"})
    scores: int = field(default=0, metadata={"name": "predicted scores"})
    key_codes: int = field(default=0, metadata={"name": "keys in few bits"})
    extremes: int = field(default=0, metadata={"name": "extremes of pages"})
    staging: int = field(default=0, metadata={"name": "buffers to and from host memory"})
    workspaces: int = field(default=0, metadata={"name": "workspaces of verifications"})
    selection_workspaces: int = field(default=0, metadata={"name": "choices of tokens"})
    exchange_buffers: int = field(default=0, metadata={"name": "arenas of cache ranks"})
    prompt_codes: int = field(default=0, metadata={"name": "codes of prompts"})
    logits: int = field(default=0, metadata={"name": "logits of verifications"})

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(size for _, size in self._parts())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gb(size)}" for name, size in self._parts() if size)
        rings = f"; queries of {self.rings} requests at once" if self.rings else ""
        return f"{gb(self.total)} of device memory beside the KV pool: {parts}{rings}"

    def _parts(self) -> Iterator[tuple[str, int]]:
        for entry in fields(self):
            if "name" in entry.metadata:
                yield entry.metadata["name"], getattr(self, entry.name)


@dataclass(frozen=True)
class MemoryPlanner:
    """Plans for a server's flags, by how much its pool will hold.

    Attributes:
        args: the server's, as SGLang resolved them.
        model: on this rank.
        served: the methods that requests may ask for.
        backend: attention backend of decoding; verifications follow it.
        on_gpu: whether there are kernels and graphs.
        capability: compute capability of the NVIDIA GPU, where it is one.
    """

    args: "KVServerArgs"
    model: ModelSizes
    served: ServedMethods
    backend: str
    on_gpu: bool
    capability: tuple[int, int] | None

    @property
    def stride(self) -> int:
        """Tokens of a request in a verification at most."""
        return self.args.speculative_num_draft_tokens

    @classmethod
    def of(cls, args: "KVServerArgs", model_runner: "ModelRunner", served: ServedMethods) -> "MemoryPlanner":
        """For a loaded model."""
        _, backend = args.get_attention_backends()
        there = torch.empty(0, device=model_runner.device)
        return cls(args, ModelSizes.of(model_runner), served, backend, there.is_cuda, packed_decode.capability(there))

    @property
    def ring_span(self) -> int:
        """Queries in the ring of a request, as :attr:`QueryWindows.span`."""
        return self.served.window + max(self.stride, self.served.every)

    @property
    def code_bytes(self) -> int:
        """Bytes of a token's keys in few bits; 0 where there are none."""
        bits, model = selection_options.slot_code_bits(self.args), self.model
        # Numbers are of no account where codes are alone.
        return KeySpec(model.layers, model.kv_heads, model.head_dim, torch.float16, bits).token_bytes if bits else 0

    @property
    def _paging(self) -> Quest | None:
        """The method whose choices are made in attention; None for none."""
        compressors = (method.compressor for method in self.served.methods)
        return next((each for each in compressors if isinstance(each, Quest) and each.in_attention), None)

    def _extremes(self, slots: int) -> int:
        """Bytes of the extremes of pages of so many slots, as page_extremes.py has them; 0 where there are none."""
        model, paging = self.model, self._paging
        page = 0 if paging is None else slots // paging.scoring.page
        return page * model.layers * model.kv_heads * 2 * model.head_dim * model.number_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the pool, and beside it of all that follows its keys."""
        page = Quest.scoring.page
        return self.model.slot_bytes + self.code_bytes + -(-self._extremes(page) // page)

    @property
    def ahead(self) -> int:
        """Tokens by which rows of the token table are widened: what SGLang reserves ahead must not reach the next row."""
        return get_alloc_reserve_per_decode(self.args) + self.args.page_size

    @property
    def _width(self) -> int:
        """Tokens in a row of SGLang's token table."""
        return self.model.context + get_req_to_token_extra_context_len(self.args)

    def rings(self, requests: int, tokens: int) -> int:
        """Requests whose queries are kept at once, of so many that run at most, with a pool of so many tokens."""
        window = self.served.window
        if not window:
            return 0
        of_pool = RINGS_SHARE * (RINGS_OF_ROWS if selection_options.has_remote_values(self.args) else 1)
        share = int(of_pool * tokens * self.model.slot_bytes / (self.model.query_bytes * self.ring_span))
        return min(requests, max(LEAST_RINGS, share))

    def plan(self, requests: int, tokens: int, rings: int) -> MemoryPlan:
        """For so many requests at once, a pool of so many tokens, and so many rings."""
        args, model, rows = self.args, self.model, requests + 1
        width = self._width + self.ahead
        scores, slots = self.served.scores, tokens + args.page_size
        return MemoryPlan(
            rings=rings,
            query_rings=(1 + rings * self.ring_span) * model.query_bytes if rings else 0,
            draft_rows=4 * rows * (2 * width - self._width),
            compressed_tables=self._copy_tables(2 * rows),
            pending_drafts=8 * rows * (self.stride - 1),
            scores=0 if scores is None else scores.planned_bytes(slots),
            key_codes=slots * self.code_bytes,
            extremes=self._extremes(slots),
            staging=2 * staging_bytes(slots * model.slot_bytes, args.page_size * model.slot_bytes) if args.kv_host_gb else 0,
            workspaces=self._workspaces(requests),
            selection_workspaces=self._choices(rings, width) + self._page_choices(requests, width),
            exchange_buffers=self._arenas(tokens) if self.on_gpu else 0,
            prompt_codes=self._prompt_codes(width),
            logits=4 * model.vocabulary * options.max_captured_tokens(args, requests) if self._captures else 0,
        )

    @property
    def _captures(self) -> bool:
        args = self.args
        graphs = self.on_gpu and args.cuda_graph_config.decode.backend != Backend.DISABLED
        return graphs and args.kv_mode != "lossy"

    def _copy_tables(self, rows: int) -> int:
        methods = self.served.methods
        counts = any(method.quantizer is not None for method in methods) + any(method.compressor.points for method in methods)
        bounds = self.model.layers * self.model.kv_heads + 1 if self.args.kv_head_budgets == "adaptive" else 0
        paging = self._paging
        pages = 0 if paging is None else PagePointerLayout.table_numbers(self.model.layers, self.model.kv_heads, paging.every)
        return 4 * rows * (counts + bounds + pages)

    def _choices(self, rings: int, tokens: int) -> int:
        """As on_gpu.py makes them, of contexts of so many tokens at most: one beside steps, of all that have rings, but where cache
        ranks make that, and one while a copy is made."""
        model, choosing = self.model, [m.compressor for m in self.served.methods if isinstance(m.compressor, Spade)]
        if not self.on_gpu or not choosing:
            return 0
        sizes = tokens, model.query_heads, model.kv_heads, model.head_dim, model.number_bytes, choosing[0].predictor
        at_once = [1] if self.args.kv_cache_ranks else [1, rings]
        return sum(choice_bytes(model.layers * count, *sizes) for count in at_once)

    def _page_choices(self, requests: int, tokens: int) -> int:
        """As quest_pages.py makes them, in rows of so many tokens: of a layer of a step, as the next one works where that did; once in what
        SGLang's graphs of steps share, where there are any, and once outside, where they are captured from and larger batches step."""
        paging = self._paging
        if not self.on_gpu or paging is None:
            return 0
        from sglang_ext.layers.kernels.selection.quest_pages import scratch_bytes

        decode = self.args.cuda_graph_config.decode
        at_once = [requests] if decode.backend == Backend.DISABLED else [requests, min(requests, max(decode.bs))]
        return sum(scratch_bytes(count, self.model.kv_heads, tokens, paging.scoring.page) for count in at_once)

    def _arenas(self, tokens: int) -> int:
        """Where rows are sent with records of as many tokens as the pool holds, a number for each layer and KV head."""
        records = 4 * tokens * self.model.layers * self.model.kv_heads if selection_options.has_remote_values(self.args) else 0
        return selection_options.exchange_buffer_bytes(self.args) * selection_options.ranks(self.args) + records

    def _prompt_codes(self, tokens: int) -> int:
        """As quantized_extend.py makes them, of so many tokens at most."""
        if not self.on_gpu or self.args.kv_prefill != QUANTIZED:
            return 0
        model, quantizer = self.model, next(m.quantizer for m in self.served.methods if m.quantizer is not None)
        partition = quantizer.partition
        token = model.kv_heads * PromptCodes.token_bytes(model.head_dim, model.value_dim, partition)
        if specialized_prefill.is_supported_shape(self.capability, partition, quantizer.block, model.query_heads // model.kv_heads):
            token += model.query_heads * specialized_prefill.PrefillQueryCodes.query_bytes(model.head_dim, partition)
        return tokens * token

    def _workspaces(self, requests: int) -> int:
        """As verify_attention.py, verify_flashinfer.py and verify_fa3.py make them."""
        args, model = self.args, self.model
        if not self.on_gpu or args.kv_mode == "lossy":
            return 0
        own = self.backend in ("triton", "fa3")
        size = 0
        if own:
            splits = verify_attention.context_splits(1, model.kv_heads, self._width + self.ahead, self._exact_tile)
            size = 4 * verify_attention.workspace_size(model.query_heads, model.value_dim, self.stride, splits)
        if not self._captures or self.backend == "triton":
            return size
        sizes = [min(requests, each) for each in args.cuda_graph_config.decode.bs]
        narrow = [len({*sizes}), max(sizes)]
        wide = [options.MAX_WIDE_REQUESTS, options.MAX_WIDE_REQUESTS]
        for graphs, most in [narrow] * len(options.verify_widths(args)) + [wide] * len(options.wide_verify_widths(args)):
            if self.backend == "flashinfer":
                # Slot numbers of 4 bytes and a mask of 1, for two contexts of each request.
                size += 2 * most * model.context * 5 + (graphs + OTHER_WRAPPERS) * PLAN_BYTES
            else:
                size += PAGE_TABLES * 4 * most * -(-model.context // args.page_size)
        return size

    @property
    def _exact_tile(self) -> int:
        exact = self.args.enable_deterministic_inference and self.backend == "triton"
        return verify_attention.exact_tile() if exact else 0


def gb(size: int) -> str:
    """Bytes as a user reads them."""
    return f"{size / 1e9:.2f} GB"


logger = logging.getLogger(__name__)

# What a device rounds two allocations up by, at most.
ALLOCATION_GRAIN = 4 << 20


class ReservedMemory:
    """Memory of the device that the pool shall not get; made when the weights are loaded, before the pool is.

    With ``--max-total-tokens`` the pool stays as large as that, where that fits without the plan.

    Args:
        planner: plans for the server's flags.
        model_runner: the target's.

    Raises:
        OptionError: the weights leave less than the plan.
    """

    def __init__(self, planner: MemoryPlanner, model_runner: "ModelRunner") -> None:
        self._planner = planner
        model_runner.init_kv_cache_configurator()
        configurator = model_runner.kv_cache_configurator
        available = configurator._profile_available_bytes(model_runner.pre_model_load_memory)
        asked = planner.args.max_total_tokens
        # Codes of keys are a large part of what a token takes.
        tokens = min(available // planner.token_bytes, asked or available)
        requests = configurator.resolve_max_num_reqs(tokens)
        # For a pool as large as it would be beside these alone: what else depends on that is a little less in the end.
        plan = planner.plan(requests, tokens, planner.rings(requests, tokens))
        if plan.total >= available:
            raise OptionError(
                f"sglang-ext needs {plan}; the weights leave {gb(available)}: lower --max-running-requests (now {requests}) "
                f"or --cuda-graph-max-bs, or raise --mem-fraction-static (now {planner.args.mem_fraction_static})"
            )
        self._rings = plan.rings
        # Host memory counts as taken once it is written.
        size = self._beside(plan.total, available, (asked or 0) * planner.model.slot_bytes)
        self._held: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=model_runner.device).zero_()

    def _beside(self, planned: int, available: int, pool: int) -> int:
        """Bytes to hold of those that are planned, beside a pool of so many that is asked for, 0 for none."""
        spare = available - pool
        if not pool or spare < 0:
            return planned  # SGLang says itself that such a pool does not fit
        if spare >= planned:
            return 0
        args = self._planner.args
        logger.warning(
            "sglang-ext: a pool of --max-total-tokens %s leaves %s of the %s that lie beside it; the rest comes out of what "
            "--mem-fraction-static %s leaves for all else: lower one of both where memory runs out",
            args.max_total_tokens, gb(spare), gb(planned), args.mem_fraction_static,
        )  # fmt: skip
        return max(0, spare - ALLOCATION_GRAIN)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._held is None else self._held.nbytes

    @property
    def model(self) -> ModelSizes:
        """Sizes of the model, on this rank."""
        return self._planner.model

    @property
    def ahead(self) -> int:
        """Tokens by which rows of the token table are widened."""
        return self._planner.ahead

    def release(self, requests: int, tokens: int) -> MemoryPlan:
        """Give back what was held, as the pool is there, for so many requests and tokens; what is taken for them, told in
        the log."""
        on_gpu = self._held is not None and self._held.is_cuda
        self._held = None
        if on_gpu:
            # Graphs, which have memory of their own, find it too.
            torch.cuda.empty_cache()
        plan = self._planner.plan(requests, tokens, min(requests, self._rings))
        logger.info("sglang-ext: %s", plan)
        return plan

