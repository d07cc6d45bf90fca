"""Starts the cache ranks of an inference rank on a GPU, each on a GPU of its own after that, and says what they are told."""

import logging
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from sglang_ext.config import selection_options
from sglang_ext.managers.cache_rank.link import RankLink, RankSettings
from sglang_ext.managers.cache_rank.on_gpu.arena import Arena, ArenaLayout
from sglang_ext.managers.cache_rank.on_gpu.rank_steps import RankSteps
from sglang_ext.managers.cache_rank.process import RankProcess
from sglang_ext.managers.cache_rank.protocol import Attach, Shape
from sglang_ext.managers.cache_rank.start import attach_of, wait_until_ready
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.query_window import QueryWindows
from sglang_ext.mem_cache.compressed.rotary import Rotary

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)

# A rank on a GPU says nothing while a kernel is compiled for sizes that it has not seen.
SILENCE_SECONDS = 10.0


def rank_steps(
    args: "KVServerArgs", method: CopyMethod, token_table: torch.Tensor, buffers: KVBuffers, queries: QueryWindows, query_heads: int,
    rotary: Rotary, requests: int,
) -> RankSteps:  # fmt: skip
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
        ArenaError: a GPU cannot read this one's memory.
    """
    told = attach_of(args, method, buffers, query_heads, rotary, requests)
    told = msgspec.structs.replace(told, shape=fitting(told.shape, selection_options.ARENA_BYTES))
    device, gpus = token_table.device, selection_options.rank_gpus(args)
    arenas = [Arena(told.shape, device, f"cuda:{gpu}") for gpu in gpus]
    links = [linked(told, arena) for arena in arenas]
    logger.info(
        "sglang-ext: cache ranks on GPU %s, beside the model on GPU %d; arenas of %.0f MB each, for %d requests at once",
        ", ".join(map(str, gpus)), device.index, ArenaLayout.of(told.shape).size / 1e6, told.shape.lanes,
    )  # fmt: skip
    wait_until_ready(links, "requests read what was chosen when their copies were made until one is")
    return RankSteps(links, arenas, method, token_table, buffers, queries)


def linked(told: Attach, arena: Arena, silence: float = SILENCE_SECONDS) -> RankLink:
    """To a rank that is told so much, and where its arena is; all layers of a step are one question."""
    settings = RankSettings(msgspec.structs.replace(told, arena=arena.handle), told.shape.layers, 1, silence)
    return RankLink(settings, partial(RankProcess, arena=arena))


def fitting(shape: Shape, size: int) -> Shape:
    """With as many lanes as an arena of so many bytes has, one at least."""
    def bytes_of(lanes: int) -> int:
        return ArenaLayout.of(msgspec.structs.replace(shape, lanes=lanes)).size

    fit = bisect_right(range(1, shape.lanes + 1), size, key=bytes_of)
    return msgspec.structs.replace(shape, lanes=max(1, fit))
