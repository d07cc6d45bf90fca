"""What a soak says of a server's processes: memory and descriptors, and which of them grew."""

import subprocess
import sys
import time

import pytest

from sglang_ext_bench.soaking.processes import LEAST_SAMPLES, ProcessWatch, Sample, Watched

MB = 10**6


@pytest.mark.parametrize(
    ("own", "descriptors", "told"),
    [
        ([900, 1500, 900, 1600, 900, 1500, 900, 910, 1600], [80] * 9, []),
        ([900] * 3 + [1500] * 3 + [1200] * 3, [80] * 9, ["rank: its memory grew from 900 to 1200 MB"]),
        ([90] * 6 + [150] * 3, [80] * 9, []),
        ([900] * 9, [80, 180, 80, 190, 100, 130, 150, 97, 98], ["rank: its descriptors grew from 80 to 98"]),
        ([900] * 9, [80, 180, 80, 190, 100, 130, 150, 96, 95], []),
    ],
    ids=["comes-and-goes", "memory", "little", "descriptors", "few-descriptors"],
)
def test_what_is_mostly_more_at_the_end_than_at_the_beginning_is_a_leak(own: list, descriptors: list, told: list) -> None:
    watched = Watched("rank", [Sample(each * MB, count) for each, count in zip(own, descriptors)])
    assert watched.judged and list(watched.problems()) == told


def test_a_process_that_was_hardly_there_is_not_judged() -> None:
    assert not Watched("rank", [Sample(MB, 1)] * (LEAST_SAMPLES - 1)).judged


GROWING = "import os, time; print(os.getpid(), flush=True); kept = []\nwhile True: kept.append(b'x' * (8 << 20)); time.sleep(0.01)"


def test_a_process_of_the_group_that_grows_is_found() -> None:
    process = subprocess.Popen([sys.executable, "-c", GROWING], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        with ProcessWatch(process.pid, seconds=0.02) as watch:
            until = time.monotonic() + 60
            while not watch.problems() and time.monotonic() < until:
                time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    (problem,) = watch.problems()
    assert f"({process.pid}): its memory grew from" in problem and f"({process.pid}): " in watch.table()


def test_without_a_group_nothing_is_watched() -> None:
    with ProcessWatch(None, seconds=0.01) as watch:
        time.sleep(0.05)
    assert watch.table() == "" and watch.problems() == []
