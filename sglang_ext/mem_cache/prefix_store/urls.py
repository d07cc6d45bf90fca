"""Opens the backend of a prefix store's URL. A backend's library is imported if a URL needs it."""

from collections.abc import Callable

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.prefix_store.backend import StoreBackend


def _open_file(url: str, max_bytes: int | None) -> StoreBackend:
    from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend

    return FileBackend.from_url(url, max_bytes)


def _open_redis(url: str, max_bytes: int | None) -> StoreBackend:
    from sglang_ext.mem_cache.prefix_store.redis_backend import RedisBackend

    return RedisBackend.from_url(url, max_bytes)


def _open_s3(url: str, max_bytes: int | None) -> StoreBackend:
    from sglang_ext.mem_cache.prefix_store.s3_backend import S3Backend

    return S3Backend.from_url(url, max_bytes)


def _open_mooncake(url: str, max_bytes: int | None) -> StoreBackend:
    from sglang_ext.mem_cache.prefix_store.mooncake_backend import MooncakeBackend

    return MooncakeBackend.from_url(url, max_bytes)


BACKENDS: dict[str, tuple[str, Callable[[str, int | None], StoreBackend]]] = {
    "file": ("file:FOLDER", _open_file),
    "redis": ("redis://HOST:PORT/DATABASE", _open_redis),
    "mooncake": ("mooncake://MASTER:PORT", _open_mooncake),
    "s3": ("s3://BUCKET/PREFIX?endpoint=URL", _open_s3),
}
"""For each scheme of a URL the form of its URLs, and a function that opens one. A backend's library is imported if a URL needs it."""


def check_url(url: str) -> None:
    """Raise ``OptionError`` unless a backend has the scheme of ``url``."""
    if url.partition(":")[0] not in BACKENDS:
        raise OptionError(f"--kv-store {url!r}: pass one of {', '.join(form for form, _ in BACKENDS.values())}")


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
    return BACKENDS[url.partition(":")[0]][1](url, max_bytes)
