"""Assembles parts from frames. A link has at most one partial part of each stream, since a sender completes a part before the next one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash

from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import Frame, PageHeader, Stream

# From this many bytes, another thread computes a frame's checksum while this one copies the frame.
MUCH = 1 << 18


@dataclass(eq=False)
class ReceivedPart:
    """A part whose frames have all arrived.

    Attributes:
        header: Header of the part.
        content: Its bytes, which may be kept.
    """

    header: PageHeader
    content: memoryview
    _digest: xxhash.xxh3_64
    _reading: Future | None = None

    def has_valid_checksum(self) -> bool:
        """Return whether the checksum is correct. Waits until it is computed over all bytes."""
        if self._reading is not None:
            self._reading.result()
        return self._digest.intdigest() == self.header.checksum


@dataclass(eq=False)
class _PartialPart:
    """A partial part: its header, its checksum so far with the pending update, and memory for it if it has several frames."""

    header: PageHeader
    digest: xxhash.xxh3_64
    reading: Future | None = None
    content: np.ndarray | None = None
    filled: int = 0


@dataclass(eq=False)
class Assembly:
    """Partial parts of one link.

    Attributes:
        take: Allocates this many bytes, for a part in several frames.
        reader: Thread that updates checksums, in order; None to use the caller's thread.
    """

    take: Callable[[int], bytearray | np.ndarray] = bytearray
    reader: ThreadPoolExecutor | None = None
    _partial: dict[Stream, _PartialPart] = field(default_factory=dict)

    def add(self, frame: Frame, payload: memoryview) -> ReceivedPart | None:
        """Add a frame to its part. Return the part once it is complete.

        Raises:
            LinkError: The frame does not follow the previous one.
        """
        header, stream = frame.header, frame.header.stream
        end = frame.offset + len(payload)
        if frame.offset == 0:
            self._partial[stream] = _PartialPart(header, header.digest())
        partial = self._partial.get(stream)
        if (
            partial is None
            or partial.header != header
            or partial.filled != frame.offset
            or end > header.size
            or not (payload or end == header.size)
        ):
            raise LinkError(f"a frame of bytes {frame.offset} to {end} of a part of {header.size} does not follow the previous frame")
        partial.filled = end
        # Small frames after a large one go to that thread too, because a checksum reads its bytes in order.
        if self.reader is not None and (partial.reading is not None or len(payload) >= MUCH):
            partial.reading = self.reader.submit(partial.digest.update, payload)
        else:
            partial.digest.update(payload)
        if end < header.size and partial.content is None:
            partial.content = np.frombuffer(self.take(header.size), np.uint8)
        if partial.content is not None:
            # Unlike an assignment to a memoryview, this releases the GIL.
            np.copyto(partial.content[frame.offset : end], np.frombuffer(payload, np.uint8))
        if end < header.size:
            return None
        del self._partial[stream]
        return ReceivedPart(header, payload if partial.content is None else memoryview(partial.content), partial.digest, partial.reading)

    def drop(self, stream: Stream) -> None:
        """Discard a partial part."""
        self._partial.pop(stream, None)
