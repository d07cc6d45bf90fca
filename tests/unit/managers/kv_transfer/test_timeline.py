"""What became of requests, and when: a file that several processes append to."""

import time
from threading import Thread

import torch

from sglang_ext.device import Mark
from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext_bench.timelines import TransferEvent, read_timeline


def test_events_of_several_writers_are_read_in_the_order_of_their_times(tmp_path):
    file = tmp_path / "times"
    first, second = TransferTimeline(file), TransferTimeline(file)
    second.add_event(7, "anchor", at=3.0, number=100)
    first.add_event(7, "computed", at=1.0)
    first.add_event(8, "verified", at=2.0, number=3, of=5, early=True)
    assert read_timeline(file) == [
        TransferEvent(7, "computed", 1.0), TransferEvent(8, "verified", 2.0, 3, 5, True), TransferEvent(7, "anchor", 3.0, 100),
    ]  # fmt: skip


def test_threads_do_not_mix_lines_and_a_line_under_way_is_left_out(tmp_path):
    file = tmp_path / "times"
    made = TransferTimeline(file)
    threads = [Thread(target=lambda room=room: [made.add_event(room, "drafted", number=n) for n in range(200)]) for room in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    with file.open("ab") as opened:
        opened.write(b'{"room": 1, "kind": "dra')
    found = read_timeline(file)
    assert len(found) == 800 and all([e.number for e in found if e.room == room] == [*range(200)] for room in range(4))


def test_marks_and_events_of_now_have_one_clock(tmp_path):
    made = TransferTimeline(tmp_path / "times")
    before = time.monotonic()
    mark = Mark.now(torch.device("cpu"))
    assert before - 0.01 <= made.at(mark) <= time.monotonic() + 0.01


def test_a_file_that_is_missing_has_no_events(tmp_path):
    assert read_timeline(tmp_path / "none") == []
