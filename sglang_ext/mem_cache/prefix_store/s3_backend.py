"""Objects of a prefix store as objects of an S3 bucket.

The bucket bounds itself: give it a lifecycle rule that deletes objects some days after they were written. Credentials and the region come from
the environment or from the files of the AWS command line, as for every program that uses ``boto3``.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.prefix_store.backend import (
    MAX_OBJECT_BYTES,
    NAME,
    ReadRange,
    StoredObject,
    StoreError,
    StoreStatistics,
    check_name,
)

Result = TypeVar("Result")
THREADS = 16
"""Requests at once: each takes milliseconds, and most of that is waiting."""
TIMEOUT = 5.0
"""Seconds to connect, and to wait for each part of an answer."""
DELETED_AT_ONCE = 1000
"""Most names of one request that deletes, by S3's rules."""
MISSING = ("404", "NoSuchKey", "NotFound", "InvalidRange", "416")
"""Error codes that mean that there is no such object, or that it is too short."""


class S3Backend:
    """Objects in a bucket.

    Args:
        client: A client of ``boto3`` for S3.
        bucket: Name of the bucket.
        prefix: Beginning of all keys, empty or with a slash at its end.
    """

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._pool = ThreadPoolExecutor(THREADS, "prefix-store-s3")

    @classmethod
    def from_url(cls, url: str, max_bytes: int | None) -> "S3Backend":
        """Connect to ``s3://BUCKET[/PREFIX][?endpoint=URL]``.

        Raises:
            OptionError: The URL is malformed, the package ``boto3`` is not installed, or a bound is given.
            StoreError: The bucket cannot be reached, or does not exist.
        """
        if max_bytes is not None:
            raise OptionError(f"prefix store {url!r} cannot be bounded from here; give the bucket a lifecycle rule")
        parts = urlsplit(url)
        query = parse_qs(parts.query, keep_blank_values=True)
        endpoint = query.pop("endpoint", [None])[-1]
        if not parts.netloc or query or (endpoint is not None and not endpoint.startswith(("http://", "https://"))):
            raise OptionError(f"prefix store {url!r}: pass s3://BUCKET/PREFIX?endpoint=http://HOST:PORT; PREFIX and endpoint may be left out")
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise OptionError(f"prefix store {url!r} needs the package boto3: pip install boto3") from error
        config = Config(
            connect_timeout=TIMEOUT, read_timeout=TIMEOUT, max_pool_connections=THREADS, retries={"max_attempts": 2, "mode": "standard"}
        )
        prefix = parts.path.strip("/")
        try:
            client = boto3.client("s3", endpoint_url=endpoint, config=config)
        except Exception as error:  # botocore's errors for missing regions and the like have no common class with ValueError
            raise OptionError(f"prefix store {url!r}: {error}") from error
        backend = cls(client, parts.netloc, f"{prefix}/" if prefix else "")
        backend._run("connecting", lambda: client.head_bucket(Bucket=parts.netloc))
        return backend

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the bucket has it already."""
        size = sum(part.nbytes for part in parts)
        if size > MAX_OBJECT_BYTES:
            raise StoreError(f"object {name} of {size} bytes: at most {MAX_OBJECT_BYTES} are stored")
        if self._exists(name):
            return False
        body = b"".join(part.cast("B") for part in parts)
        self._run(f"writing {name}", lambda: self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=body))
        return True

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that the bucket has."""
        for first in range(0, len(names), THREADS):
            found = list(self._pool.map(self._exists, names[first : first + THREADS]))
            if not all(found):
                return first + found.index(False)
        return len(names)

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range. S3 records no use."""
        return list(self._pool.map(self._read, ranges))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for first in range(0, len(names), DELETED_AT_ONCE):
            keys = [{"Key": self._key(name)} for name in names[first : first + DELETED_AT_ONCE]]
            request = {"Bucket": self._bucket, "Delete": {"Objects": keys, "Quiet": True}}
            answer = self._run("deleting objects", lambda request=request: self._client.delete_objects(**request))
            if errors := answer.get("Errors"):
                raise StoreError(f"{len(errors)} of {len(keys)} objects were not deleted: S3: {errors[0].get('Message')}")

    def objects(self) -> Iterator[StoredObject]:
        """All objects. S3 knows when they were written, not when they were read."""
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix))
        while (page := self._run("listing objects", lambda: next(pages, None))) is not None:
            for found in page.get("Contents", ()):
                name = found["Key"].removeprefix(self._prefix)
                if NAME.fullmatch(name):
                    yield StoredObject(name, found["Size"], found["LastModified"].timestamp())

    def statistics(self) -> StoreStatistics:
        """Count the objects."""
        sizes = [found.size for found in self.objects()]
        return StoreStatistics(len(sizes), sum(sizes), None)

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _exists(self, name: str) -> bool:
        key = self._key(name)
        return self._run(f"looking for {name}", lambda: self._client.head_object(Bucket=self._bucket, Key=key), missing=None) is not None

    def _read(self, wanted: ReadRange) -> bool:
        key, size = self._key(wanted.name), wanted.memory.nbytes
        span = f"bytes={wanted.offset}-{wanted.offset + size - 1}"

        def fill() -> bool:
            body = self._client.get_object(Bucket=self._bucket, Key=key, Range=span)["Body"]
            memory, count = wanted.memory.cast("B"), 0
            with body:
                while count < size and (new := body.readinto(memory[count:])):
                    count += new
            return count == size

        return self._run(f"reading {wanted.name}", fill, missing=False)

    def _run(self, what: str, call: Callable[[], Result], **missing: Any) -> Result:
        """Call S3.

        Args:
            what: For the error.
            call: The call.
            missing: With ``missing=VALUE``, the value is returned if there is no such object.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except ClientError as error:
            if missing and error.response.get("Error", {}).get("Code") in MISSING:
                return missing["missing"]
            raise StoreError(f"{what}: S3: {error}") from error
        except (BotoCoreError, HTTPError, OSError) as error:
            raise StoreError(f"{what}: S3: {error}") from error
