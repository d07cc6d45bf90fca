"""Host memory for pages that a link sends or receives, cut from large blocks. The kernel allocates small pieces slower than a page is
copied."""

import logging
import sys
import threading
from collections import deque

import numpy as np
import torch

logger = logging.getLogger(__name__)

# numpy asks the kernel for huge pages, which need large contiguous memory.
BLOCK = 1 << 26
# Alignment of pieces, in bytes.
ALIGNED = 64
# Blocks that are kept when none of their pieces is used, since memory that was written before needs no page faults. On a CPU: as many as a
# peer encodes ahead (decode_peers.py). For a GPU: more if rooms need them, since a receiver holds anchors until their residuals arrive.
KEPT, KEPT_PINNED = 16, 128
# For a GPU: if fewer blocks are unused, a thread pins more, so that the caller of ``take`` does not wait for the kernel.
AHEAD = 4


class HostBlocks:
    """Cuts blocks of host memory into pieces. Any thread may call it. A block is reused or freed once none of its pieces is used.

    For a GPU, blocks are pinned, so that its copy engines can access them. Some are pinned at start. A thread pins more blocks before they
    are needed, up to ``KEPT_PINNED``. Further blocks are not kept, and are copied slower. Pieces of one lane share blocks, so that
    long-lived pieces do not hold blocks of short-lived ones.

    Args:
        device: Device of the pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Memory that copies to the device may still read, and the events after which they do not.
        self._pending_copies: deque[tuple[torch.cuda.Event, memoryview]] = deque()
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = [_pinned(device) for _ in range(KEPT)] if device.type == "cuda" else []
        self._pinning, self._expected = False, 0
        self._most_kept = KEPT_PINNED if device.type == "cuda" else KEPT
        # By lane, the unused rest of its current block.
        self._rest: dict[int, np.ndarray] = {}

    def expect(self, size: int) -> None:
        """Pin this many bytes in a background thread, up to ``KEPT_PINNED`` blocks, since a link is faster than the kernel pins."""
        if self._device.type == "cuda":
            with self._lock:
                self._expected = min(size // BLOCK, self._most_kept)
                self._pin_ahead()

    def take(self, size: int, lane: int = 0) -> np.ndarray:
        """Return uint8 [size] of uninitialized memory for the caller alone. Pieces of one ``lane`` become free at about the same time."""
        with self._lock:
            rest = self._rest.pop(lane, None)
            if rest is None or size > len(rest):
                rest = None
                rest = self._block(size)[:]
                self._pin_ahead()
            taken, self._rest[lane] = rest[:size], rest[-(-size // ALIGNED) * ALIGNED :]
        return taken

    def take_unshared(self, size: int) -> np.ndarray:
        """Return uint8 [size] for data that is kept until other parts of its room arrive. On a CPU, it shares no block and is freed with
        its last use."""
        return self.take(size) if self._device.type == "cuda" else np.empty(size, np.uint8)

    def _block(self, size: int) -> np.ndarray:
        """Return an unused block, or a new one."""
        for place in range(len(self._kept)):
            if len(self._kept[place]) >= size and self._is_unused(place):
                return self._kept[place]
        # A block that is being pinned counts as kept.
        keep = len(self._kept) + self._pinning < self._most_kept and size <= BLOCK
        block = _pinned(self._device) if keep and self._device.type == "cuda" else np.empty(max(size, BLOCK), np.uint8)
        if keep:
            self._kept.append(block)
        return block

    def _is_unused(self, place: int) -> bool:
        # Pieces are views that hold a reference to their block. The list and this call hold one each.
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
        """Return the bytes of a page on the device, uint8 [bytes]; on a CPU the same memory, if it is writable.

        The GPU copies memory of :meth:`take` asynchronously. The memory is kept until the copy is complete.
        """
        found = torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)
        if self._device.type != "cuda":
            return found
        there = found.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._pending_copies.append((event, content))
            while self._pending_copies and self._pending_copies[0][0].query():
                self._pending_copies.popleft()
        return there


def _pinned(device: torch.device) -> np.ndarray:
    """Allocate a block that the GPU's copy engines can access; an ordinary one if the system allows no more pinned memory."""
    try:
        # A new thread uses the first GPU, which need not be this rank's.
        with torch.cuda.device(device):
            return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        logger.warning("pinning %d bytes of host memory for links failed: %s; copies are slower: raise ulimit -l", BLOCK, error)
        return np.empty(BLOCK, np.uint8)
