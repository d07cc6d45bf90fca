"""Host memory for pages that wait for a link, or come over one, cut from large blocks: the kernel gives small ones slower than a page is
copied."""

import logging
import sys
import threading
from collections import deque

import numpy as np
import torch

logger = logging.getLogger(__name__)

# numpy asks the kernel for huge pages, which come where as much lies together.
BLOCK = 1 << 26
# Pieces begin at multiples of this.
ALIGNED = 64
# Blocks that are kept when none of their pieces is used: memory that was written before costs the kernel nothing. As many as a peer
# encodes ahead (decode_peers.py); of a GPU more where rooms need them, since a receiver holds anchors until their residuals come.
KEPT, KEPT_PINNED = 16, 128
# Of a GPU, unused blocks below which a thread pins others: whoever takes a piece must not wait for the kernel.
AHEAD = 4


class HostBlocks:
    """Cuts blocks into pieces, of any thread; a block is cut anew, or gone, once none of its pieces is used.

    Of a GPU blocks are pinned: it copies to and from them by itself. Some are there from the beginning, others are made by a thread, before
    they are needed, up to ``KEPT_PINNED``; what is beyond is not kept, and copied slower. Pieces of one lane lie together, so that what waits
    long does not hold blocks of what goes soon.

    Args:
        device: whose pages they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What copies to the device may still read, and events after which they do not.
        self._read: deque[tuple[torch.cuda.Event, memoryview]] = deque()
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = [_pinned(device) for _ in range(KEPT)] if device.type == "cuda" else []
        self._pinning, self._expected = False, 0
        self._most_kept = KEPT_PINNED if device.type == "cuda" else KEPT
        # By lane, what is left of the block that is cut.
        self._rest: dict[int, np.ndarray] = {}

    def expect(self, size: int) -> None:
        """Have a thread pin as many bytes, up to ``KEPT_PINNED`` blocks, from now on: a link is faster than the kernel pins."""
        if self._device.type == "cuda":
            with self._lock:
                self._expected = min(size // BLOCK, self._most_kept)
                self._pin_ahead()

    def take(self, size: int, lane: int = 0) -> np.ndarray:
        """Bytes that nobody else has, uint8 [size], with any content; ``lane``: of what they become free together with."""
        with self._lock:
            rest = self._rest.pop(lane, None)
            if rest is None or size > len(rest):
                rest = None
                rest = self._block(size)[:]
                self._pin_ahead()
            taken, self._rest[lane] = rest[:size], rest[-(-size // ALIGNED) * ALIGNED :]
        return taken

    def take_unshared(self, size: int) -> np.ndarray:
        """The same for what is kept until other parts of its room come, uint8 [size]: on a CPU it shares its block with nothing, and goes
        when it is not used."""
        return self.take(size) if self._device.type == "cuda" else np.empty(size, np.uint8)

    def _block(self, size: int) -> np.ndarray:
        """A block that is not used, or a new one."""
        for place in range(len(self._kept)):
            if len(self._kept[place]) >= size and self._is_unused(place):
                return self._kept[place]
        # The one that is being pinned counts.
        keep = len(self._kept) + self._pinning < self._most_kept and size <= BLOCK
        block = _pinned(self._device) if keep and self._device.type == "cuda" else np.empty(max(size, BLOCK), np.uint8)
        if keep:
            self._kept.append(block)
        return block

    def _is_unused(self, place: int) -> bool:
        # Pieces are views, which keep a block; the list and the call do, too.
        return sys.getrefcount(self._kept[place]) == 2

    def _pin_ahead(self) -> None:
        if self._device.type == "cuda" and not self._pinning and self._lacks_pinned():
            self._pinning = True
            threading.Thread(target=self._pin, name="kv-blocks", daemon=True).start()

    def _lacks_pinned(self) -> bool:
        kept = len(self._kept)
        return kept < self._expected or kept < self._most_kept and sum(map(self._is_unused, range(kept))) < AHEAD

    def _pin(self) -> None:
        while self._pinning:
            block = _pinned(self._device)
            with self._lock:
                self._kept.append(block)
                del block
                self._pinning = self._lacks_pinned()

    def to_device(self, content: memoryview) -> torch.Tensor:
        """Bytes of a page on the device, uint8 [bytes]; on a CPU the same memory, where it may be written to.

        What comes of :meth:`take` is copied by the GPU, without waiting for it, and stays until it has been.
        """
        found = torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)
        if self._device.type != "cuda":
            return found
        there = found.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._read.append((event, content))
            while self._read and self._read[0][0].query():
                self._read.popleft()
        return there


def _pinned(device: torch.device) -> np.ndarray:
    """A block that the GPU's copy engines reach; one that they do not, where the system allows no more."""
    try:
        # Threads begin with the first GPU, which need not be this rank's.
        with torch.cuda.device(device):
            return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        logger.warning("pinning %d bytes of host memory for links failed: %s; copies are slower: raise ulimit -l", BLOCK, error)
        return np.empty(BLOCK, np.uint8)
