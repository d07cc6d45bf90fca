"""Optional capabilities of the worker: KV transfer, host offload, a prefix store, quantized attention, sparse attention, cache ranks.

Each feature is a subclass of :class:`Feature`, stored with the code it enables. The worker imports the features of :data:`FEATURES` that
flags enable, and calls their methods. Code that serves one feature asks the worker for it: ``worker.feature(KVTransfer)``.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.config import options, selection_options
from sglang_ext.config.method_options import offered_methods
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import TPRanks
from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
from sglang_ext.layers.forward import AttentionOverrides
from sglang_ext.managers.memory_plan import MemoryPlanner, ReservedMemory
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.managers.spec_decode.request_states import RequestStates
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.key_derived_data import KeyDerivedData
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.async_selector import AsyncSelector

FeatureType = TypeVar("FeatureType", bound="Feature")


class Worker(Protocol):
    """The part of the worker (worker.py) that features and rounds read.

    Attributes:
        req_to_token_pool: SGLang's token table, with the draft rows.
        max_verify_tokens: Largest number of tokens of a request in a verification.
        attentions: Attention of verifications and of steps over compressed KV, if it is not the model's own.
        graphs: Captured verifications; None if there are none.
        key_derived_data: Data computed from the pool's keys and stored outside it (key codes, page extremes); None if there is none.
        compressed_kv: Compressed KV of all requests; None before the prefix tree exists.
    """

    server_args: KVServerArgs
    model_runner: ModelRunner
    target_worker: TpModelWorker
    req_to_token_pool: ReqToTokenPool
    lossy: bool
    max_verify_tokens: int
    methods: ServedMethods
    requests: RequestStates
    ranks: TPRanks
    metrics: KVMetrics
    memory: ReservedMemory
    attentions: AttentionOverrides
    graphs: VerifyGraphSet | None
    queries: QueryWindows
    buffers: KVBuffers
    layout: KVLayout
    key_derived_data: KeyDerivedData | None
    compressed_kv: CompressedKVCache | None
    features: "tuple[Feature, ...]"

    @property
    def max_requests(self) -> int:
        """Maximum number of running requests."""

    def feature(self, kind: type[FeatureType]) -> FeatureType | None:
        """The feature of this class; None if no flag enables it."""

    def method_of(self, req: Req) -> CompressionMethod | None:
        """The compression method of a waiting request; None if it is served with full KV."""


# Name of a metric after "sglang_ext:", its value, and the value of its label if it has one.
MetricValue = tuple[str, float] | tuple[str, float, str]


class Feature:
    """Base of the features. The worker calls the methods in the order of their definition. The defaults do nothing.

    It calls :meth:`planned_bytes` before SGLang sizes its pool, :meth:`on_graphs_captured` after SGLang captured its graphs, :meth:`selector`
    and :meth:`full_kv_provider` once the prefix tree exists, before the first forward. ``gauges`` and ``counters`` are metrics that the
    feature adds: help text, then the name of a label and its known values if there is one.
    """

    gauges: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, args: KVServerArgs) -> None:
        self.args = args

    def planned_bytes(self, planner: MemoryPlanner, requests: int, tokens: int, rings: int) -> dict[str, int]:
        """Bytes on the device outside SGLang's pool, by field of :class:`MemoryPlan`, for at most ``requests`` running requests.

        ``tokens``: of SGLang's pool. ``rings``: number of query rings. A ring stores the newest queries of one request.
        """
        return {}

    def on_graphs_captured(self, worker: Worker) -> None:
        """Prepare for the first request, once SGLang created the pool, backends and graphs. An exception stops the server."""

    def selector(self, worker: Worker, method: CompressionMethod) -> "AsyncSelector | None":
        """Create the object that selects tokens while steps run; None for none. Methods that select in steps are served alone."""
        return None

    def full_kv_provider(self, worker: Worker, tree_cache: TieredRadixCache) -> FullKVProvider | None:
        """Create the full-KV provider; None to keep full KV on the device."""

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Current values of :attr:`gauges`, and totals of :attr:`counters`."""
        yield from ()


def _uses_quantized_attention(args: KVServerArgs) -> bool:
    """Whether full KV is freed once quantized blocks hold all tokens, or prompts attend to quantized KV."""
    if args.kv_prefill == options.QUANTIZED:
        return True
    frees = args.kv_mode == "lossy" and options.why_full_kv_stays(args) is None
    return frees and any(offer.quant_method for offer in offered_methods(args))


# Dotted name of each class, and whether the server's arguments, as SGLang resolved them, enable it.
FEATURES: dict[str, Callable[[KVServerArgs], bool]] = {
    "sglang_ext.managers.kv_transfer.feature.KVTransfer": options.has_progressive_transfer,
    "sglang_ext.managers.kv_offload.feature.HostOffload": lambda args: bool(args.kv_host_gb),
    "sglang_ext.managers.prefix_storage.PrefixStorage": options.has_prefix_store,
    "sglang_ext.managers.quantized_attention.QuantizedAttention": _uses_quantized_attention,
    "sglang_ext.managers.cache_rank.feature.CacheRanks": lambda args: bool(args.kv_cache_ranks),
    "sglang_ext.managers.sparse_attention.SparseAttention": selection_options.has_selector,
}


def load_features(args: KVServerArgs) -> tuple[Feature, ...]:
    """Import and create the features that a server's arguments enable, in the order of :data:`FEATURES`."""
    return tuple(pkgutil.resolve_name(name)(args) for name, is_enabled in FEATURES.items() if is_enabled(args))


def create_selector(worker: Worker, method: CompressionMethod) -> "AsyncSelector | None":
    """Create the selector of the first feature that has one. ``method``: the server's first compression method."""
    selectors = (feature.selector(worker, method) for feature in worker.features)
    return next((selector for selector in selectors if selector is not None), None)


def create_full_kv_provider(worker: Worker, tree_cache: TieredRadixCache) -> FullKVProvider:
    """Create the full-KV provider of a server. At most one feature has one; without any, full KV stays on the device."""
    created = [feature.full_kv_provider(worker, tree_cache) for feature in worker.features]
    providers = [provider for provider in created if provider is not None]
    assert len(providers) <= 1, f"two features provide full KV: {providers}"
    return providers[0] if providers else FullKVProvider()
