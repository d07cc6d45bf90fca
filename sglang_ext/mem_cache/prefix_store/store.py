"""Writes pages to a prefix store and reads them, in threads, and measures how fast the store is.

A store may fail at any time. If it fails to write, nothing is written for :data:`RETRY_SECONDS`; a full disk can still be read. If it fails to
read, nothing is read for so long, and the server computes its prompts.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from sglang_ext.mem_cache.host_tier.tier import HostLinkBandwidth
from sglang_ext.mem_cache.prefix_store.backend import StoreBackend, StoreError
from sglang_ext.mem_cache.prefix_store.object_header import ObjectError
from sglang_ext.mem_cache.prefix_store.objects import StoredPage, encode_object, fetch_page, fetch_residuals

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CORES = len(os.sched_getaffinity(0))
WRITERS, READERS = max(2, CORES // 8), max(4, min(16, CORES // 2))
"""Threads that encode and write pages, and that read and decode them. As many look for pages and read anchors. A thread reads 2 to 3 GB/s of raw
pages from memory."""
RETRY_SECONDS = 5.0
"""Time without requests to a store that failed."""
RATE_DECAY = 0.8
"""Weight of earlier reads in the measured rate, with each new one."""
RATE_SECONDS = 30.0
"""Age at which the measured rate is forgotten. Otherwise a store that was slow once would never be read again."""

PageMemory = Callable[[StoredPage], torch.Tensor]
"""Returns host memory of a page's KV: [2 * layers, page_size, heads, head_dim], keys of all layers, then values."""
PageDone = Callable[[StoredPage, torch.Tensor], None]
"""Receives a restored page, and its KV."""


@dataclass
class StoreCounters:
    """Totals of one rank.

    Attributes:
        written_pages, written_bytes: Objects that were written, and their bytes.
        read_bytes: Bytes of KV of restored pages.
        read_seconds: Seconds of the threads that read them.
        bad_pages: Objects that were missing, damaged, or another page's.
        errors: Failed requests.
    """

    written_pages: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    bad_pages: int = 0
    errors: int = 0


@dataclass
class Availability:
    """Whether the store does one kind of request.

    Attributes:
        consequence: What the log says of a failure.
        failed_until: End of the pause after a failure; 0 once a request succeeded after it.
    """

    consequence: str
    failed_until: float = 0.0

    @property
    def is_available(self) -> bool:
        """Whether no request failed within the last :data:`RETRY_SECONDS`."""
        return time.monotonic() >= self.failed_until


class PageRun:
    """Pages that are being read, in the order of the prompt.

    Reading threads fill the caller's memory until :meth:`stop` returns. Afterwards the memory of pages that were not restored is free. In a run
    with anchors first, it holds the anchors of all pages once :attr:`has_anchors`. They stay until :meth:`release_anchors`.

    Attributes:
        pages: The pages.
        anchor_share: Share of a page's bytes that its anchors take. 0 in a run without anchors first.
        seconds: For each page, the seconds in which threads read and decoded it.
        stopped: Whether :meth:`stop` was called.

    Args:
        target, done: See :meth:`PrefixStore.read`.
        submit: Runs work in a reading thread. None in a run without anchors first.
    """

    def __init__(
        self, pages: Sequence[StoredPage], target: PageMemory, done: PageDone, submit: Callable[[Callable[[], None]], object] | None
    ) -> None:
        self.pages, self._target, self._done, self.anchor_share = pages, target, done, 0.0
        self.seconds = [0.0] * len(pages)
        self._states: list[bool | None] = [None] * len(pages)
        self._anchors: list[bool | None] = [None] * len(pages)
        self.stopped, self._filling = False, 0
        self._submit = submit
        # Work that overwrites anchors. None if it need not wait.
        self._waiting: list[Callable[[], None]] | None = None if submit is None else []
        # When the last anchors were there, and when they were released, in seconds.
        self._anchored_at: float | None = None
        self._released_at: float | None = None
        self._changed = threading.Condition()

    @property
    def restored(self) -> int:
        """Number of leading pages that are restored."""
        return next((i for i, state in enumerate(self._states) if not state), len(self._states))

    @property
    def ended(self) -> bool:
        """Whether no page after the leading restored ones can become useful."""
        first = next((state for state in self._states if not state), True)
        return first is not None

    @property
    def progress(self) -> float:
        """Bytes read so far, in pages."""
        anchors = sum(map(bool, self._anchors)) * self.anchor_share
        return anchors + self.restored * (1 - self.anchor_share)

    @property
    def has_anchors(self) -> bool:
        """Whether the caller's memory holds the anchors of all pages."""
        return all(self._anchors) and self._waiting is not None

    @property
    def lacks_anchors(self) -> bool:
        """Whether the anchors of a page could not be read."""
        return False in self._anchors

    @property
    def held_seconds(self) -> float:
        """Time in which the caller held the anchors of all pages, so that no page could be restored."""
        if self._anchored_at is None:
            return 0.0
        return (time.monotonic() if self._released_at is None else self._released_at) - self._anchored_at

    def release_anchors(self) -> None:
        """Let the reading threads overwrite the anchors."""
        with self._changed:
            waiting, self._waiting = self._waiting or [], None
            if self._released_at is None:
                self._released_at = time.monotonic()
        for work in waiting:
            self._submit(work)

    def when_released(self, work: Callable[[], None]) -> None:
        """Call ``work``, which overwrites anchors, once they are not needed. Called by reading threads."""
        with self._changed:
            if self._waiting is not None:
                self._waiting.append(work)
                return
        work()

    def fill(self, page: StoredPage, decode: Callable[[torch.Tensor], None]) -> bool:
        """Fill a page's memory with ``decode``, unless the run was stopped. Returns whether it is filled."""
        kv = self._target(page)
        with self._changed:
            if self.stopped:
                return False
            self._filling += 1
        try:
            decode(kv)
            self._done(page, kv)
        finally:
            with self._changed:
                self._filling -= 1
                self._changed.notify_all()
        return True

    def note(self, index: int, restored: bool) -> None:
        """Record how page ``index`` ended. Called by reading threads."""
        self._states[index] = restored

    def note_anchors(self, index: int, filled: bool) -> bool:
        """Record whether the memory of page ``index`` holds its anchors. Returns whether it was the last page."""
        with self._changed:
            self._anchors[index] = filled
            if all(self._anchors):
                self._anchored_at = time.monotonic()
            return None not in self._anchors

    def is_anchored(self, index: int) -> bool:
        """Whether the anchors of page ``index`` were read."""
        return bool(self._anchors[index])

    def stop(self) -> None:
        """Let no thread write the caller's memory any more. Waits for those that write now, but not for the store."""
        with self._changed:
            self.stopped, self._waiting = True, None
            self._changed.wait_for(lambda: not self._filling)


