"""Cache ranks of a model that is made up: pools of random keys, requests in them, and what the method chooses for these in one process."""

import time
from dataclasses import dataclass, field

import torch

from sglang_ext.managers.cache_rank.choices import RankChoices
from sglang_ext.managers.cache_rank.link import RankLink, RankSettings
from sglang_ext.managers.cache_rank.protocol import VERSION, Attach, Shape, Turning
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.predictors import query_predictor

LAYERS, HEADS, GROUP, DIM, TOKENS = 5, 2, 3, 8, 1024
ROTARY = Rotary(1 / 10 ** torch.arange(DIM // 2))


def attach(blocks=32, lanes=4, places=8, predictor="current", window=1, most=256):
    """What ranks of this model are told."""
    shape = Shape(LAYERS, HEADS * GROUP, HEADS, DIM, "float32", window, lanes, most, places)
    turning = Turning(tuple(ROTARY.frequencies.tolist()), ROTARY.interleaved)
    return Attach(VERSION, 1, shape, blocks, (0.3,) * LAYERS, predictor, 4, 32, turning)


def pool(seed=0):
    """Buffers of random keys; values are of no use to ranks."""
    noise = torch.Generator().manual_seed(seed)
    keys = tuple(torch.randn(TOKENS, HEADS, DIM, generator=noise) for _ in range(LAYERS))
    return KVBuffers(tuple(range(LAYERS)), (0.3,) * LAYERS, keys, keys)


def queries(count, seed):
    """Of ``count`` tokens: [layers, count, query_heads, dim]."""
    return torch.randn(LAYERS, count, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(seed)) * 3


def chosen_here(buffers, slots, keep, asked, positions, predictor="current"):
    """What the method chooses in this process: int64 [layers, kv_heads, keep]."""
    context = ContextKV(buffers, slots, asked, positions, ROTARY)
    return Spade(query_predictor(predictor), recent=32).select(context, [Part(0, len(slots), keep)])[0]


@dataclass
class Ranks:
    """Choices over real processes.

    Attributes:
        buffers: the pool.
        choices: over its ranks.
    """

    buffers: KVBuffers = field(default_factory=pool)
    told: Attach = field(default_factory=attach)
    count: int = 1
    silence: float = 3.0
    pack: int = 2

    def __post_init__(self):
        settings = RankSettings(self.told, self.pack, 1, self.silence)
        self.choices = RankChoices([RankLink(settings) for _ in range(self.count)], self.buffers)

    def until(self, holds, seconds=60.0):
        """Tend the ranks until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"nothing of it after {seconds} s; missed: {dict(self.choices.missed)}"
            for link in self.choices.links:
                link.tend()
                link.wait(0.02)

    def ready(self):
        """Once all can be asked."""
        self.until(lambda: self.choices.ready == self.count)
        return self

    def prepared(self, row, slots, keep, asked, positions, seconds=30.0):
        """A request for which the newest question was answered: what was chosen."""
        self.until(lambda: self.choices.prepare(row, slots, keep, asked, positions), seconds)
        return self.choices.kept(row, len(slots), keep)
