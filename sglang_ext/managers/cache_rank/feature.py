"""Cache ranks: processes that hold keys, in mode lossy also values, and select tokens for steps (``--kv-cache-ranks``).

:class:`CacheRanks` is what the worker needs. It starts the ranks from the server's flags: on a GPU each rank is on a GPU; on a CPU each is a
process on some cores.
"""

import logging
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from sglang_ext.config import options, selection_options
from sglang_ext.core import OptionError
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.client import MISSES, CacheRankClient
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.layerwise_client import LayerwiseClient, PackTimeline
from sglang_ext.managers.cache_rank.protocol import BLOCK, Attach, BufferShape, ExchangeLayout, RotaryParameters
from sglang_ext.managers.cache_rank.rank_link import START_SECONDS, RankLink
from sglang_ext.managers.cache_rank.stepwise_client import StepwiseClient
from sglang_ext.managers.feature import Feature, MetricValue, Worker
from sglang_ext.managers.spec_decode.round_setup import FullKVProvider
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.policy import max_tail
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory
from sglang_ext.mem_cache.prefix_cache.remote_only import RemoteOnlyKV
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec

if TYPE_CHECKING:
    from sglang_ext.config.rules import KVServerArgs
    from sglang_ext.managers.memory_plan import MemoryPlanner
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)

# On a CPU: bytes of staging slots for keys and values, and the minimum number of slots.
STAGING_BYTES, LEAST_PLACES = 64 << 20, 4
# Share of the free host memory at start that all ranks use at most, if no flag sets it.
FREE_SHARE = 0.5
# Share of the free memory at start that a rank uses at most if no flag sets it: on its own GPU, and on the model's GPU. The remaining
# bytes are for its context, kernels, and the selection's scratch memory.
OWN_SHARE, SHARED_SHARE, BESIDE_BYTES = 0.9, 0.5, 2 << 30
# If rows are sent: bytes of an exchange buffer for full KV that is sent to the rank. One reply can hold at least 1/LEAST_FRESH of the kept
# rows, so LEAST_FRESH replies can replace a whole selection.
TRAVELING_BYTES, LEAST_FRESH = 384 << 20, 16
# A rank on a GPU sends no heartbeat while a kernel is compiled for new sizes.
GPU_SILENCE_SECONDS = 10.0


