"""Cache ranks of a model that is made up: pools of random keys, requests in them, and what the method chooses for these in one process."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zmq

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.cpu_client import CpuRankClient
from sglang_ext.managers.cache_rank.rank_link import RankLink, RankSettings
from sglang_ext.managers.cache_rank.protocol import VERSION, Attach, BufferShape, RotaryParameters
from sglang_ext.managers.cache_rank.shared_memory import allocate, map_memory
from sglang_ext.mem_cache.compressed.row_exchange import missing_mask
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.predictors import query_predictor

LAYERS, HEADS, GROUP, DIM, TOKENS = 5, 2, 3, 8, 1024
ROTARY = Rotary(1 / 10 ** torch.arange(DIM // 2))


def attach(blocks=32, lanes=4, places=8, predictor="current", window=1, most=256, bits=16, rows=False, fresh=0, apart=False):
    """What ranks of this model are told."""
    shape = BufferShape(LAYERS, HEADS * GROUP, HEADS, DIM, "float32", window, lanes, most, places, rows, fresh)
    turning = RotaryParameters(tuple(ROTARY.frequencies.tolist()), ROTARY.interleaved)
    return Attach(VERSION, 1, shape, blocks, (0.3,) * LAYERS, predictor, 4, 32, turning, bits, apart=apart)


def pool(seed=0, tokens=TOKENS):
    """Buffers of random keys and values."""
    noise = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(tokens, HEADS, DIM, generator=noise) for _ in range(LAYERS)) for _ in "kv")
    return KVBuffers(tuple(range(LAYERS)), (0.3,) * LAYERS, keys, values)


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
        self.choices = CpuRankClient([RankLink(settings) for _ in range(self.count)], self.buffers)

    def until(self, holds, seconds=60.0):
        """Tend the ranks until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"nothing of it after {seconds} s; missed: {dict(self.choices.missed)}"
            for link in self.choices.links:
                link.poll()
                link.wait(0.02)

    def ready(self):
        """Once all can be asked."""
        self.until(lambda: self.choices.ready == self.count)
        return self

    def prepared(self, row, slots, keep, asked, positions, seconds=30.0):
        """A request for which the newest question was answered: what was chosen."""
        self.until(lambda: self.choices.request_selection(row, slots, keep, asked, positions), seconds)
        return self.choices.last_selection(row, len(slots), keep)


def signalled(pid, number):
    """Stop or kill a process; it does nothing more when this returns."""
    os.kill(pid, number)
    end = time.monotonic() + 30
    while state_of(pid) not in "TZ":
        assert time.monotonic() < end, f"process {pid} runs on after signal {number}"
        time.sleep(0.001)


def state_of(pid):
    """A letter, as proc(5) has it; Z where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


class ScriptedRank:
    """In the place of a process: what it is told is kept, and it answers as a test says.

    Attributes:
        told: messages, oldest first.
        memory: in common with the link.
    """

    made: list["ScriptedRank"] = []
    pid = 0
    ended = None

    def __init__(self, shape, epoch, threads):
        self.epoch, self.told, self.memory = epoch, [], map_memory(shape, allocate(shape))
        context = zmq.Context.instance()
        self.socket, self.peer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        name = f"inproc://scripted-{id(self)}"
        self.socket.bind(name)
        self.peer.connect(name)
        self.say(protocol.Heartbeat(epoch))
        self.made.append(self)

    def connected(self):
        """As a process's."""

    def end(self):
        """As a process's; whether it was ended shows."""
        self.ended = -9
        self.socket.close(0)
        self.peer.close(0)

    def say(self, message):
        """To the link."""
        self.peer.send(protocol.encode(message))

    def hear(self):
        """Take what was said, and do what any rank does at once: attach, answer pings, take keys."""
        while self.peer.poll(0):
            message = protocol.decode_to_rank(self.peer.recv())
            self.told.append(message)
            match message:
                case protocol.Attach():
                    self.say(protocol.Attached(self.epoch, 1e-3))
                case protocol.RankPing():
                    self.say(protocol.Heartbeat(self.epoch, message.number))
                case protocol.Append():
                    self.say(protocol.PlacesFreed(self.epoch, tuple(piece.place for piece in message.pieces)))
        return self.told

    def pieces(self, before=0):
        """Of keys that it was sent, oldest first; ``before``: messages that are left out."""
        return [piece for message in self.hear()[before:] if isinstance(message, protocol.Append) for piece in message.pieces]

    def asks(self):
        """Questions that it was asked, oldest first."""
        return [message for message in self.hear() if isinstance(message, protocol.SelectionRequest)]

    def put_rows(self, ask, kept):
        """Rows of what was chosen beyond what the copy holds: of each token those that :func:`row_of` says."""
        memory, layers = self.memory, slice(ask.first, ask.first + ask.count)
        fresh = missing_mask(kept, memory.get_held(ask.lane, ask.sequence, layers, kept.shape[-1]))
        for part, seed in zip(memory.rows(ask.lane, ask.sequence), (0, 1)):
            # Whatever was there before is of no use any more.
            part[layers] = float("nan")
            at = fresh.nonzero(as_tuple=True)
            first = row_of(seed, ask.first, 0, 0)[0] + (at[0] * HEADS + at[1]) * 4096
            part[ask.first + at[0], at[1], at[2]] = (first + kept[at])[:, None]
        memory.put_fresh(ask.lane, ask.sequence, ask.first, fresh)

    def answer(self, ask, kept=None, epoch=None, chosen=True):
        """Answer a question: with the newest tokens, where nothing else is given."""
        epoch = epoch or self.epoch
        if kept is None:
            kept = newest_of(ask)
        if self.memory.shape.rows:
            self.put_rows(ask, kept)
        self.memory.put_selection(epoch, ask.lane, ask.sequence, ask.first, ask.covered, kept)
        self.say(protocol.SelectionReply(epoch, ask.lane, ask.first, ask.count, ask.sequence, chosen, 0.01))


def row_of(is_value, layer, head, position):
    """K or V of a token, made up: no two are alike."""
    return torch.full((DIM,), float(((is_value * LAYERS + layer) * HEADS + head) * 4096 + position))


def newest_of(ask):
    """The newest tokens of a question, all that it wants."""
    return torch.arange(ask.covered - ask.keep, ask.covered).expand(ask.count, HEADS, -1)


def scripted(told=None, pack=5, timeline=None):
    """Choices over one scripted rank, which is ready."""
    link = RankLink(RankSettings(told or attach(), pack), ScriptedRank)
    choices = CpuRankClient([link], pool(), timeline)
    for _ in range(20):
        ScriptedRank.made[-1].hear()
        link.poll()
    assert link.ready
    return choices, ScriptedRank.made[-1]
