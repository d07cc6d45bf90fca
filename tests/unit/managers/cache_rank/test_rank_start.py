"""How a cache rank becomes ready: it is measured as fast as it answers, and borne as long as it says that it lives."""

import errno
import logging
import os
import re
import time

import msgspec
import pytest
import torch
from device_rank_helpers import RankWorld
from rank_helpers import ScriptedRank, attach
from rank_socket import RankSocket, serve
from waiting import until

from sglang_ext.core import OptionError
from sglang_ext.managers.cache_rank import protocol, selection_server
from sglang_ext.managers.cache_rank import rank_link as links
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.rank_link import RankLink
from sglang_ext.managers.cache_rank.selection_server import SelectionServer
from sglang_ext.managers.kv_transfer.wire import WireError

CPU = torch.device("cpu")


def test_messages_are_measured_as_fast_as_they_are_answered_however_seldom_the_host_looks(caplog):
    caplog.set_level(logging.INFO)
    world = RankWorld(pack=0)
    (link,) = world.links
    end = time.monotonic() + 60
    while not link.ready and time.monotonic() < end:
        # As a scheduler that idles.
        link.poll()
        time.sleep(0.5)
    world.steps.end()
    told = re.search(r"a message and back ([\d.]+) ms", caplog.text)
    assert told and float(told[1]) < 100, caplog.text


@pytest.mark.parametrize("beats", [True, False])
def test_one_that_attaches_for_long_is_borne_as_long_as_it_beats(monkeypatch, beats):
    link = RankLink(attach(), ExchangeBuffer(attach().shape, CPU, "cpu"), silence=0.1, start_process=ScriptedRank)
    link.poll(), link.poll()
    process, now = ScriptedRank.made[-1], time.monotonic()
    for seconds in range(0, int(3 * links.ATTACH_SECONDS), 5):
        monkeypatch.setattr(time, "monotonic", lambda passed=seconds: now + passed)
        if beats:
            process.say(protocol.Heartbeat(link.epoch))
        link.wait(0.02)
        link.poll()
        if process.ended:
            break
    assert link.down_reason == ("starting" if beats else "silent") and not link.ready
    link.end()


class TellingSocket(RankSocket):
    """Keeps heartbeats, too."""

    def send(self, frame, flags=0):
        self.messages.append(protocol.decode_from_rank(frame))


def test_it_beats_while_it_attaches(monkeypatch):
    told, socket, view = attach(), TellingSocket(), torch.frombuffer
    arena = ExchangeBuffer(told.shape, CPU, "cpu")
    made = SelectionServer(socket, arena.begin(told.epoch), told.epoch, CPU)
    # The memory is mapped for long.
    monkeypatch.setattr(torch, "frombuffer", lambda *given, **named: until(lambda: len(socket.messages) > 3) or view(*given, **named))
    socket.tell(told)
    serve(made)
    *beats, attached = socket.messages
    assert isinstance(attached, protocol.Attached) and len(beats) > 3 and {type(each) for each in beats} == {protocol.Heartbeat}
    time.sleep(2 * selection_server.BEAT_SECONDS)
    assert socket.messages[-1] is attached, "nobody else beats any more"
    socket.tell(msgspec.structs.replace(told, version=0))
    with pytest.raises(WireError, match="version and epoch"):
        serve(made)
    assert isinstance(socket.messages[-1], protocol.AttachRefused)


def test_too_little_shared_memory_is_refused_with_a_remedy(monkeypatch):
    def refuse(descriptor, size):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OptionError, match="MB of shared memory, which the system refuses .*: pass .* --kv-cache-ranks 0"):
        ExchangeBuffer(attach().shape, CPU, "cpu")