def wait_until_ready(links: Sequence[RankLink], otherwise: str) -> None:
    """Start the processes and wait. If some are not ready in time, log an error with ``otherwise``, the consequence for requests."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and not all(link.has_given_up or link.ready for link in links):
        for link in links:
            link.poll()
            link.wait(0.05)
    ready = sum(link.ready for link in links)
    if ready < len(links):
        logger.error("sglang-ext: %d of %d cache ranks are ready: %s", ready, len(links), otherwise)


def build_attach(
    args: "KVServerArgs", method: CompressionMethod, buffers: KVBuffers, query_heads: int, rotary: Rotary, requests: int,
    room: int | None = None,
) -> Attach:  # fmt: skip
    """Return the first message to the ranks of an inference rank with ``query_heads``.

    ``requests``: maximum concurrent requests. ``room``: free bytes of each rank on a GPU; None on a CPU.
    """
    keys, context, spade = buffers.keys[0], args.get_model_config().context_len, selection_options.step_method(args)
    slots, kv_heads, dim = keys.shape
    longest, bits = min(context, slots), selection_options.score_bits(args)
    most = method.num_kept(longest // method.unit * method.unit)
    held = KeySpec(len(buffers.keys), kv_heads, dim, keys.dtype, bits, selection_options.has_remote_values(args))
    block_bytes = BLOCK * replace(held, bits=EXACT).token_bytes
    blocks = slots // BLOCK + requests
    if args.kv_cache_rank_gb is not None:
        blocks = int(args.kv_cache_rank_gb * 1e9) // (BLOCK * held.token_bytes)
    elif held.rows:
        # Enough blocks for as many contexts as the pool holds compressed KV.
        most_blocks = slots // max(1, most) * -(-longest // BLOCK) // args.kv_cache_ranks + requests
        free = AvailableMemory.find().available * FREE_SHARE / args.kv_cache_ranks if room is None else room
        fits = min(most_blocks, int(free) // (BLOCK * held.token_bytes))
        # A rank on a GPU allocates all its blocks at start.
        blocks = max(blocks, fits) if room is None else max(1, fits)
    shape = BufferShape(
        layers=len(buffers.keys),
        query_heads=query_heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=str(keys.dtype).removeprefix("torch."),
        window=spade.window,
        lanes=min(requests, protocol.MAX_LANES),
        most=max(1, most),
        places=min(protocol.MAX_PLACES, max(LEAST_PLACES, math.ceil(STAGING_BYTES / block_bytes))),
        rows=held.rows,
    )
    return Attach(
        version=protocol.VERSION,
        epoch=1,
        shape=shape,
        blocks=min(blocks, protocol.MOST_BLOCKS),
        scaling=buffers.scaling,
        predictor=spade.predictor.name,
        sinks=spade.sinks,
        recent=spade.recent,
        turning=RotaryParameters(tuple(rotary.frequencies.tolist()), rotary.interleaved),
        bits=bits,
    )


def connect_cpu_ranks(args: "KVServerArgs", told: Attach, device: torch.device) -> list[RankLink]:
    """Return the connections to ranks on CPU cores."""
    # Each layer may be a pack of its own, and a reply may carry all rows. Memory is used as it is written.
    told = msgspec.structs.replace(told, shape=msgspec.structs.replace(told.shape, packs=told.shape.layers, fresh=told.shape.most * told.shape.rows))
    pack = 0 if args.kv_pack_layers == "auto" else args.kv_pack_layers
    threads = max(1, len(os.sched_getaffinity(0)) // (1 + args.kv_cache_ranks))
    return [RankLink(told, ExchangeBuffer(told.shape, device, "cpu"), pack=pack, threads=threads) for _ in range(args.kv_cache_ranks)]


def connect_gpu_ranks(
    args: "KVServerArgs", attach: Callable[[int | None], Attach], buffers: KVBuffers, requests: int, device: torch.device
) -> list[RankLink]:
    """Return the connections to ranks on GPUs, whose exchange buffers are on ``device``. ``attach`` is :func:`build_attach` of the room."""
    gpus, rows, room = selection_options.cache_rank_gpus(args), selection_options.has_remote_values(args), None
    if rows:
        check_value_layout(buffers)
        room = min(rank_capacity_bytes(gpu, device.index) for gpu in gpus)
    told = attach(room)
    if rows:
        check_capacity(args, told.blocks * BLOCK, gpus)
    told = msgspec.structs.replace(told, shape=fit_shape(told.shape, selection_options.exchange_buffer_bytes(args)))
    links = [RankLink(told, ExchangeBuffer(told.shape, device, f"cuda:{gpu}"), GPU_SILENCE_SECONDS) for gpu in gpus]
    logger.info(
        "sglang-ext: cache ranks on GPU %s, the model on GPU %d; exchange buffers of %.0f MB each, for %d concurrent requests",
        ", ".join(map(str, gpus)), device.index, ExchangeLayout(told.shape).size / 1e6, told.shape.lanes,
    )  # fmt: skip
    warn_if_few_lanes(told.shape.lanes * len(gpus), requests)
    if rows:
        logger.info(
            "sglang-ext: each rank holds the full KV of up to %d tokens, selects by keys of %d bits, and sends at most %d new rows of "
            "the %d that a head keeps in a step",
            told.blocks * BLOCK, told.bits, told.shape.fresh, told.shape.most,
        )  # fmt: skip
    return links


def fit_shape(shape: BufferShape, size: int) -> BufferShape:
    """Return the shape with as many lanes, at least one, as fit into ``size`` bytes of exchange buffer. With rows, also fit staging slots
    and fresh rows."""

    def most_of(name: str, least: int, most: int) -> BufferShape:
        def bytes_of(number: int) -> int:
            return ExchangeLayout(msgspec.structs.replace(shape, **{name: number})).size

        fit = bisect_right(range(least, most + 1), size, key=bytes_of)
        return msgspec.structs.replace(shape, **{name: least + max(0, fit - 1)})

    if shape.rows:
        of_values = 2 * shape.layers * BLOCK * shape.kv_heads * shape.dim * getattr(torch, shape.dtype).itemsize
        places = min(protocol.MAX_PLACES, max(1, min(TRAVELING_BYTES, size // 4) // of_values))
        shape = msgspec.structs.replace(shape, places=places)
        shape = most_of("fresh", -(-shape.most // LEAST_FRESH), shape.most)
    return most_of("lanes", 1, shape.lanes)


def warn_if_few_lanes(lanes: int, requests: int) -> None:
    """Log a warning if the ranks have fewer ``lanes`` than concurrent ``requests``."""
    if lanes < requests:
        logger.warning(
            "sglang-ext: exchange buffers of cache ranks have lanes for %d of up to %d concurrent requests; the others read the selection "
            "made with their compressed KV (no-lane among missed selections): pass --max-running-requests %d, or for more a lower "
            "--kv-select, a shorter --context-length, or more --kv-cache-ranks",
            lanes, requests, lanes,
        )  # fmt: skip


def rank_capacity_bytes(gpu: int, of_model: int) -> int:
    """Maximum bytes of full KV at a rank on a GPU, if no flag sets it."""
    free = torch.cuda.get_device_properties(gpu).total_memory - torch.cuda.device_memory_used(gpu)
    return int(free * (SHARED_SHARE if gpu == of_model else OWN_SHARE)) - BESIDE_BYTES


def check_capacity(args: "KVServerArgs", tokens: int, gpus: list[int]) -> None:
    """Raise :class:`OptionError` if ranks with so many ``tokens`` cannot hold the full KV of the shortest request sent there."""
    least = args.kv_sparse_from + BLOCK
    if tokens < least:
        raise OptionError(
            f"cache ranks on GPU {', '.join(map(str, gpus))} have room for full KV of {tokens} tokens, and the shortest request that goes "
            f"there has {least} (--kv-sparse-from plus one block): free GPU memory, select other GPUs with --kv-cache-rank-gpu, pass "
            "--kv-cache-rank-gb, or --kv-cache-ranks 0"
        )


def check_value_layout(buffers: KVBuffers) -> None:
    """Raise :class:`OptionError` if the model's values differ from its keys in size or dtype, because both are sent alike."""
    keys, values = buffers.keys[0], buffers.values[0]
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise OptionError(
            f"a token's keys are {tuple(keys.shape[1:])} of {keys.dtype} and its values {tuple(values.shape[1:])} of {values.dtype}; "
            "--kv-cache-ranks beside a GPU sends both alike in --kv-mode lossy: pass --kv-cache-ranks 0, or --kv-mode verified"
        )


