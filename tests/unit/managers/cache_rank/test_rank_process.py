"""When processes of cache ranks are started again and when no more, and how layers are divided into packs."""

import time

import pytest
import torch
from rank_helpers import attach

from sglang_ext.managers.cache_rank import rank_link as links
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer


@pytest.fixture
def pass_time(monkeypatch):
    """Lets so many seconds pass at once."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def go_on(seconds):
        now[0] += seconds

    return go_on


def broken_link():
    """A link whose processes end at once."""
    told = attach()
    return links.RankLink(told, ExchangeBuffer(told.shape, torch.device("cpu"), "cpu"), start_process=Broken)


class Broken:
    """A process that has ended."""

    pid, ended = 1, 7

    def __init__(self, *given):
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.DEALER)

    def end(self):
        self.socket.close(0)


@pytest.mark.parametrize(("seconds", "has_given_up"), [(links.SETTLED_SECONDS, False), (links.SETTLED_SECONDS - 5, True)])
def test_processes_that_were_ready_for_a_while_are_not_counted_though_nobody_asked_them(pass_time, seconds, has_given_up):
    link = broken_link()
    for _ in range(4 * links.MAX_STARTS):
        pass_time(links.RESTART_SECONDS * 2**links.MAX_STARTS)
        link.packs, link._ready_since = links.split_into_packs(4, 2), time.monotonic() - seconds
        link.poll()
    assert link.has_given_up == has_given_up and (link.epoch == links.MAX_STARTS) == has_given_up


def test_after_processes_that_never_answer_no_more_are_started(pass_time, caplog):
    link = broken_link()
    for _ in range(3 * links.MAX_STARTS):
        pass_time(links.RESTART_SECONDS * 2**links.MAX_STARTS)
        link.poll()
    assert link.epoch == links.MAX_STARTS and link.has_given_up and link.down_reason == "ended"
    assert f"{links.MAX_STARTS} processes ended before they answered; no more are started" in caplog.text
    assert "requests go without it until the server is restarted" in caplog.text


@pytest.mark.parametrize(("layers", "count", "sizes"), [(30, 6, [6] * 5), (30, 7, [6] * 5), (5, 2, [1, 2, 2]), (4, 12, [4])])
def test_packs_are_even_and_hold_all_layers(layers, count, sizes):
    packs = links.split_into_packs(layers, count)
    assert [pack.count for pack in packs] == sizes and sum(pack.count for pack in packs) == layers
    assert [pack.first for pack in packs] == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize(("message", "layer", "count"), [(1e-4, 1e-3, 4), (8e-4, 1e-3, 8), (1.0, 1e-3, 12), (1e-4, 0.0, 12)])
def test_a_pack_is_as_large_as_messages_and_choosing_ask_for(message, layer, count):
    assert links.choose_pack_size(message, layer) == count
