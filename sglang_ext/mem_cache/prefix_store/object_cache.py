"""Objects of a prefix store in the memory of one process, and on a disk behind it.

When memory is full, the objects that were not used for longest are dropped. With a disk, a thread writes each new object to it, and an
object that was dropped is loaded again when it is read. An object that is dropped before it was written is lost, which is counted.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.mem_cache.prefix_store.backend import (
    ReadRange,
    StoredObject,
    StoreError,
    StoreStatistics,
)
from sglang_ext.mem_cache.prefix_store.file_backend import TOUCH_SECONDS, FileBackend
from sglang_ext.mem_cache.prefix_store.object_header import ObjectError, check_object

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 30.0
"""Longest time in which a cache that closes writes the last objects to its disk."""
CheckObject = Callable[[str, memoryview], None]
"""Raises :class:`ObjectError` if an object of a name is damaged."""


@dataclass
class CacheCounters:
    """Totals since the start.

    Attributes:
        stored: Objects that were put.
        dropped: Objects that made room in memory.
        written, lost: Objects that were written to the disk, and that were not: dropped before, or the disk failed.
        loaded: Objects that were read from the disk into memory.
        damaged: Objects that were refused, or deleted from the disk, because a checksum differs.
    """

    stored: int = 0
    dropped: int = 0
    written: int = 0
    lost: int = 0
    loaded: int = 0
    damaged: int = 0


@dataclass
class CachedObject:
    """An object in memory.

    Attributes:
        content: Its bytes.
        used_at: When it was used, in seconds since 1970.
        recorded_at: When the disk last got it, or learned that it is used.
        awaits_disk: Whether it waits for its first write to the disk.
    """

    content: memoryview
    used_at: float
    recorded_at: float
    awaits_disk: bool


class ObjectCache:
    """Objects in memory, and on disk. All methods may be called from any thread.

    :meth:`get` and :meth:`reserve` use memory alone. The other methods may wait for the disk.

    Args:
        max_bytes: Bytes of memory for objects, including those that are being received.
        disk: The disk; None for memory alone.
        check: Checks each object before it is stored.
    """

    def __init__(self, max_bytes: int, disk: FileBackend | None = None, check: CheckObject = check_object) -> None:
        self.max_bytes, self.disk, self._check = max_bytes, disk, check
        self.counters = CacheCounters()
        self._lock = threading.Lock()
        # The object that was used last is the last one.
        self._objects: OrderedDict[str, CachedObject] = OrderedDict()
        # Bytes of objects, and bytes that are reserved for objects that are being received.
        self.size = self._reserved = 0
        # Names of objects that are not on the disk yet, or that were used since; None ends the thread.
        self._unwritten: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._disk_failed = False
        # Held while an object is written to the disk or deleted: a write that is under way would bring back what is deleted.
        self._disk_lock = threading.Lock()
        # Requests to delete so far. A load during which it changes may have read what was deleted.
        self._deletions = 0
        self._writer = threading.Thread(target=self._write_objects, name="store-disk", daemon=True)
        if disk is not None:
            self._writer.start()

    @property
    def num_objects(self) -> int:
        """Number of objects in memory."""
        return len(self._objects)

    def get(self, name: str) -> memoryview | None:
        """An object in memory, which then counts as used. None if it is not in memory."""
        with self._lock:
            found = self._objects.get(name)
            if found is None:
                return None
            self._objects.move_to_end(name)
            found.used_at = time.time()
            is_due = self.disk is not None and found.used_at - found.recorded_at > TOUCH_SECONDS
            if is_due:
                found.recorded_at = found.used_at
        if is_due:
            # Otherwise the disk would delete first what memory serves: it sees no use of it. A put of what it has records the use.
            self._unwritten.put(name)
        return found.content

    def load(self, name: str) -> memoryview | None:
        """An object in memory or on the disk. None if neither has it. An object that does not fit into memory is not found."""
        content, disk, deletions = self.get(name), self.disk, self._deletions
        if content is not None or disk is None:
            return content
        size = disk.size(name)
        if not size:
            return None
        try:
            memory = self.reserve(size)
        except StoreError:
            return None
        is_read = False
        try:
            is_read = disk.read([ReadRange(name, 0, memory)])[0]
        finally:
            if not is_read:
                self.release(memory)
        if not is_read:
            return None
        try:
            self._keep(name, memory, deletions=deletions)
        except ObjectError as error:
            self._count_damaged(f"{error}; it is deleted from {disk.folder}")
            disk.delete([name])
            return None
        self.counters.loaded += 1
        return memory

    def reserve(self, size: int) -> memoryview:
        """Memory for an object, for :meth:`store` or :meth:`release`. Drops the objects that were not used for longest.

        Raises:
            StoreError: The object does not fit.
        """
        with self._lock:
            if size + self._reserved > self.max_bytes:
                raise StoreError(f"an object of {size} bytes: {self.max_bytes - self._reserved} of {self.max_bytes} bytes of memory are available")
            while self.size + self._reserved + size > self.max_bytes:
                _, dropped = self._objects.popitem(last=False)
                self.size -= dropped.content.nbytes
                self.counters.dropped += 1
                self.counters.lost += dropped.awaits_disk
            try:
                memory = memoryview(np.empty(size, np.uint8))
            except MemoryError as error:
                raise StoreError(f"an object of {size} bytes: this machine has no memory for it") from error
            self._reserved += size
        return memory

    def release(self, memory: memoryview) -> None:
        """End a reservation."""
        with self._lock:
            self._reserved -= memory.nbytes

    def store(self, name: str, memory: memoryview) -> bool:
        """Store an object in its reserved memory, and end the reservation. Returns False if another thread has stored it meanwhile.

        Raises:
            StoreError: A checksum of the object differs.
        """
        try:
            is_new = self._keep(name, memory, awaits_disk=self.disk is not None)
        except ObjectError as error:
            self._count_damaged(f"refused: {error}")
            raise StoreError(f"refused: {error}") from error
        if is_new:
            self.counters.stored += 1
            if self.disk is not None:
                self._unwritten.put(name)
        return is_new

    def _keep(self, name: str, memory: memoryview, awaits_disk: bool = False, deletions: int | None = None) -> bool:
        """Check an object, add it, and end its reservation. Returns False if it is there, or if objects were deleted after ``deletions``.

        Raises:
            ObjectError: It is damaged.
        """
        try:
            self._check(name, memory)
        except ObjectError:
            self.release(memory)
            raise
        with self._lock:
            self._reserved -= memory.nbytes
            if name in self._objects or deletions not in (None, self._deletions):
                return False
            now = time.time()
            self._objects[name] = CachedObject(memory, now, now, awaits_disk)
            self.size += memory.nbytes
        return True

    def touch(self, name: str) -> bool:
        """Count an object as used. Returns False if neither memory nor the disk has it."""
        return self.get(name) is not None or self.count_run([name]) > 0

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` in memory or on the disk."""
        for count, name in enumerate(names):
            if name not in self._objects and (self.disk is None or not self.disk.count_run([name])):
                return count
        return len(names)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects from memory and from the disk."""
        with self._disk_lock:
            # The disk first: a load that begins later finds nothing there.
            if self.disk is not None:
                self.disk.delete(names)
            with self._lock:
                self._deletions += 1
                for name in names:
                    found = self._objects.pop(name, None)
                    if found is not None:
                        self.size -= found.content.nbytes

    def objects(self) -> Iterator[StoredObject]:
        """All objects, each once."""
        with self._lock:
            found = [StoredObject(name, each.content.nbytes, each.used_at) for name, each in self._objects.items()]
        listed = {each.name for each in found}
        yield from found
        if self.disk is not None:
            yield from (each for each in self.disk.objects() if each.name not in listed)

    def statistics(self) -> StoreStatistics:
        """Count the objects. The bound is that of memory and disk together: most objects are in both."""
        sizes = [each.size for each in self.objects()]
        return StoreStatistics(len(sizes), sum(sizes), max(self.max_bytes, 0 if self.disk is None else self.disk.max_bytes))

    def close(self) -> None:
        """Write the last objects to the disk, for at most :data:`FLUSH_SECONDS`. Closing twice is allowed."""
        if self.disk is None:
            return
        self._unwritten.put(None)
        self._writer.join(FLUSH_SECONDS)
        if self._writer.is_alive():
            logger.warning("prefix store: %d objects were not written to the disk in %g s", self._unwritten.qsize(), FLUSH_SECONDS)
        self.disk.close()

    def _write_objects(self) -> None:
        while (name := self._unwritten.get()) is not None:
            with self._disk_lock:
                self._write_object(name)

    def _write_object(self, name: str) -> None:
        with self._lock:
            found = self._objects.get(name)
            if found is None:
                return  # dropped, which is counted, or deleted
            found.awaits_disk = False
        try:
            self.counters.written += self.disk.put(name, [found.content])
            self._disk_failed = False
        except Exception as error:
            self.counters.lost += 1
            if not self._disk_failed:
                logger.warning("prefix store: objects are kept in memory alone: %s", error, exc_info=not isinstance(error, StoreError))
            self._disk_failed = True

    def _count_damaged(self, problem: str) -> None:
        """Count a damaged object. The log has the first one."""
        self.counters.damaged += 1
        if self.counters.damaged == 1:
            logger.warning("prefix store: %s; further damaged objects are counted only", problem)
