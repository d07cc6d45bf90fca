"""The soak samples the processes of a server, and reports those whose memory or descriptors keep growing."""

import subprocess
import sys
import time

import pytest

from sglang_ext_bench.soaking.processes import (
    MIN_JUDGED_SAMPLES,
    MIN_SHOWN_SAMPLES,
    ProcessSample,
    ProcessWatch,
    WatchedProcess,
)

MB = 10**6
THIRD = MIN_JUDGED_SAMPLES // 3


def watched(own: list[int], descriptors: list[int], threads: int) -> WatchedProcess:
    """A process with nine groups of equal samples: MB of memory, descriptors, and threads of the last three."""
    counts = zip(own, descriptors, [40] * 6 + [threads] * 3, strict=True)
    groups = [ProcessSample(memory * MB, count, number) for memory, count, number in counts]
    return WatchedProcess("rank", [sample for sample in groups for _ in range(-(-THIRD // 3))])


@pytest.mark.parametrize(
    ("own", "descriptors", "threads", "problems"),
    [
        ([900, 1500, 900, 900, 1600, 900, 900, 910, 1600], [80] * 9, 40, []),
        ([700] * 3 + [900] * 3 + [1200] * 3, [80] * 9, 40, ["rank: its memory grew from 900 to 1200 MB"]),
        ([100 * n for n in range(3, 12)], [80] * 9, 40, ["rank: its memory grew from 700 to 1000 MB"]),
        ([900] * 3 + [1366] * 6, [80] * 9, 40, []),
        ([90] * 6 + [150] * 3, [80] * 9, 40, []),
        ([900] * 9, [80, 180, 80, 80, 190, 80, 130, 97, 97], 40, ["rank: its descriptors grew from 80 to 97"]),
        ([900] * 9, [80, 180, 80, 80, 190, 80, 130, 96, 95], 40, []),
        ([900] * 9, [80] * 9, 57, ["rank: its threads grew from 40 to 57"]),
        ([900] * 9, [80] * 9, 56, []),
    ],
    ids=["short-peaks", "memory", "steady-growth", "warm-up", "little", "descriptors", "few-descriptors", "threads", "few-threads"],
)
def test_growth_from_the_second_to_the_last_third_is_a_leak(own: list[int], descriptors: list[int], threads: int, problems: list[str]) -> None:
    process = watched(own, descriptors, threads)
    assert process.is_judged and list(process.problems()) == problems


def test_a_short_soak_is_shown_and_not_judged() -> None:
    growing = [ProcessSample(MB * 100 * index, 100 * index, 100 * index) for index in range(1, MIN_JUDGED_SAMPLES + 1)]
    short, long = WatchedProcess("rank", growing[:-1]), WatchedProcess("rank", growing)
    assert not list(short.problems()) and short.is_shown and short.describe().endswith("too short to judge")
    assert len(list(long.problems())) == 3 and "too short to judge" not in long.describe()
    assert not WatchedProcess("rank", growing[: MIN_SHOWN_SAMPLES - 1]).is_shown


GROWING = "import os, sys; print(os.getpid(), flush=True); kept = [b'x' * (8 << 20) for _ in sys.stdin]"


def test_a_process_of_the_group_that_grows_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
        with ProcessWatch(lambda: [process.pid], seconds=0.02) as watch:
            until, shown = time.monotonic() + 120, ""
            while not (problems := watch.problems()) and time.monotonic() < until:
                # It grows by 8 MB after each sample, however long a sample takes.
                if watch.table() != shown:
                    shown = watch.table()
                    process.stdin.write("\n")
                    process.stdin.flush()
                time.sleep(0.01)
        process.kill()
    (problem,) = problems
    assert f"({process.pid}): its memory grew from" in problem and f"({process.pid}): " in watch.table()


def test_without_a_group_nothing_is_watched() -> None:
    with ProcessWatch(lambda: [None], seconds=0.01) as watch:
        time.sleep(0.05)
    assert watch.table() == "" and watch.problems() == []