class PrefixStore:
    """The store of one rank. All methods may be called from any thread.

    Args:
        backend: Holds the objects.
        url: How log lines name the store.
    """

    def __init__(self, backend: StoreBackend, url: str) -> None:
        self.backend, self.url = backend, url
        self.counters = StoreCounters()
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="store-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        # Lookups and anchors, which do not wait for the residuals of earlier requests.
        self._first_readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-read-first")
        self._lock = threading.Lock()
        self._reading = Availability("prompts are computed until it answers")
        self._writing = Availability("no page is written until it takes one")
        self._bandwidth = HostLinkBandwidth(RATE_DECAY)
        self._measured_at = 0.0

    @property
    def can_read(self) -> bool:
        """Whether the store may be read."""
        return self._reading.is_available

    @property
    def can_write(self) -> bool:
        """Whether pages may be written to the store."""
        return self._writing.is_available

    @property
    def _has_failed(self) -> bool:
        """Whether requests of a kind failed, and none of this kind succeeded since. A store that fails in both ways is logged once."""
        return any(kind.failed_until for kind in (self._reading, self._writing))

    @property
    def rate(self) -> float | None:
        """Bytes of KV that a reading thread restores per second. None if no page was read in the last :data:`RATE_SECONDS`."""
        return self._bandwidth.bandwidth if time.monotonic() - self._measured_at < RATE_SECONDS else None

    def write(
        self, page: StoredPage, memory: PageMemory, ready: Callable[[], bool], intact: Callable[[], bool] = lambda: True
    ) -> "Future[bool]":
        """Write a page in a thread. The result is whether the store has it.

        Args:
            memory: The page's KV. Called once ``ready`` returns True.
            ready: Whether the page's memory is complete.
            intact: Whether the page's memory still holds what was put there. If not, the page is not written.
        """
        return self._writers.submit(self._write, page, memory, ready, intact)

    def count_run(self, names: Sequence[str]) -> "Future[int]":
        """Count in a thread how many leading ``names`` the store has. 0 if the store fails."""
        return self._first_readers.submit(lambda: self._request(self._reading, lambda: self.backend.count_run(names), 0))

    def read(self, pages: Sequence[StoredPage], target: PageMemory, done: PageDone, anchors_first: bool) -> PageRun:
        """Restore pages in threads.

        Args:
            pages: The pages, in the order of the prompt.
            target: Returns the memory that a page fills.
            done: Called with each page whose memory is filled, before it counts as restored.
            anchors_first: Whether the memory is filled with the anchors of all pages first.
        """
        run = PageRun(pages, target, done, self._readers.submit if anchors_first else None)
        for index in range(len(pages)):
            if anchors_first:
                self._first_readers.submit(self._read_anchors, run, index)
            else:
                self._readers.submit(self._read, run, index)
        return run

    def close(self) -> None:
        """End all threads, without the work that waits, and close the backend."""
        for pool in (self._writers, self._first_readers, self._readers):
            pool.shutdown(cancel_futures=True)
        self.backend.close()

    def _write(self, page: StoredPage, memory: PageMemory, ready: Callable[[], bool], intact: Callable[[], bool]) -> bool:
        while not ready():
            time.sleep(0.002)
        if not self.can_write:
            return False
        try:
            parts = encode_object(page, memory(page))
            # Afterwards: the object's own checksums are those of what was encoded.
            if not intact():
                logger.warning("sglang-ext: host memory changed before page %s was written to prefix store %s", page.name, self.url)
                return False
            is_new = self._request(self._writing, lambda: self.backend.put(page.name, parts), None)
        except Exception:
            logger.exception("sglang-ext: a page cannot be written to prefix store %s", self.url)
            return False
        if is_new:
            with self._lock:
                self.counters.written_pages += 1
                self.counters.written_bytes += sum(len(part) for part in parts)
        return is_new is not None

    def _read_anchors(self, run: PageRun, index: int) -> None:
        """Fill a page's memory with its anchors. After those of the last page, read the residuals of all pages that have anchors."""
        page = run.pages[index]
        is_filled = not run.stopped and self._attempt(run, index, lambda: self._fetch(page, partial(fetch_page, exact=False)))
        if is_filled:
            run.anchor_share = page.anchor_share
            is_filled = self._attempt(run, index, lambda: run.fill(page, page.decode_anchors))
        if not run.note_anchors(index, is_filled):
            return
        if not run.has_anchors:
            run.release_anchors()
        for each in range(len(run.pages)):
            if run.is_anchored(each):
                self._readers.submit(self._read, run, each)
            else:
                self._end_page(run, each, 0, restored=False)

    def _read(self, run: PageRun, index: int) -> None:
        """Read the bytes of a page that are missing, and restore it once its memory may be written."""
        page = run.pages[index]
        if run.stopped or run.ended or not self.can_read:
            page.release()
            run.note(index, False)
        elif self._attempt(run, index, lambda: self._fetch(page, fetch_residuals if run.is_anchored(index) else fetch_page)):
            run.when_released(partial(self._restore, run, index))
        else:
            self._end_page(run, index, 0, restored=False)

    def _restore(self, run: PageRun, index: int) -> None:
        """Restore a page whose bytes were read."""
        page = run.pages[index]
        restored = self._attempt(run, index, lambda: run.fill(page, page.restore))
        self._end_page(run, index, page.form.kv_bytes, restored)

    def _fetch(self, page: StoredPage, fetch: Callable[[StoreBackend, StoredPage], None]) -> bool:
        return self._request(self._reading, lambda: fetch(self.backend, page) is None, False)

    def _attempt(self, run: PageRun, index: int, work: Callable[[], bool]) -> bool:
        """Whether ``work`` on a page succeeds. Measures it, and deletes an object that is not the page."""
        begin = time.monotonic()
        try:
            return work()
        except ObjectError as error:
            logger.debug("sglang-ext: %s", error)
            with self._lock:
                self.counters.bad_pages += 1
            # Otherwise the page would never be written again.
            self._request(self._writing, lambda: self.backend.delete([run.pages[index].name]), None)
        except Exception:
            logger.exception("sglang-ext: a page cannot be read from prefix store %s", self.url)
        finally:
            run.seconds[index] += time.monotonic() - begin
        return False

    def _end_page(self, run: PageRun, index: int, size: int, restored: bool) -> None:
        """Record how a page ended, and measure the store. ``size``: bytes of KV that were read."""
        run.pages[index].release()
        with self._lock:
            if restored:
                self.counters.read_bytes += size
                self.counters.read_seconds += run.seconds[index]
            # A page that came too late counts: it was read.
            self._bandwidth.add(size, run.seconds[index])
            self._measured_at = time.monotonic()
        run.note(index, restored)

    def _request(self, kind: Availability, ask: Callable[[], Result], default: Result) -> Result:
        """The answer of the backend; ``default`` if it fails. After a failure the store gets no request of this kind for a while.

        Raises:
            ObjectError: ``ask`` found no object, or not the expected one. The backend works.
        """
        if not kind.is_available:
            return default
        try:
            answer = ask()
        except ObjectError:
            raise
        except Exception as error:
            # Also an error of a library that its backend does not know: it must not end the scheduler.
            with self._lock:
                self.counters.errors += 1
                is_first, kind.failed_until = not self._has_failed, time.monotonic() + RETRY_SECONDS
            if is_first:
                is_unknown = not isinstance(error, StoreError)
                logger.warning("sglang-ext: prefix store %s failed; %s: %s", self.url, kind.consequence, error, exc_info=is_unknown)
            return default
        with self._lock:
            # An answer to an earlier request does not end the pause. A full disk knows its objects and deletes them: only a new object
            # shows that it can be written.
            is_proof = kind is self._reading or answer is True
            was_failed = is_proof and 0 < kind.failed_until <= time.monotonic()
            if was_failed:
                kind.failed_until = 0.0
            is_well = was_failed and not self._has_failed
        if is_well:
            logger.info("sglang-ext: prefix store %s answers again", self.url)
        return answer
