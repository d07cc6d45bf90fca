"""Starts the cache ranks of an inference rank, as the flags ask for them, and says what they are told."""

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
from sglang_ext.managers.cache_rank.protocol import BLOCK, MOST_BLOCKS, MAX_LANES, MAX_PLACES, VERSION, Attach, BufferShape, RotaryParameters
from sglang_ext.managers.cache_rank.timeline import PackTimeline
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, KeySpec

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

# Memory through which keys and values go to a rank: so much, but for a few blocks at least.
TRAVELING_BYTES, LEAST_PLACES = 64 << 20, 4
# Of the memory that is free at start, what all ranks hold at most where no flag says.
FREE_SHARE = 0.5


def start_cache_ranks(
    args: "KVServerArgs", method: CompressionMethod, buffers: KVBuffers, query_heads: int, rotary: Rotary, requests: int
) -> CpuRankClient:
    """Start them, and wait until they are ready; one that is not by then is told in the log, and used once it is.

    Args:
        args: the server's.
        method: that makes copies of what they choose.
        buffers: the layers of SGLang's pool.
        query_heads: of this inference rank.
        rotary: the model's.
        requests: that run at once.
    """
    settings = RankSettings(
        build_attach(args, method, buffers, query_heads, rotary, requests),
        pack=0 if args.kv_pack_layers == "auto" else args.kv_pack_layers,
        threads=max(1, len(os.sched_getaffinity(0)) // (1 + args.kv_cache_ranks)),
    )
    links = [RankLink(settings) for _ in range(args.kv_cache_ranks)]
    # A file has events of one kind.
    told = None if options.has_progressive_transfer(args) else args.kv_bench_timeline
    timeline = None if told is None else PackTimeline(told)
    choices = CpuRankClient(links, buffers, timeline)
    wait_until_ready(links, "requests are read whole until one is")
    return choices


def wait_until_ready(links: Sequence[RankLink], otherwise: str) -> None:
    """Start the processes; where not all can be asked after a while, say so in the log, and what becomes of requests ``otherwise``."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and not all(link.has_given_up or link.ready for link in links):
        for link in links:
            link.poll()
            link.wait(0.05)
    ready = sum(link.ready for link in links)
    if ready < len(links):
        logger.error("sglang-ext: %d of %d cache ranks are ready: %s", ready, len(links), otherwise)


def build_attach(
    args: "KVServerArgs", method: CompressionMethod, buffers: KVBuffers, query_heads: int, rotary: Rotary, requests: int, room: int | None = None
) -> Attach:
    """What ranks are told; arguments as :func:`start_cache_ranks`'s, and how many bytes each has ``room`` for, on a GPU."""
    keys, context, spade = buffers.keys[0], args.get_model_config().context_len, selection_options.spade(args)
    slots, kv_heads, dim = keys.shape
    longest, bits = min(context, slots), selection_options.score_bits(args)
    most = method.kept(longest // method.unit * method.unit)
    held = KeySpec(len(buffers.keys), kv_heads, dim, keys.dtype, bits, selection_options.has_remote_values(args))
    block_bytes = BLOCK * replace(held, bits=EXACT).token_bytes
    blocks = slots // BLOCK + requests
    if args.kv_cache_rank_gb is not None:
        blocks = int(args.kv_cache_rank_gb * 1e9) // (BLOCK * held.token_bytes)
    elif held.rows:
        # Of as many contexts as the pool holds copies.
        most_blocks = slots // max(1, most) * -(-longest // BLOCK) // args.kv_cache_ranks + requests
        free = AvailableMemory.find().available * FREE_SHARE / args.kv_cache_ranks if room is None else room
        fits = min(most_blocks, int(free) // (BLOCK * held.token_bytes))
        # Of a GPU's memory all is taken at once.
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
