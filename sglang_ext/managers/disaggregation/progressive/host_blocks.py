"""Host memory for pages that wait for a link, cut from large blocks: the kernel gives small ones slower than a page is copied."""

import sys
import threading

import numpy as np

# numpy asks the kernel for huge pages, which come where as much lies together.
BLOCK = 1 << 26
# Blocks that are kept when none of their pieces is used, as many as a peer encodes ahead (peer.py): memory that was written before costs
# the kernel nothing.
KEPT = 16


class HostBlocks:
    """Cuts blocks into pieces, of any thread; a block is cut anew, or gone, once none of its pieces is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = []
        self._rest = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Bytes that nobody else has, uint8 [size], with any content."""
        with self._lock:
            if size > len(self._rest):
                self._rest = self._rest[:0]
                self._rest = self._block(size)[:]
            taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _block(self, size: int) -> np.ndarray:
        """A block that is not used, or a new one."""
        for place in range(len(self._kept)):
            # Its pieces are views, which keep it; the list and the call do, too.
            if len(self._kept[place]) >= size and sys.getrefcount(self._kept[place]) == 2:
                return self._kept[place]
        block = np.empty(max(size, BLOCK), np.uint8)
        if len(self._kept) < KEPT and len(block) == BLOCK:
            self._kept.append(block)
        return block
