"""Starts the cache ranks of an inference rank on a GPU, each on a GPU of its own after that, and says what they are told."""

import logging
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from sglang_ext.config import selection_options
from sglang_ext.core import OptionError
from sglang_ext.managers.cache_rank.rank_link import RankLink, RankSettings
from sglang_ext.managers.cache_rank.on_gpu.exchange_buffer import ExchangeBuffer, ExchangeLayout
from sglang_ext.managers.cache_rank.on_gpu.gpu_client import GpuRankClient
from sglang_ext.managers.cache_rank.process import RankProcess
from sglang_ext.managers.cache_rank.protocol import BLOCK, MAX_PLACES, Attach, BufferShape
from sglang_ext.managers.cache_rank.launch import build_attach, wait_until_ready
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

# Of the memory that is free on a rank's GPU at start, what it holds at most where no flag says: of its own, and of the model's. Beside that
# it has a context, kernels, and what it chooses in.
OWN_SHARE, SHARED_SHARE, BESIDE_BYTES = 0.9, 0.5, 2 << 30
# Where rows travel: memory of an arena through which full KV goes to its rank, and the least share of what heads keep for whose rows an
# answer has room, so that a selection of which no token is left is there after so many answers.
TRAVELING_BYTES, LEAST_FRESH = 384 << 20, 16
# A rank on a GPU says nothing while a kernel is compiled for sizes that it has not seen.
SILENCE_SECONDS = 10.0


def start_gpu_cache_ranks(
    args: "KVServerArgs", method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows, query_heads: int,
    rotary: Rotary, requests: int,
) -> GpuRankClient:  # fmt: skip
    """Start them, and wait until they are ready; one that is not by then is told in the log, and used once it is.

    Args:
        args: the server's.
        method: that makes copies of what they choose.
        token_table: int32, SGLang's with the draft rows.
        buffers: the layers of SGLang's pool.
        queries: the newest queries of each request.
        query_heads: of this inference rank.
        rotary: the model's.
        requests: that run at once.

    Raises:
        ExchangeBufferError: a GPU cannot read this one's memory.
        OptionError: rows of this model cannot be sent.
    """
    device, gpus = token_table.device, selection_options.cache_rank_gpus(args)
    rows, room = selection_options.has_remote_values(args), None
    if rows:
        check_value_layout(buffers)
        room = min(rank_capacity_bytes(gpu, device.index) for gpu in gpus)
    told = build_attach(args, method, buffers, query_heads, rotary, requests, room)
    if rows:
        check_capacity(args, told.blocks * BLOCK, gpus)
    told = msgspec.structs.replace(told, shape=fit_shape(told.shape, selection_options.exchange_buffer_bytes(args)))
    arenas = [ExchangeBuffer(told.shape, device, f"cuda:{gpu}") for gpu in gpus]
    links = [connect_rank(told, arena) for arena in arenas]
    logger.info(
        "sglang-ext: cache ranks on GPU %s, beside the model on GPU %d; arenas of %.0f MB each, for %d requests at once",
        ", ".join(map(str, gpus)), device.index, ExchangeLayout.from_shape(told.shape).size / 1e6, told.shape.lanes,
    )  # fmt: skip
    warn_if_few_lanes(told.shape.lanes * len(gpus), requests)
    if rows:
        logger.info(
            "sglang-ext: each has room for full KV of %d tokens, by whose keys in %d bits it chooses, and sends %d new ones of %d that a head "
            "keeps in a step at most",
            told.blocks * BLOCK, told.bits, told.shape.fresh, told.shape.most,
        )  # fmt: skip
    wait_until_ready(links, "requests read what was chosen when their copies were made until one is")
    return GpuRankClient(links, arenas, method, token_table, buffers, queries)


def connect_rank(told: Attach, arena: ExchangeBuffer, silence: float = SILENCE_SECONDS) -> RankLink:
    """To a rank that is told so much, and where its arena is; all layers of a step are one question."""
    apart = told.apart or arena.device != torch.device(arena.rank_device)
    settings = RankSettings(msgspec.structs.replace(told, arena=arena.handle, apart=apart), told.shape.layers, 1, silence)
    return RankLink(settings, partial(RankProcess, arena=arena))


def fit_shape(shape: BufferShape, size: int) -> BufferShape:
    """With as many lanes as an arena of so many bytes has, one at least; where rows travel with as many as these leave room for."""
    def most_of(name: str, least: int, most: int) -> BufferShape:
        def bytes_of(number: int) -> int:
            return ExchangeLayout.from_shape(msgspec.structs.replace(shape, **{name: number})).size

        fit = bisect_right(range(least, most + 1), size, key=bytes_of)
        return msgspec.structs.replace(shape, **{name: least + max(0, fit - 1)})

    if shape.rows:
        of_values = 2 * shape.layers * BLOCK * shape.kv_heads * shape.dim * getattr(torch, shape.dtype).itemsize
        places = min(MAX_PLACES, max(1, min(TRAVELING_BYTES, size // 4) // of_values))
        shape = msgspec.structs.replace(shape, places=places)
        shape = most_of("fresh", -(-shape.most // LEAST_FRESH), shape.most)
    return most_of("lanes", 1, shape.lanes)


def warn_if_few_lanes(lanes: int, requests: int) -> None:
    """Say where ranks cannot be asked for all ``requests`` that run at once, but for so many ``lanes``."""
    if lanes < requests:
        logger.warning(
            "sglang-ext: arenas of cache ranks have room for %d requests, of %d that run at once at most; others read what was chosen when "
            "their copies were made (no-lane among missed selections): pass --max-running-requests %d, or for more a lower --kv-select, "
            "a shorter --context-length, or more --kv-cache-ranks",
            lanes, requests, lanes,
        )  # fmt: skip


def rank_capacity_bytes(gpu: int, of_model: int) -> int:
    """Bytes of full KV that a rank on a GPU holds at most, where no flag says."""
    free = torch.cuda.get_device_properties(gpu).total_memory - torch.cuda.device_memory_used(gpu)
    return int(free * (SHARED_SHARE if gpu == of_model else OWN_SHARE)) - BESIDE_BYTES


def check_capacity(args: "KVServerArgs", tokens: int, gpus: list[int]) -> None:
    """Refuse ranks that have no room for full KV of the shortest request that goes there.

    Raises:
        OptionError: says for how many tokens they have.
    """
    least = args.kv_sparse_from + BLOCK
    if tokens < least:
        raise OptionError(
            f"cache ranks on GPU {', '.join(map(str, gpus))} have room for full KV of {tokens} tokens, and the shortest request that goes "
            f"there has {least} (--kv-sparse-from, and a block): let GPUs have more free memory, name others by --kv-cache-rank-gpu, pass "
            "--kv-cache-rank-gb, or --kv-cache-ranks 0"
        )


def check_value_layout(buffers: KVBuffers) -> None:
    """Refuse a model whose values are of other sizes than its keys, which travel as these do.

    Raises:
        OptionError: names both.
    """
    keys, values = buffers.keys[0], buffers.values[0]
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise OptionError(
            f"a token's keys are {tuple(keys.shape[1:])} of {keys.dtype} and its values {tuple(values.shape[1:])} of {values.dtype}; "
            "--kv-cache-ranks beside a GPU sends both alike in --kv-mode lossy: pass --kv-cache-ranks 0, or --kv-mode verified"
        )
