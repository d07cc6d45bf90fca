"""Objects of a prefix store in a Mooncake store: memory of several hosts behind one master.

Start ``mooncake_master``, which bounds the store and deletes old objects, and on each host that gives memory
``python -m mooncake.mooncake_store_service``. A server of SGLang gives none, so that it can end without losing objects.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.prefix_store.backend import (
    ReadRange,
    StoredObject,
    StoreError,
    StoreStatistics,
    check_name,
)

PREFIX = "sglang-ext:"
"""Beginning of all keys, because SGLang's HiCache may use the same store."""
BUFFER_BYTES = 64 << 20
"""Memory of a client through which objects are written and read, and so the largest object. Mooncake uses registered memory only."""
METADATA = "P2PHANDSHAKE"
"""Mooncake's name for hosts that exchange their addresses themselves."""


class MooncakeBackend:
    """Objects in a Mooncake store.

    Args:
        store: A ``MooncakeDistributedStore`` that is set up.
    """

    def __init__(self, store: Any) -> None:
        import numpy as np

        self._store = store
        self._buffer = np.empty(BUFFER_BYTES, np.uint8)
        self._bytes = memoryview(self._buffer)
        self._lock = threading.Lock()  # of the buffer
        self._is_open = True
        _check(store.register_buffer(self._buffer.ctypes.data, BUFFER_BYTES), "registering memory")

    @classmethod
    def from_url(cls, url: str, max_bytes: int | None) -> "MooncakeBackend":
        """Connect to ``mooncake://MASTER:PORT[?host=THIS_HOST][&protocol=tcp|rdma][&devices=NAMES]``.

        Raises:
            OptionError: The URL is malformed, Mooncake is not installed, or a bound is given.
            StoreError: The master does not answer.
        """
        if max_bytes is not None:
            raise OptionError(f"prefix store {url!r} cannot be bounded from here; Mooncake's master bounds it by the memory that hosts give")
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        host, protocol, devices = query.pop("host", "127.0.0.1"), query.pop("protocol", "tcp"), query.pop("devices", "")
        if not parts.netloc or parts.path.strip("/") or query or protocol not in ("tcp", "rdma"):
            raise OptionError(
                f"prefix store {url!r}: pass mooncake://MASTER:PORT?host=THIS_HOST&protocol=tcp or rdma&devices=NAMES; all but MASTER may be left out"
            )
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise OptionError(
                f"prefix store {url!r} needs Mooncake ({error}): pip install mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine beside "
                "CUDA; Debian's packages libibverbs1, libnl-3-200 and libnl-route-3-200 have the libraries that it loads"
            ) from error
        store = MooncakeDistributedStore()
        master = parts.netloc if parts.port else f"{parts.netloc}:50051"
        _check(store.setup(host, METADATA, 0, BUFFER_BYTES, protocol, devices, master), f"connecting to {master}")
        return cls(store)

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the store has it already."""
        key, size = _key(name), sum(part.nbytes for part in parts)
        if size > BUFFER_BYTES:
            raise StoreError(f"object {name} of {size} bytes: at most {BUFFER_BYTES} are stored")
        if self._exist([key])[0]:
            return False
        _check(self._store.put_parts(key, *parts), f"writing {name}")
        return True

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that the store has."""
        found = self._exist([_key(name) for name in names])
        return len(names) if all(found) else found.index(False)

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range. Each read is a use."""
        filled: list[bool] = []
        together: list[ReadRange] = []
        size = 0
        for each in ranges:
            if each.memory.nbytes > BUFFER_BYTES:
                raise StoreError(f"reading {each.memory.nbytes} bytes of {each.name}: at most {BUFFER_BYTES} are stored")
            if size + each.memory.nbytes > BUFFER_BYTES:
                filled += self._read_together(together)
                together, size = [], 0
            together.append(each)
            size += each.memory.nbytes
        return filled + self._read_together(together)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, also those that somebody reads."""
        for name in names:
            if self._store.is_exist(_key(name)) == 1:
                _check(self._store.remove(_key(name), True), f"deleting {name}")

    def objects(self) -> Iterator[StoredObject]:
        """Mooncake's clients cannot list objects.

        Raises:
            StoreError: Always.
        """
        raise StoreError("a Mooncake store cannot be listed by its clients; its master counts objects at http://MASTER:9003/metrics")

    def statistics(self) -> StoreStatistics:
        """As :meth:`objects`."""
        raise StoreError("the objects of a Mooncake store cannot be listed or counted by its clients; see http://MASTER:9003/metrics")

    def close(self) -> None:
        """Leave the store."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._store.unregister_buffer(self._buffer.ctypes.data)
                self._store.close()

    def _exist(self, keys: list[str]) -> list[bool]:
        found = self._store.batch_is_exist(keys) if keys else []
        if any(each < 0 for each in found):
            raise StoreError(f"looking for objects: Mooncake's error {min(found)}")
        return [each == 1 for each in found]

    def _read_together(self, ranges: Sequence[ReadRange]) -> list[bool]:
        """Read ranges that fit the buffer together."""
        starts = [0]
        for each in ranges:
            starts.append(starts[-1] + each.memory.nbytes)
        with self._lock:
            counts = self._store.get_into_ranges(
                [self._buffer.ctypes.data],
                [[_key(each.name) for each in ranges]],
                [[[start] for start in starts[:-1]]],
                [[[each.offset] for each in ranges]],
                [[[each.memory.nbytes] for each in ranges]],
            )
            filled = []
            for each, start, (count,) in zip(ranges, starts, counts[0], strict=False):
                if count == each.memory.nbytes:
                    each.memory.cast("B")[:] = self._bytes[start : start + count]
                filled.append(count == each.memory.nbytes)
        return filled


def _key(name: str) -> str:
    return PREFIX + check_name(name).replace("/", ":")


def _check(code: int, what: str) -> None:
    """Raise the error that Mooncake returned as a number."""
    if code < 0:
        raise StoreError(f"{what}: Mooncake's error {code}")
