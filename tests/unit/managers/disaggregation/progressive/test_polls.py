"""A scheduler that asks for rooms again and again lets other threads run meanwhile, once a loop; one that has work does not wait."""

from sglang_ext.managers.disaggregation.progressive.polls import PAUSE, Polls


def test_a_loop_without_work_pauses_once_however_many_rooms_it_asks_for():
    clock, pauses = [10.0], []

    def pause(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    polls = Polls(lambda: clock[0], pause)
    for _ in range(4):
        for room in (7, 8, 9):
            polls.asked(room)
            clock[0] += 2e-5
    assert pauses == [PAUSE] * 3
    for _ in range(4):
        clock[0] += 5e-3
        polls.asked(8)
    assert len(pauses) == 3, "a step runs between them"
    polls.asked(8)
    polls.asked(9)
    assert len(pauses) == 4, "the first room is over, and another is that of the loop"