class CacheRanks(Feature):
    """Starts the cache ranks, and frees full KV that they hold. Does nothing if the server's method uses no ranks."""

    gauges = {
        "cache_ranks_ready": ("Cache ranks that accept requests.",),
        "cache_rank_tokens": ("Tokens whose keys are stored in blocks at cache ranks.",),
        "rank_alone_tokens": ("Tokens of running requests with remote-only KV: only cache ranks hold their full KV.",),
        "selection_steps": ("Steps between two selections of a request: more than requested if cache ranks on GPUs cannot keep up.",),
        "choosing_seconds": ("Seconds that a cache rank took to select the tokens of the last pack of layers; of the slowest rank.",),
    }
    counters = {
        "cache_rank_starts": ("Processes of cache ranks that were started.",),
        "missed_selections": ("Steps, and rounds on full KV, without a selection in time, by reason.", "reason", *MISSES),
        "selections": ("Selections of cache ranks that were applied to compressed KV, each of a request in all layers.",),
        "selection_wait_seconds": ("Seconds that steps waited for selected tokens.",),
        "selection_rows": ("Rows of K and V received from cache ranks, each of a token, layer and KV head.",),
    }
    _client: CacheRankClient | None = None

    def planned_bytes(self, planner: "MemoryPlanner", requests: int, tokens: int, rings: int) -> dict[str, int]:
        """The exchange buffers. If ranks send rows, also records of compressed KV: a number per token of the pool, layer and KV head."""
        if not planner.on_gpu:
            return {}
        records = 4 * tokens * planner.model.layers * planner.model.kv_heads if selection_options.has_remote_values(self.args) else 0
        return {"exchange_buffers": selection_options.exchange_buffer_bytes(self.args) * selection_options.num_cache_ranks(self.args) + records}

    def selector(self, worker: Worker, method: CompressionMethod) -> CacheRankClient | None:
        """Start the cache ranks, wait until they are ready, and create their client. A rank that is not ready in time is used once it is.

        Raises:
            ExchangeBufferError: A GPU cannot read this GPU's memory, or the system has too little shared memory.
            OptionError: Rows of this model cannot be sent.
        """
        args = self.args
        if not selection_options.num_cache_ranks(args):
            return None
        table, requests = worker.req_to_token_pool.req_to_token, worker.max_requests
        attach = partial(build_attach, args, method, worker.buffers, worker.memory.model.query_heads, worker.methods.rotary, requests)
        given = method, table, worker.buffers, worker.queries
        if selection_options.has_gpu_ranks(args):
            links = connect_gpu_ranks(args, attach, worker.buffers, requests, table.device)
            wait_until_ready(links, "until one is ready, requests read the selection made with their compressed KV")
            self._client = StepwiseClient(links, *given)
        else:
            links = connect_cpu_ranks(args, attach(), table.device)
            wait_until_ready(links, "requests read their full KV until one is ready")
            # A timeline file holds events of one kind.
            file = None if options.has_progressive_transfer(args) else args.kv_bench_timeline
            client = self._client = LayerwiseClient(links, *given)
            client.timeline = PackTimeline(file)
        return self._client

    def full_kv_provider(self, worker: Worker, tree_cache: "TieredRadixCache") -> FullKVProvider | None:
        """Create the provider that frees full KV in mode lossy. None if full KV stays."""
        compressed_kv = worker.compressed_kv
        stays = options.why_full_kv_stays(self.args) is not None or self.args.disaggregation_mode != "null"
        if stays or compressed_kv.row_sender is None:
            return None
        method, most = compressed_kv.methods[0], selection_options.max_selected_tokens(self.args)
        takes = f"slots of {most} tokens" if most else f"about {method.share:.2f} of the full KV's slots"
        logger.info("sglang-ext: full KV is freed once a cache rank has it; compressed KV takes %s, plus slots for the newest tokens", takes)
        tail = max_tail(method, compressed_kv.allocator.page_size, worker.memory.model.context)
        return FullKVProvider(RemoteOnlyKV(tree_cache.nodes, compressed_kv, compressed_kv.row_sender, worker.method_of, tail))

    def metrics(self, worker: Worker) -> Iterator[MetricValue]:
        """Values of the ranks; none if no ranks were started."""
        if self._client is not None:
            freed_full_kv = worker.compressed_kv.tree_cache.freed_full_kv
            yield from rank_values(self._client, freed_full_kv if isinstance(freed_full_kv, RemoteOnlyKV) else None)


def rank_values(client: CacheRankClient, remote_only: RemoteOnlyKV | None) -> Iterator[MetricValue]:
    """Values of the metrics of cache ranks. ``remote_only``: the full KV that was freed; None if full KV stays."""
    ready, starts = client.processes
    yield "cache_ranks_ready", ready
    yield "cache_rank_tokens", client.held_tokens
    yield "choosing_seconds", max(link.seconds for link in client.links)
    yield "selection_steps", client.interval
    yield "cache_rank_starts", starts
    yield "selections", client.taken
    yield "selection_wait_seconds", client.waited
    yield "selection_rows", client.rows
    if remote_only is not None:
        yield "rank_alone_tokens", remote_only.tokens
    for reason, count in client.missed.items():
        yield "missed_selections", count, reason
