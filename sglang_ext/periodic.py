"""Looks at what goes on, again and again, in a thread of their own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_periodically(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """While this is entered ``look`` is called every so many seconds, beginning after the first; the last call ends before it is left."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
