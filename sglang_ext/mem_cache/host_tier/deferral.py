"""Launches of transfers that are put off to the end of a context, or until someone needs to know how they went."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from sglang_ext.mem_cache.host_tier.transfers import Launched


class Pending(Future[Launched]):
    """What a launch will give. Who asks before it ran has it run then, after those that were asked for before it."""

    def __init__(self, launch: Callable[[], Launched], run_all: Callable[[], None]) -> None:
        super().__init__()
        self._launch, self._run_all = launch, run_all

    def run(self) -> None:
        """Launch."""
        self.set_result(self._launch())

    def result(self, timeout: float | None = None) -> Launched:
        """What the launch gave."""
        if not self.done():
            self._run_all()
        return super().result(timeout)


class Deferral:
    """Runs launches in the order in which they were asked for. All calls come from one thread."""

    def __init__(self) -> None:
        self._waiting: list[Pending] = []
        self._open = False

    def begin(self, launch: Callable[[], Launched]) -> Pending:
        """Run ``launch``; inside :meth:`until_end` it runs later."""
        pending = Pending(launch, self._run_all)
        self._waiting.append(pending)
        if not self._open:
            self._run_all()
        return pending

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """What is asked for inside this context runs at its end, or once someone asks for its result."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._run_all()

    def _run_all(self) -> None:
        while self._waiting:
            self._waiting.pop(0).run()
