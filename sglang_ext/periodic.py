"""Runs a callback periodically in a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_periodically(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``look`` every ``seconds`` seconds inside this context, after the first interval. The last call ends before the context does."""
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
