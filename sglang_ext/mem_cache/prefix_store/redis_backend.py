"""Objects of a prefix store as keys of a Redis server.

Redis bounds its memory itself: start it with ``--maxmemory SIZE --maxmemory-policy allkeys-lru``, and without snapshots (``--save ""``)
unless the prefixes shall survive it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.prefix_store.backend import (
    NAME,
    ReadRange,
    StoredObject,
    StoreError,
    StoreStatistics,
    check_name,
)

Item, Result = TypeVar("Item"), TypeVar("Result")
PREFIX = "sglang-ext:"
"""Beginning of all keys, because other programs may use the same database."""
MAX_VALUE_BYTES = 512 * 1024 * 1024
"""Largest value of Redis."""
TIMEOUT = 5.0
"""Seconds to connect, and to wait for each reply."""
AT_ONCE = 64
"""Commands that are sent before the first reply is read. More would fill the memory of the server's reply buffers."""


class RedisBackend:
    """Objects as keys.

    Args:
        client: A client of the package ``redis`` that returns bytes.
        observer: A client whose commands do not count as use of a key, if the server supports that.
    """

    def __init__(self, client: Any, observer: Any) -> None:
        self._client, self._observer = client, observer

    @classmethod
    def from_url(cls, url: str, max_bytes: int | None) -> "RedisBackend":
        """Connect to ``redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]``, or ``redis+unix``'s form of the package ``redis``.

        Raises:
            OptionError: The URL is malformed, the package ``redis`` is not installed, or a bound is given.
            StoreError: The server does not answer.
        """
        if max_bytes is not None:
            raise OptionError(
                f"prefix store {url!r} cannot be bounded from here; start redis-server with --maxmemory and --maxmemory-policy allkeys-lru"
            )
        try:
            import redis
        except ImportError as error:
            raise OptionError(f"prefix store {url!r} needs the package redis: pip install redis") from error
        settings = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, "decode_responses": False}
        try:
            client = redis.Redis.from_url(url, **settings)
            observer = redis.Redis.from_url(url, redis_connect_func=connect_without_use, **settings)
        except ValueError as error:
            raise OptionError(f"prefix store {url!r}: {error}; pass redis://HOST:PORT/DATABASE") from error
        backend = cls(client, observer)
        backend._run("connecting", client.ping)
        return backend

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the server has it already, which then counts as used."""
        key, size = _key(name), sum(part.nbytes for part in parts)
        if size > MAX_VALUE_BYTES:
            raise StoreError(f"object {name} of {size} bytes: Redis stores at most {MAX_VALUE_BYTES}")
        if self._run(f"looking for {name}", lambda: self._client.touch(key)):
            return False
        value = b"".join(part.cast("B") for part in parts)
        return bool(self._run(f"writing {name}", lambda: self._client.set(key, value, nx=True)))

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that the server has."""
        count = 0
        for some in _batches(names):
            found = self._pipeline(self._client, "looking for objects", [("EXISTS", _key(name)) for name in some])
            if not all(found):
                return count + found.index(0)
            count += len(some)
        return count

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range. Before Redis 7.2, each read is a use."""
        client = self._client if is_use else self._observer
        filled: list[bool] = []
        for some in _batches(ranges):
            commands = [("GETRANGE", _key(each.name), each.offset, each.offset + each.memory.nbytes - 1) for each in some]
            for each, found in zip(some, self._pipeline(client, "reading objects", commands), strict=True):
                if len(found) == each.memory.nbytes:
                    each.memory.cast("B")[:] = found
                filled.append(len(found) == each.memory.nbytes)
        return filled

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for some in _batches(names):
            keys = [_key(name) for name in some]
            self._run("deleting objects", lambda keys=keys: self._client.unlink(*keys))

    def objects(self) -> Iterator[StoredObject]:
        """All objects. Before Redis 7.2, a listing is a use of each, so Redis then evicts in any order."""
        for some in _batches(self._keys()):
            # Times first: for an older server, the question for a size is a use.
            idle = self._pipeline(self._observer, "listing objects", [("OBJECT", "IDLETIME", key) for key in some], optional=True)
            sizes = self._pipeline(self._observer, "listing objects", [("STRLEN", key) for key in some])
            now = time.time()
            for key, size, seconds in zip(some, sizes, idle, strict=True):
                # With a policy that counts uses, Redis does not know the time.
                used_at = now - seconds if isinstance(seconds, int) else None
                if size:
                    yield StoredObject(key.decode().removeprefix(PREFIX), size, used_at)

    def statistics(self) -> StoreStatistics:
        """Count the keys. The bound is the server's, for all its databases."""
        sizes = [found.size for found in self.objects()]
        bound = self._run("reading maxmemory", lambda: self._client.info("memory")).get("maxmemory") or None
        return StoreStatistics(len(sizes), sum(sizes), bound)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._observer.close()

    def _keys(self) -> Iterator[bytes]:
        scan = self._client.scan_iter(match=f"{PREFIX}*", count=1000)
        while (key := self._run("listing objects", lambda: next(scan, None))) is not None:
            if NAME.fullmatch(key.decode(errors="replace").removeprefix(PREFIX)):
                yield key

    def _pipeline(self, client: Any, what: str, commands: Sequence[tuple[Any, ...]], optional: bool = False) -> list[Any]:
        """Run several commands in one message. Returns their replies.

        Args:
            client: Sends them.
            what: For the error.
            commands: Their words.
            optional: A refused command has its error as its reply.
        """
        pipeline = client.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        return self._run(what, lambda: pipeline.execute(raise_on_error=not optional))

    def _run(self, what: str, call: Callable[[], Result]) -> Result:
        import redis

        try:
            return call()
        except redis.RedisError as error:
            raise StoreError(f"{what}: Redis: {error}") from error


def connect_without_use(connection: Any) -> None:
    """Set up a connection of the package ``redis`` whose commands do not count as use of a key. A server before 7.2 refuses that."""
    import redis

    connection.on_connect()
    connection.send_command("CLIENT", "NO-TOUCH", "ON")
    with suppress(redis.ResponseError):
        connection.read_response()


def _key(name: str) -> str:
    return PREFIX + check_name(name)


def _batches(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Items in groups of :data:`AT_ONCE`; the last group may be smaller."""
    remaining = iter(items)
    while batch := tuple(islice(remaining, AT_ONCE)):
        yield batch
