"""Cache ranks of a model that is made up: its keys, what ranks are told, and ranks that answer as tests say."""

import os
import time
from pathlib import Path

import torch
import zmq

from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.protocol import epoch_word
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import MappedExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import VERSION, Attach, BufferShape, RotaryParameters
from sglang_ext.managers.kv_transfer.wire import encode
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.rotary import Rotary

LAYERS, HEADS, GROUP, DIM, TOKENS = 5, 2, 3, 8, 1024
ROTARY = Rotary(1 / 10 ** torch.arange(DIM // 2))


def attach(blocks=32, lanes=4, places=8, predictor="current", window=1, most=256, bits=16, rows=False, fresh=0, apart=False, packs=1):
    """What ranks of this model are told."""
    shape = BufferShape(LAYERS, HEADS * GROUP, HEADS, DIM, "float32", window, lanes, most, places, rows, fresh, packs)
    turning = RotaryParameters(tuple(ROTARY.frequencies.tolist()), ROTARY.interleaved)
    return Attach(VERSION, 1, shape, blocks, (0.3,) * LAYERS, predictor, 4, 32, turning, bits, apart=apart)


def pool(seed=0, tokens=TOKENS):
    """Buffers of random keys and values."""
    noise = torch.Generator().manual_seed(seed)
    keys, values = (tuple(torch.randn(tokens, HEADS, DIM, generator=noise) for _ in range(LAYERS)) for _ in "kv")
    return KVBuffers(tuple(range(LAYERS)), (0.3,) * LAYERS, keys, values)


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
        memory: its side of the exchange buffer.
    """

    made: list["ScriptedRank"] = []
    pid = 0
    ended = None

    def __init__(self, exchange_buffer, epoch, threads):
        self.epoch, self.told, self.shape = epoch, [], exchange_buffer.shape
        self.memory = MappedExchangeBuffer(self.shape, torch.device("cpu"), b"", exchange_buffer.begin(epoch))
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
        self.peer.send(encode(message))

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

    def asks(self):
        """Questions that it was asked, oldest first."""
        return [message for message in self.hear() if isinstance(message, protocol.SelectionRequest)]

    def answer(self, ask, kept=None, epoch=None, chosen=True, full_kv=None):
        """Answer a question with positions, int64 [layers, kv_heads, keep]: with the newest tokens, where nothing else is given.

        ``epoch``: under which it is written; that of this process, if None. ``full_kv``: where rows are sent, slots of the request's tokens,
        and the keys and values there.
        """
        kept = newest_of(ask) if kept is None else kept
        entry, there, positions = self.shape.entry(ask.lane, ask.first), torch.ones(1, dtype=torch.int32), kept[:, None].int()
        asked = torch.tensor([[entry, epoch_word(epoch or self.epoch, ask.sequence), ask.keep if chosen else 0]])
        if full_kv is None:
            self.memory.push_chosen(asked, there, positions)
        else:
            self.memory.push_rows_on_cpu(asked, there, positions, torch.ones_like(positions), full_kv[0][None], full_kv[1])
        self.memory.answer(asked, there)
        self.say(protocol.SelectionReply(self.epoch, ask.lane, ask.first, ask.count, ask.sequence, chosen, 0.01))


def newest_of(ask):
    """The newest tokens of a question, all that it wants."""
    return torch.arange(ask.covered - ask.keep, ask.covered).expand(ask.count, HEADS, -1)
