"""Starts the cache ranks of an inference rank from the server's flags, and builds their configuration."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_ext.config import options, selection_options
from sglang_ext.managers.cache_rank.cpu_client import CpuRankClient
from sglang_ext.managers.cache_rank.rank_link import START_SECONDS, RankLink, RankSettings
from sglang_ext.managers.cache_rank.protocol import (
    BLOCK, MOST_BLOCKS, MAX_LANES, MAX_PLACES, VERSION, Attach, BufferShape, RotaryParameters,
)  # fmt: skip
from sglang_ext.managers.cache_rank.timeline import PackTimeline
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

# Bytes of staging slots for keys and values, and the minimum number of slots.
TRAVELING_BYTES, LEAST_PLACES = 64 << 20, 4
# Share of the free memory at start that all ranks use at most, if no flag sets it.
FREE_SHARE = 0.5


def start_cache_ranks(
    args: "KVServerArgs", method: CompressionMethod, buffers: KVBuffers, query_heads: int, rotary: Rotary, requests: int
) -> CpuRankClient:
    """Start the cache ranks and wait until they are ready. A rank that is not ready in time is logged, and used once it is ready.

    Args:
        args: The server's arguments.
        method: Creates compressed KV from the selections.
        buffers: Layers of SGLang's KV pool.
        query_heads: Query heads of this inference rank.
        rotary: The model's rotary embedding.
        requests: Maximum concurrent requests.
    """
    settings = RankSettings(
        build_attach(args, method, buffers, query_heads, rotary, requests),
        pack=0 if args.kv_pack_layers == "auto" else args.kv_pack_layers,
        threads=max(1, len(os.sched_getaffinity(0)) // (1 + args.kv_cache_ranks)),
    )
    links = [RankLink(settings) for _ in range(args.kv_cache_ranks)]
    # A timeline file holds events of one kind.
    told = None if options.has_progressive_transfer(args) else args.kv_bench_timeline
    timeline = None if told is None else PackTimeline(told)
    choices = CpuRankClient(links, buffers, timeline)
    wait_until_ready(links, "requests read their full KV until one is ready")
    return choices


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
    """Return the first message to the ranks.

    Args:
        room: Free bytes of each rank on a GPU; None on a CPU. The other arguments are those of :func:`start_cache_ranks`.
    """
    keys, context, spade = buffers.keys[0], args.get_model_config().context_len, selection_options.spade(args)
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
        lanes=min(requests, MAX_LANES),
        most=max(1, most),
        places=min(MAX_PLACES, max(LEAST_PLACES, math.ceil(TRAVELING_BYTES / block_bytes))),
        rows=held.rows,
    )
    return Attach(
        version=VERSION,
        epoch=1,
        shape=shape,
        blocks=min(blocks, MOST_BLOCKS),
        scaling=buffers.scaling,
        predictor=spade.predictor.name,
        sinks=spade.sinks,
        recent=spade.recent,
        turning=RotaryParameters(tuple(rotary.frequencies.tolist()), rotary.interleaved),
        bits=bits,
    )
