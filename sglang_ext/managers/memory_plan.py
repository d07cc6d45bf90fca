"""Plans the device memory that this plugin needs in addition to SGLang's KV pool, and takes it off the pool (:class:`ReservedMemory`).

Not planned: intermediate results of steps and of captured verifications. Like those of SGLang's own graphs, they use the memory that
``--mem-fraction-static`` leaves.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.config import options, selection_options
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError
from sglang_ext.layers.forward import attention_scaling, first_attention_layer
from sglang_ext.layers.kernels.gpu_launch import capability
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.selection.scoring_keys import KeySpec

logger = logging.getLogger(__name__)

# Upper limit of query rings, as a share of the memory for KV; and rings that exist in any case, if that many requests run.
RINGS_SHARE, LEAST_RINGS = 1 / 64, 16
# Factor on that share if cache ranks hold full KV: more requests run at once, and each records queries in every step.
RINGS_OF_ROWS = 4
# Bytes of each FlashInfer wrapper on the device, for its plan; and wrappers of a backend outside its graphs.
PLAN_BYTES, OTHER_WRAPPERS = 8 << 20, 4
# Page tables of SGLang's fa3 backend for graphs of verifications.
PAGE_TABLES = 3


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, as one rank holds it: attention layers, heads of each, channels of a key and of a value, and others.

    ``number_bytes``: of a number in queries, keys and values. ``context``: tokens of the longest context.
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
    def of(cls, model_runner: ModelRunner) -> "ModelSizes":
        """The sizes of a loaded model."""
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
    """Bytes on the device outside SGLang's KV pool, by purpose; 0 for what a server does not need. The log names each part.

    Attributes:
        rings: Requests whose newest queries are kept at once, in ``query_rings`` bytes.
        draft_rows: A second row of the token table for each request, and wider rows.
        compressed_tables: Tables about the beginnings of draft rows, if these do not hold tokens.
        exchange_buffers: Upper limit of the buffers of cache ranks on other GPUs; if they send rows, also of compressed KV.
        prompt_codes: Quantized keys and values of the longest prompt in one layer, and the queries that one kernel passes to another.
    """

    rings: int = 0
    query_rings: int = field(default=0, metadata={"name": "query rings"})
    draft_rows: int = field(default=0, metadata={"name": "draft rows of the token table"})
    compressed_tables: int = field(default=0, metadata={"name": "tables of compressed KV"})
    pending_drafts: int = field(default=0, metadata={"name": "pending drafts"})
    scores: int = field(default=0, metadata={"name": "predicted scores"})
    key_codes: int = field(default=0, metadata={"name": "keys in few bits"})
    extremes: int = field(default=0, metadata={"name": "extremes of pages"})
    staging: int = field(default=0, metadata={"name": "buffers to and from host memory"})
    workspaces: int = field(default=0, metadata={"name": "workspaces of verifications"})
    selection_workspaces: int = field(default=0, metadata={"name": "selection of tokens"})
    exchange_buffers: int = field(default=0, metadata={"name": "exchange buffers of cache ranks"})
    prompt_codes: int = field(default=0, metadata={"name": "codes of prompts"})
    logits: int = field(default=0, metadata={"name": "logits of verifications"})

    @property
    def _parts(self) -> list[tuple[str, int]]:
        return [(entry.metadata["name"], getattr(self, entry.name)) for entry in fields(self) if "name" in entry.metadata]

    @property
    def total(self) -> int:
        """Sum of all parts, in bytes."""
        return sum(size for _, size in self._parts)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gb(size)}" for name, size in self._parts if size)
        rings = f"; queries of {self.rings} requests at once" if self.rings else ""
        return f"{gb(self.total)} of device memory beside the KV pool: {parts}{rings}"


class MemoryUser(Protocol):
    """A feature of the worker (feature.py) that needs memory beside the pool."""

    def planned_bytes(self, planner: "MemoryPlanner", requests: int, tokens: int, rings: int) -> dict[str, int]:
        """Bytes by field of :class:`MemoryPlan`."""


@dataclass(frozen=True)
class MemoryPlanner:
    """Plans memory for a server's flags, as SGLang resolved them, by the size of its pool. Features add their parts to the plan.

    ``backend``: attention of decoding and verifications. ``capability``: compute capability of an NVIDIA GPU; otherwise None.
    """

    args: KVServerArgs
    model: ModelSizes
    served: ServedMethods
    backend: str
    on_gpu: bool
    capability: tuple[int, int] | None
    features: Sequence[MemoryUser] = ()

    @classmethod
    def of(cls, args: KVServerArgs, model_runner: ModelRunner, served: ServedMethods, features: Sequence[MemoryUser]) -> "MemoryPlanner":
        """The planner for a loaded model."""
        backend, there = args.get_attention_backends()[1], torch.empty(0, device=model_runner.device)
        return cls(args, ModelSizes.of(model_runner), served, backend, there.is_cuda, capability(there), features)

    @property
    def ring_span(self) -> int:
        """Queries in the ring of a request, as :attr:`QueryWindows.span`."""
        return self.served.window + max(self.args.speculative_num_draft_tokens, self.served.selection_interval)

    @property
    def code_bytes(self) -> int:
        """Bytes of a token's keys in few bits; 0 if there are none."""
        bits, model = selection_options.slot_code_bits(self.args), self.model
        # The dtype has no effect on the size of keys in few bits.
        return KeySpec(model.layers, model.kv_heads, model.head_dim, torch.float16, bits).token_bytes if bits else 0

    @property
    def paging(self) -> Quest | None:
        """The method that selects within attention; None if there is none."""
        return next((method.compressor for method in self.served.methods if method.compressor.in_attention), None)

    def _extremes(self, slots: int) -> int:
        """Bytes of the page extremes of this number of slots, as in key_derived_data.py; 0 if there are none."""
        model, paging = self.model, self.paging
        page = 0 if paging is None else slots // paging.page
        return page * model.layers * model.kv_heads * 2 * model.head_dim * model.number_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the pool, and of the data beside the pool that follows its keys."""
        page = 1 if self.paging is None else self.paging.page
        return self.model.slot_bytes + self.code_bytes + -(-self._extremes(page) // page)

    @property
    def ahead(self) -> int:
        """Tokens by which rows of the token table are widened, so that SGLang's slots reserved ahead do not reach the next row."""
        return get_alloc_reserve_per_decode(self.args) + self.args.page_size

    @property
    def _width(self) -> int:
        return self.model.context + get_req_to_token_extra_context_len(self.args)

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of the widened token table."""
        return self._width + self.ahead

    def rings(self, requests: int, tokens: int) -> int:
        """Requests whose queries are kept at once, for at most ``requests`` running requests, and a pool of ``tokens`` tokens."""
        window = self.served.window
        if not window:
            return 0
        of_pool = RINGS_SHARE * (RINGS_OF_ROWS if selection_options.has_remote_values(self.args) else 1)
        share = int(of_pool * tokens * self.model.slot_bytes / (self.model.query_bytes * self.ring_span))
        return min(requests, max(LEAST_RINGS, share))

    def plan(self, requests: int, tokens: int, rings: int) -> MemoryPlan:
        """Plan for ``requests`` running requests, a pool of ``tokens`` tokens, and ``rings`` query rings."""
        model, rows = self.model, requests + 1
        parts = {name: size for feature in self.features for name, size in feature.planned_bytes(self, requests, tokens, rings).items()}
        scores, slots = self.served.scores, tokens + self.args.page_size
        return MemoryPlan(
            rings=rings,
            query_rings=(1 + rings * self.ring_span) * model.query_bytes if rings else 0,
            draft_rows=4 * rows * (2 * self.row_tokens - self._width),
            compressed_tables=self._compressed_tables(2 * rows),
            pending_drafts=8 * rows * (self.args.speculative_num_draft_tokens - 1),
            scores=0 if scores is None else scores.planned_bytes(slots),
            key_codes=slots * self.code_bytes,
            extremes=self._extremes(slots),
            workspaces=self._workspaces(requests),
            logits=4 * model.vocabulary * options.max_verification_tokens(self.args, requests) if self._captures else 0,
            **parts,
        )

    @property
    def _captures(self) -> bool:
        return self.on_gpu and self.args.cuda_graph_config.decode.backend != Backend.DISABLED and self.args.kv_mode != "lossy"

    def _compressed_tables(self, rows: int) -> int:
        methods, model = self.served.methods, self.model
        counts = any(method.quantizer is not None for method in methods) + any(method.compressor.points for method in methods)
        numbers = counts + (model.layers * model.kv_heads + 1 if self.args.kv_head_budgets == "adaptive" else 0)
        if self.paging is not None:
            from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout

            numbers += PagePointerLayout.table_numbers(model.layers, model.kv_heads, self.paging.every)
        return 4 * rows * numbers

    def _workspaces(self, requests: int) -> int:
        """Bytes of the workspaces in verify_attention.py, and of fa3."""
        args, model = self.args, self.model
        if not self.on_gpu or args.kv_mode == "lossy":
            return 0
        size = 0
        if self.backend in ("triton", "fa3"):
            from sglang_ext.layers.attention import verify_attention

            is_exact = args.enable_deterministic_inference and self.backend == "triton"
            tile = verify_attention.exact_tile() if is_exact else 0
            splits = verify_attention.context_splits(1, model.kv_heads, self.row_tokens, tile)
            size = 4 * verify_attention.workspace_size(model.query_heads, model.value_dim, self.args.speculative_num_draft_tokens, splits)
        if not self._captures or self.backend == "triton":
            return size
        sizes = [min(requests, each) for each in args.cuda_graph_config.decode.bs]
        narrow, wide = (len({*sizes}), max(sizes)), (options.MAX_WIDE_REQUESTS, options.MAX_WIDE_REQUESTS)
        for graphs, most in [narrow] * len(options.verify_widths(args)) + [wide] * len(options.wide_verify_widths(args)):
            if self.backend == "flashinfer":
                # 4-byte slot numbers and a 1-byte mask, for two contexts of each request.
                size += 2 * most * model.context * 5 + (graphs + OTHER_WRAPPERS) * PLAN_BYTES
            else:
                size += PAGE_TABLES * 4 * most * -(-model.context // args.page_size)
        return size


def gb(size: int) -> str:
    """Bytes in a readable form."""
    return f"{size / 1e9:.2f} GB"


# Upper limit of the bytes by which a device rounds two allocations up.
ALLOCATION_GRAIN = 4 << 20


class ReservedMemory:
    """Device memory that is kept from the KV pool. It is allocated after the weights are loaded and before the pool is created.

    With ``--max-total-tokens`` the pool keeps that size, if it fits without the plan. :attr:`model` and :attr:`ahead` are the planner's.

    Raises:
        OptionError: The weights leave less memory than the plan needs.
    """

    def __init__(self, planner: MemoryPlanner, model_runner: ModelRunner) -> None:
        self._planner = planner
        self.model, self.ahead = planner.model, planner.ahead
        model_runner.init_kv_cache_configurator()
        configurator = model_runner.kv_cache_configurator
        available = configurator._profile_available_bytes(model_runner.pre_model_load_memory)
        asked = planner.args.max_total_tokens
        # Keys in few bits are a large part of a token's bytes.
        tokens = min(available // planner.token_bytes, asked or available)
        requests = configurator.resolve_max_num_reqs(tokens)
        # Plan for the pool size without the plan itself. The plan makes the pool smaller, so parts that depend on its size shrink a little.
        plan = planner.plan(requests, tokens, planner.rings(requests, tokens))
        if plan.total >= available:
            raise OptionError(
                f"sglang-ext needs {plan}; the weights leave {gb(available)}: lower --max-running-requests (now {requests}) "
                f"or --cuda-graph-max-bs, or raise --mem-fraction-static (now {planner.args.mem_fraction_static})"
            )
        self._rings = plan.rings
        # Host memory counts as used once it is written.
        size = self._held_bytes(plan.total, available, (asked or 0) * planner.model.slot_bytes)
        self._held: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=model_runner.device).zero_()

    def _held_bytes(self, planned: int, available: int, pool: int) -> int:
        """Bytes to hold back for a plan of ``planned`` bytes and a requested pool of ``pool`` bytes, 0 for none."""
        spare = available - pool
        if not pool or spare < 0:
            return planned  # SGLang itself reports that such a pool does not fit
        if spare >= planned:
            return 0
        logger.warning(
            "sglang-ext: a pool of --max-total-tokens %s leaves %s of the %s that are needed beside it; the rest comes out of the "
            "memory that --mem-fraction-static %s leaves for all else: lower one of both if memory runs out",
            self._planner.args.max_total_tokens, gb(spare), gb(planned), self._planner.args.mem_fraction_static,
        )  # fmt: skip
        return max(0, spare - ALLOCATION_GRAIN)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held back."""
        return 0 if self._held is None else self._held.nbytes

    def release(self, requests: int, tokens: int) -> MemoryPlan:
        """Free the memory that was held back, once the pool exists with this size. Logs and returns the plan for it."""
        on_gpu = self._held is not None and self._held.is_cuda
        self._held = None
        if on_gpu:
            # Graphs, which have a memory pool of their own, can use the freed memory, too.
            torch.cuda.empty_cache()
        plan = self._planner.plan(requests, tokens, min(requests, self._rings))
        logger.info("sglang-ext: %s", plan)
        return plan
