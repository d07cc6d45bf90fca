"""Host memory for pages that wait for a link, cut from large blocks: the kernel gives small ones slower than a page is copied."""

import threading

import numpy as np

# numpy asks the kernel for huge pages, which come where as much lies together; malloc gives such a block back when it is not used.
BLOCK = 1 << 26


class HostBlocks:
    """Cuts blocks into pieces, of any thread; a block is gone once none of its pieces is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Bytes that nobody else has, uint8 [size], with any content."""
        with self._lock:
            if size > len(self._block):
                self._block = np.empty(max(size, BLOCK), np.uint8)
            taken, self._block = self._block[:size], self._block[size:]
        return taken
