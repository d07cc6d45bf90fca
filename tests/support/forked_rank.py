"""Processes of cache ranks as forks of the tests' process, which has loaded PyTorch: a new process takes 2.5 s of a core for that."""

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.managers.cache_rank import __main__ as cache_rank
from sglang_ext.managers.cache_rank import rank_link


class ForkedRank:
    """Runs ``python -m sglang_ext.managers.cache_rank`` in a fork. Replaces ``subprocess.Popen`` in rank_link.py.

    Attributes:
        pid: Process id.
        returncode: Exit status; None while the process runs.
    """

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(command[3:], pass_fds)

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process ends, and return its exit status."""
        return self._wait(0)

    def kill(self) -> None:
        """Send SIGKILL to a process that runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run(flags: Sequence[str], pass_fds: Sequence[int]) -> None:
    """Run a cache rank, and end the process. Files of the parent are closed, because its sockets must close when it closes them."""
    status = 1
    try:
        # Objects of the parent must not be freed: they would close files that this process opens.
        gc.disable()
        kept = sorted({0, 1, 2, *pass_fds})
        for first, end in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
            os.closerange(first + 1, end)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))
        logging.root.handlers.clear()
        sys.argv = ["cache_rank", *flags]
        cache_rank.main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Cache ranks are forks of this process. test_rank_process.py starts real ones."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_link, "subprocess", SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL))
        yield
