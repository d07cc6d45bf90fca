"""Chunks that others follow are read beside the forward that was launched; what was placed since the launch is read behind it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sglang_ext.hooks import transfer
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender


@pytest.fixture
def told(monkeypatch):
    """What happened, in order, as on a GPU."""
    told = []

    def record_event():
        told.append("recorded")
        return SimpleNamespace(synchronize=lambda: told.append("waited"))

    monkeypatch.setattr(transfer.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transfer.torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=record_event))
    return told


def launched(told):
    """A scheduler that has launched a forward, and looks at the results of the one before."""
    scheduler = SimpleNamespace(result_queue=["of the one that was launched"])
    transfer.record_launch(lambda scheduler: told.append("barrier"), scheduler)
    assert told == ["recorded", "barrier"]
    told.clear()
    return scheduler


def request(told, event=None):
    sender = ProgressiveSender.__new__(ProgressiveSender)

    @contextmanager
    def on_side_stream(after):
        told.append(after)
        yield
        told.append("left")

    sender.kv_mgr = SimpleNamespace(pool=SimpleNamespace(on_side_stream=on_side_stream))
    sender._early_send_wait_event = event
    return SimpleNamespace(disagg_kv_sender=sender, tmp_end_idx=5)


def send(told, scheduler, req, *given):
    transfer.send_kv_chunk(lambda *arguments: told.append(arguments[2:]), scheduler, req, *given)
    return told


def test_a_chunk_that_others_follow_is_read_beside_the_forward(told):
    scheduler = launched(told)
    assert send(told, scheduler, request(told), False, 5) == [scheduler.kv_before_launch, (False, 5), "left"]


@pytest.mark.parametrize("last, event", [(True, None), (False, "of the forward before")])
def test_what_was_placed_since_the_launch_is_waited_for_before_it_is_read(told, last, event):
    assert send(told, launched(told), request(told, event), last, None) == ["recorded", "waited", (last, None)]


def test_nothing_is_waited_for_where_no_forward_was_launched_after_the_one_whose_results_are_looked_at(told):
    scheduler = launched(told)
    scheduler.result_queue.clear()
    assert send(told, scheduler, request(told), False, 5) == [(False, 5)]
    assert send(told, scheduler, request(told), True, None) == [(False, 5), (True, None)]


def test_a_chunk_that_is_still_computed_as_the_next_is_launched_goes_with_its_result(told):
    """SGLang finds it in its cache, and would wait for it before it launches the next."""
    scheduler, req = launched(told), request(told, "of the forward before")
    assert send(told, scheduler, req, False, 5) == [] and not req.disagg_kv_sender.is_sending_prefix
    assert send(told, scheduler, req, False, 5) == [scheduler.kv_before_launch, (False, 5), "left"]


def test_a_prefix_that_was_in_the_cache_goes_before_the_first_forward(told):
    req = request(told, "of the forward before")
    assert send(told, launched(told), req, False, 3) == ["recorded", "waited", (False, 3)]


def test_other_backends_and_the_loop_without_overlap_are_left_alone(told):
    assert send(told, launched(told), SimpleNamespace(disagg_kv_sender=object()), False, 5) == [(False, 5)]
    told.clear()
    assert send(told, SimpleNamespace(), request(told), False, 5) == [(False, 5)]


def test_nothing_is_recorded_without_a_gpu(told, monkeypatch):
    monkeypatch.setattr(transfer.torch.cuda, "is_available", lambda: False)
    scheduler = SimpleNamespace()
    transfer.record_launch(lambda scheduler: told.append("barrier"), scheduler)
    assert told == ["barrier"] and not vars(scheduler)
