"""The interface of a prefix store's backend, and the backend of a URL.

A backend holds objects. An object is a name and bytes that never change: the name says what the bytes are. So a reader needs no lock, and
two servers that write one object write the same bytes. A backend may lose any object at any time; readers compute what they do not find.
"""

import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from sglang_ext.core import OptionError

NAME = re.compile(r"[0-9a-f]{16,64}/[0-9a-f]{64}")
"""Names of objects: the namespace and the hash of a page, in hexadecimal digits. So a name is safe in a path, a key and a URL."""
UNIT = 64
"""Tokens of a store page, unless the server's pages have more."""
MAX_OBJECT_BYTES = 1 << 30
"""Largest object. A larger one is another program's, and is not read."""


class StoreError(RuntimeError):
    """The backend failed. What the caller asked for is not done, and may be tried again."""


@dataclass(frozen=True)
class ReadRange:
    """A part of an object that is read into memory of the caller.

    Attributes:
        name: Name of the object.
        offset: Its first byte.
        memory: Writable bytes, which are filled to their end.
    """

    name: str
    offset: int
    memory: memoryview


@dataclass(frozen=True)
class StoredObject:
    """An object of a listing.

    Attributes:
        name: Its name.
        size: Its bytes.
        used_at: When it was last written or read, in seconds since 1970. None if the backend does not know.
    """

    name: str
    size: int
    used_at: float | None


@dataclass(frozen=True)
class StoreStatistics:
    """The contents of a backend.

    Attributes:
        objects: Number of objects.
        size: Their bytes.
        max_size: Bytes at which old objects are deleted. None if the store behind the backend decides that.
    """

    objects: int
    size: int
    max_size: int | None


class StoreBackend(Protocol):
    """Holds objects. Every method may be called from any thread, and raises :class:`StoreError` if the store fails."""

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the store has it already.

        Args:
            name: Its name.
            parts: Its bytes, which are joined in this order.
        """
        ...

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that the store has: the pages of a prefix that can be read."""
        ...

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range. Returns for each whether it was filled; the memory of the others may have changed.

        Without ``is_use`` the objects do not count as used, if the store supports that.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Names that the store lacks are ignored."""
        ...

    def objects(self) -> Iterator[StoredObject]:
        """All objects, in any order. Objects that come or go meanwhile may be missing."""
        ...

    def statistics(self) -> StoreStatistics:
        """Count the objects."""
        ...

    def close(self) -> None:
        """Release connections and files. Closing twice is allowed."""
        ...


def check_name(name: str) -> str:
    """Return a name of an object.

    Raises:
        ValueError: It is not a namespace and a page's hash.
    """
    if NAME.fullmatch(name) is None:
        raise ValueError(f"object {name!r}: pass 16 to 64 hexadecimal digits, a slash, and the 64 digits of a page's hash")
    return name


BACKENDS = {
    "file": ("file:FOLDER", "mem_cache.prefix_store.file_backend.FileBackend"),
    "tcp": ("tcp://ADDRESS:PORT?keys=FILE", "managers.store_server.tcp_backend.TcpBackend"),
    "redis": ("redis://HOST:PORT/DATABASE", "mem_cache.prefix_store.redis_backend.RedisBackend"),
    "mooncake": ("mooncake://MASTER:PORT", "mem_cache.prefix_store.mooncake_backend.MooncakeBackend"),
    "s3": ("s3://BUCKET/PREFIX?endpoint=URL", "mem_cache.prefix_store.s3_backend.S3Backend"),
}
"""For each scheme of a URL the form of its URLs, and the class of the backend, which is imported if a URL needs it.

So this module imports no library of a store, and nothing above it."""


def check_url(url: str) -> None:
    """Raise ``OptionError`` unless a backend has the scheme of ``url``, and its host and port can be read."""
    problem = ""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        problem = f"{error}; "
    if problem or url.partition(":")[0] not in BACKENDS:
        raise OptionError(f"--kv-store {url!r}: {problem}pass one of {', '.join(form for form, _ in BACKENDS.values())}")


def open_backend(url: str, max_bytes: int | None = None) -> StoreBackend:
    """Open the backend of a URL.

    Args:
        url: For example ``file:/mnt/prefixes``.
        max_bytes: Bytes at which old objects are deleted. None: the default of the backend.

    Raises:
        OptionError: The URL is malformed, its library is not installed, or the backend cannot be bounded.
        StoreError: The store cannot be reached.
    """
    check_url(url)
    _, name = BACKENDS[url.partition(":")[0]]
    return pkgutil.resolve_name(f"sglang_ext.{name}").from_url(url, max_bytes)
