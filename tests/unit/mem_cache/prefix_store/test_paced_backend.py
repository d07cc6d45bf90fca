"""A simulated link delays reads by their bytes, whichever threads read."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.prefix_store.backend import ReadRange, open_backend

NAME = f"{'0' * 32}/{'1' * 64}"


def test_reads_of_all_threads_share_the_link(tmp_path):
    # A megabyte per second.
    backend, content = open_backend(f"file:{tmp_path}?bench-gbit=0.008"), bytes(range(250)) * 200
    begin = time.monotonic()
    assert backend.put(NAME, [memoryview(content)]) and backend.count_run([NAME]) == 1
    assert time.monotonic() - begin < 0.05 and next(iter(backend.objects())).name == NAME
    memory = [bytearray(len(content)) for _ in range(4)]
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda part: backend.read([ReadRange(NAME, 0, memoryview(part))]), memory)) == [[True]] * 4
    assert 0.2 <= time.monotonic() - begin and all(part == content for part in memory)


@pytest.mark.parametrize("rate", ["", "0", "-1", "fast", "nan"])
def test_a_rate_that_is_none_is_refused(tmp_path, rate):
    with pytest.raises(OptionError, match="positive"):
        open_backend(f"file:{tmp_path}?bench-gbit={rate}")
