"""Starts the cache ranks of an inference rank on a GPU, each on one GPU, and builds their configuration."""

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

# Share of the free memory at start that a rank uses at most if no flag sets it: on its own GPU, and on the model's GPU. The remaining
# bytes are for its context, kernels, and the selection's scratch memory.
OWN_SHARE, SHARED_SHARE, BESIDE_BYTES = 0.9, 0.5, 2 << 30
# If rows are sent: bytes of an exchange buffer for full KV that is sent to the rank. One reply can hold at least 1/LEAST_FRESH of the kept
# rows, so LEAST_FRESH replies can replace a whole selection.
TRAVELING_BYTES, LEAST_FRESH = 384 << 20, 16
# A rank on a GPU sends no heartbeat while a kernel is compiled for new sizes.
SILENCE_SECONDS = 10.0


def start_gpu_cache_ranks(
    args: "KVServerArgs", method: CompressionMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows, query_heads: int,
    rotary: Rotary, requests: int,
) -> GpuRankClient:  # fmt: skip
    """Start the cache ranks and wait until they are ready. A rank that is not ready in time is logged, and used once it is ready.

    Args:
        args: The server's arguments.
        method: Creates compressed KV from the selections.
        token_table: int32, SGLang's token table with the draft rows.
        buffers: Layers of SGLang's KV pool.
        queries: Newest queries of each request.
        query_heads: Query heads of this inference rank.
        rotary: The model's rotary embedding.
        requests: Maximum concurrent requests.

    Raises:
        ExchangeBufferError: A GPU cannot read this GPU's memory.
        OptionError: Rows of this model cannot be sent.
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
    exchange_buffers = [ExchangeBuffer(told.shape, device, f"cuda:{gpu}") for gpu in gpus]
    links = [connect_rank(told, exchange_buffer) for exchange_buffer in exchange_buffers]
    logger.info(
        "sglang-ext: cache ranks on GPU %s, the model on GPU %d; exchange buffers of %.0f MB each, for %d concurrent requests",
        ", ".join(map(str, gpus)), device.index, ExchangeLayout.from_shape(told.shape).size / 1e6, told.shape.lanes,
    )  # fmt: skip
    warn_if_few_lanes(told.shape.lanes * len(gpus), requests)
    if rows:
        logger.info(
            "sglang-ext: each rank holds the full KV of up to %d tokens, selects by keys of %d bits, and sends at most %d new rows of "
            "the %d that a head keeps in a step",
            told.blocks * BLOCK, told.bits, told.shape.fresh, told.shape.most,
        )  # fmt: skip
    wait_until_ready(links, "until one is ready, requests read the selection made with their compressed KV")
    return GpuRankClient(links, exchange_buffers, method, token_table, buffers, queries)


def connect_rank(told: Attach, exchange_buffer: ExchangeBuffer, silence: float = SILENCE_SECONDS) -> RankLink:
    """Return the connection to a rank with this configuration and exchange buffer. One selection request covers all layers of a step."""
    apart = told.apart or exchange_buffer.device != torch.device(exchange_buffer.rank_device)
    settings = RankSettings(msgspec.structs.replace(told, arena=exchange_buffer.handle, apart=apart), told.shape.layers, 1, silence)
    return RankLink(settings, partial(RankProcess, exchange_buffer=exchange_buffer))


def fit_shape(shape: BufferShape, size: int) -> BufferShape:
    """Return the shape with as many lanes, at least one, as fit into ``size`` bytes of exchange buffer. With rows, also fit staging slots
    and fresh rows."""
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
    """Refuse ranks that cannot hold the full KV of the shortest request sent there.

    Raises:
        OptionError: States the number of tokens that they can hold.
    """
    least = args.kv_sparse_from + BLOCK
    if tokens < least:
        raise OptionError(
            f"cache ranks on GPU {', '.join(map(str, gpus))} have room for full KV of {tokens} tokens, and the shortest request that goes "
            f"there has {least} (--kv-sparse-from plus one block): free GPU memory, select other GPUs with --kv-cache-rank-gpu, pass "
            "--kv-cache-rank-gb, or --kv-cache-ranks 0"
        )


def check_value_layout(buffers: KVBuffers) -> None:
    """Refuse a model whose values differ from its keys in size or dtype, because both are sent alike.

    Raises:
        OptionError: Names both.
    """
    keys, values = buffers.keys[0], buffers.values[0]
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise OptionError(
            f"a token's keys are {tuple(keys.shape[1:])} of {keys.dtype} and its values {tuple(values.shape[1:])} of {values.dtype}; "
            "--kv-cache-ranks beside a GPU sends both alike in --kv-mode lossy: pass --kv-cache-ranks 0, or --kv-mode verified"
        )
