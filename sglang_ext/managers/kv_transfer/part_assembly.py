"""Parts put together from frames: one of each stream of a link at a time, since a sender begins no other before it is through."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash

from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.wire import Frame, PageHeader, Stream

# Bytes of a frame from which on its checksum is another thread's, while this one copies.
MUCH = 1 << 18


@dataclass(eq=False)
class ReceivedPart:
    """A part of which all frames came.

    Attributes:
        header: what it is.
        content: its bytes, which may be kept.
    """

    header: PageHeader
    content: memoryview
    _digest: xxhash.xxh3_64
    _reading: Future | None = None

    def has_valid_checksum(self) -> bool:
        """Whether the checksum is right; it waits until all bytes were read for it."""
        if self._reading is not None:
            self._reading.result()
        return self._digest.intdigest() == self.header.checksum


@dataclass(eq=False)
class _Begun:
    """A part that is not whole: its header, the checksum so far and what it waits for, and memory for it where it comes in several frames."""

    header: PageHeader
    digest: xxhash.xxh3_64
    reading: Future | None = None
    content: np.ndarray | None = None
    filled: int = 0


@dataclass(eq=False)
class Assembly:
    """What has come of the parts of one link.

    Attributes:
        take: gives memory of so many bytes, for a part in several frames.
        reader: a thread that reads frames for their checksums, in order; None for the caller's own.
    """

    take: Callable[[int], bytearray | np.ndarray] = bytearray
    reader: ThreadPoolExecutor | None = None
    _begun: dict[Stream, _Begun] = field(default_factory=dict)

    def add(self, frame: Frame, payload: memoryview) -> ReceivedPart | None:
        """Take a frame; its part, once that is whole.

        Raises:
            LinkError: the frame does not follow the one before.
        """
        header, stream = frame.header, frame.header.stream
        end = frame.offset + len(payload)
        if frame.offset == 0:
            self._begun[stream] = _Begun(header, header.digest())
        begun = self._begun.get(stream)
        if (
            begun is None
            or begun.header != header
            or begun.filled != frame.offset
            or end > header.size
            or not (payload or end == header.size)
        ):
            raise LinkError(f"a frame of bytes {frame.offset} to {end} of a part of {header.size} does not follow the one before")
        begun.filled = end
        # What follows much is that thread's, too: bytes are read in order.
        if self.reader is not None and (begun.reading is not None or len(payload) >= MUCH):
            begun.reading = self.reader.submit(begun.digest.update, payload)
        else:
            begun.digest.update(payload)
        if end < header.size and begun.content is None:
            begun.content = np.frombuffer(self.take(header.size), np.uint8)
        if begun.content is not None:
            # Unlike an assignment to a memoryview it leaves Python to other threads.
            np.copyto(begun.content[frame.offset : end], np.frombuffer(payload, np.uint8))
        if end < header.size:
            return None
        del self._begun[stream]
        return ReceivedPart(header, payload if begun.content is None else memoryview(begun.content), begun.digest, begun.reading)

    def drop(self, stream: Stream) -> None:
        """Forget a part that is not whole."""
        self._begun.pop(stream, None)
