"""Objects of a prefix store as files of one folder, which several servers may share.

    FOLDER/NAMESPACE/HA/HASH     an object; HA are the first two digits of HASH
    FOLDER/.lock                 held while objects are deleted to make room
    FOLDER/.new/                 objects that are being written

A write fills a new file and then renames it, so that readers see whole objects only. Links in the folder are not followed. Otherwise everybody
who may write to the folder could direct writes elsewhere. A removed folder is created again by the next write. A file's time of modification
is when its object was last used. When nine tenths of the bound are in use, the objects that were not used for longest are deleted, under the
lock, until eight tenths are left. Reads need no lock. A server counts the folder again after it has written a fiftieth of the bound. So five
servers never exceed the bound.
"""

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

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

DEFAULT_MAX_BYTES = 64 * 10**9
"""Bound of a folder if none is given."""
FULL_SHARE, KEPT_SHARE = 0.9, 0.8
"""Share of the bound from which old objects are deleted, and the share that is left then. The rest is for writes that were not counted."""
COUNTED_SHARE = 0.02
"""Share of the bound that one server writes before it counts the folder again, because others write, too."""
TOUCH_SECONDS = 60.0
"""A read does not record that an object is used if that was recorded in this time."""
LOCK_SECONDS, LOCK_PAUSE = 5.0, 0.02
"""Longest wait for the lock, and seconds between attempts. A stopped process may hold it for ever. Then nothing is written."""
ABANDONED_SECONDS = 3600.0
"""Age at which an unfinished file is another server's that ended while it wrote."""
NAMESPACE = re.compile(r"[0-9a-f]{16,64}")
"""Names of the folders that hold objects. Other folders are left alone."""
NOT_AN_OBJECT = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)
"""Errors of opening a file that mean that there is no object: it was deleted, or the path is a link, a folder or a device."""


class FileBackend:
    """Objects as files.

    Args:
        folder: The folder. It is created if it does not exist.
        max_bytes: Bytes at which old objects are deleted.

    Raises:
        OptionError: The folder cannot be created or written, or the bound is not positive.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes <= 0:
            raise OptionError(f"prefix store {folder}: the bound is {max_bytes} bytes; pass a positive number")
        self.folder = folder
        self.max_bytes = max_bytes
        self._new = folder / ".new"
        # flock is per open file, so threads of one server need a lock of their own.
        self._thread_lock = threading.Lock()
        try:
            os.close(self._open_lock())
        except OSError as error:
            raise OptionError(f"prefix store {folder}: {error.strerror}; pass a folder that this user may write") from error
        # Bytes of the folder when it was last counted, and bytes that were written since then.
        self._counted: int | None = None
        self._written = 0

    @classmethod
    def from_url(cls, url: str, max_bytes: int | None) -> "FileBackend":
        """Open ``file:FOLDER`` or ``file:///FOLDER``, each with ``?max-gb=GB`` if the default bound does not fit.

        Args:
            url: The URL.
            max_bytes: The bound. None: that of the URL, or else :data:`DEFAULT_MAX_BYTES`.

        Raises:
            OptionError: The URL has no folder, names a host, or has another setting than a bound; also as the constructor.
        """
        folder, bound = cls.split_url(url)
        return cls(folder, bound if max_bytes is None else max_bytes)

    @staticmethod
    def split_url(url: str) -> tuple[Path, int]:
        """The folder of a URL, and its bound in bytes. Raises ``OptionError`` as :meth:`from_url`. Creates nothing."""
        path, _, setting = url.removeprefix("file:").partition("?")
        bound = _bound(url, setting) if setting else DEFAULT_MAX_BYTES
        if path.startswith("//"):
            host, slash, rest = path[2:].partition("/")
            if host not in ("", "localhost"):
                raise OptionError(f"prefix store {url!r} names the host {host!r}; mount its folder, and pass file:FOLDER")
            path = slash + rest
        if not path:
            raise OptionError(f"prefix store {url!r} names no folder; pass file:FOLDER")
        return Path(path).expanduser().absolute(), bound

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store an object, whole or not at all. Returns False if the folder has it already, which then counts as used."""
        path = self._path(name)
        size = sum(part.nbytes for part in parts)
        largest = min(MAX_OBJECT_BYTES, int(KEPT_SHARE * self.max_bytes))
        if size > largest:
            raise StoreError(f"object {name} of {size} bytes: at most {largest} fit")
        if self._touch(path):
            return False
        temporary = self._new / uuid4().hex
        try:
            if self._has_link(path):
                raise StoreError(f"writing {name} to {self.folder}: a folder on its path is a link; delete the link")
            self._make_room(size)
            self._create_new()
            self._write(temporary, parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.rename(temporary, path)
        except OSError as error:
            raise StoreError(f"writing {name} to {self.folder}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                temporary.unlink()
        return True

    def count_run(self, names: Sequence[str]) -> int:
        """Number of leading ``names`` that are in the folder."""
        for count, name in enumerate(names):
            if not self._is_object(self._path(name)):
                return count
        return len(names)

    def size(self, name: str) -> int | None:
        """Bytes of an object. None if it is not in the folder."""
        path = self._path(name)
        try:
            return path.lstat().st_size if self._is_object(path) else None
        except OSError:
            return None

    def read(self, ranges: Sequence[ReadRange], is_use: bool = True) -> list[bool]:
        """Fill the memory of each range."""
        return [self._read(each, is_use) for each in ranges]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for name in names:
            path = self._path(name)
            try:
                if not self._has_link(path):
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"deleting {name} from {self.folder}: {error.strerror}") from error

    def objects(self) -> Iterator[StoredObject]:
        """All objects."""
        try:
            for _, found in self._files():
                yield found
        except OSError as error:
            raise StoreError(f"listing {self.folder}: {error.strerror}") from error

    def statistics(self) -> StoreStatistics:
        """Count the files."""
        sizes = [found.size for found in self.objects()]
        return StoreStatistics(len(sizes), sum(sizes), self.max_bytes)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> Path:
        namespace, _, page = check_name(name).partition("/")
        return self.folder / namespace / page[:2] / page

    def _has_link(self, path: Path) -> bool:
        """Whether the folder of the namespace, or the one of the object, is a link."""
        return path.parent.is_symlink() or path.parent.parent.is_symlink()

    def _is_object(self, path: Path) -> bool:
        """Whether a path is a file that can be an object, and no link."""
        try:
            status = path.lstat()
            return stat.S_ISREG(status.st_mode) and status.st_size <= MAX_OBJECT_BYTES and not self._has_link(path)
        except OSError:
            return False

    def _read(self, wanted: ReadRange, is_use: bool) -> bool:
        path = self._path(wanted.name)
        try:
            if self._has_link(path):
                return False
            # O_NONBLOCK: opening a pipe that somebody put there must not wait.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in NOT_AN_OBJECT:
                return False
            raise StoreError(f"reading {wanted.name} from {self.folder}: {error.strerror}") from error
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or not wanted.offset + wanted.memory.nbytes <= status.st_size <= MAX_OBJECT_BYTES:
                return False
            if is_use and time.time() - status.st_mtime > TOUCH_SECONDS:
                # Another user's file may be read without being writable.
                with suppress(OSError):
                    os.utime(file)
            return _read_exactly(file, wanted.memory.cast("B"), wanted.offset)
        except OSError as error:
            raise StoreError(f"reading {wanted.name} from {self.folder}: {error.strerror}") from error
        finally:
            os.close(file)

    def _touch(self, path: Path) -> bool:
        """Record that an object is used. Returns False if it is not there."""
        if not self._is_object(path):
            return False
        try:
            os.utime(path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _write(self, path: Path, parts: Sequence[memoryview]) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                left = part.cast("B")
                while left.nbytes:
                    left = left[os.write(file, left) :]
        finally:
            os.close(file)

    def _make_room(self, size: int) -> None:
        """Delete the objects that were not used for longest, if the folder would be full."""
        with self._thread_lock:
            self._written += size
            is_known = self._counted is not None and self._written < COUNTED_SHARE * self.max_bytes
            if is_known and self._counted + self._written <= FULL_SHARE * self.max_bytes:
                return
            with self._only_server():
                self._counted, self._written = self._delete_oldest(size), size

    def _delete_oldest(self, size: int) -> int:
        """Delete old objects if ``size`` more bytes do not fit. Returns the bytes that are left."""
        self._delete_abandoned()
        files = list(self._files())
        total = sum(found.size for _, found in files)
        if total + size <= FULL_SHARE * self.max_bytes:
            return total
        for path, found in sorted(files, key=lambda each: each[1].used_at or 0.0):
            if total + size <= KEPT_SHARE * self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= found.size
        return total

    def _delete_abandoned(self) -> None:
        for path in self._new.iterdir():
            try:
                if time.time() - path.lstat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue

    @contextmanager
    def _only_server(self) -> Iterator[None]:
        """Hold the lock of the folder. Raises OSError if another process holds it for :data:`LOCK_SECONDS`."""
        lock, until = self._open_lock(), time.monotonic() + LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        problem = f"another process holds {self.folder / '.lock'} for {LOCK_SECONDS:g} s; end it if it is stopped"
                        raise OSError(errno.EWOULDBLOCK, problem) from None
                time.sleep(LOCK_PAUSE)
            yield
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        """Open the lock's file. The file and the folder are created if they do not exist."""
        self._create_new()
        # Opened each time, because a folder that was removed and created again has another lock.
        return os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def _create_new(self) -> None:
        """Create the folder of unfinished objects. Raises OSError if it is a link: old files behind it would be deleted."""
        self._new.mkdir(parents=True, exist_ok=True)
        if self._new.is_symlink():
            raise OSError(errno.ELOOP, f"{self._new} is a link; delete the link")

    def _files(self) -> Iterator[tuple[Path, StoredObject]]:
        """All objects with their paths. Other files are left alone."""
        for namespace in _folders(self.folder):
            # The root of a disk has lost+found, which only root may read.
            if NAMESPACE.fullmatch(namespace.name) is None:
                continue
            for group in _folders(namespace.path):
                for file in _entries(group.path):
                    name = f"{namespace.name}/{file.name}"
                    if NAME.fullmatch(name) is None or file.name[:2] != group.name:
                        continue
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield Path(file.path), StoredObject(name, status.st_size, status.st_mtime)


def _folders(path: str | Path) -> Iterator["os.DirEntry[str]"]:
    return (each for each in _entries(path) if each.is_dir(follow_symlinks=False))


def _entries(path: str | Path) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _bound(url: str, setting: str) -> int:
    """Bytes of ``max-gb=GB``."""
    name, _, value = setting.partition("=")
    try:
        if name != "max-gb":
            raise ValueError(name)
        return int(float(value) * 10**9)
    except (ValueError, OverflowError) as error:
        raise OptionError(f"prefix store {url!r} has the setting {setting!r}; pass file:FOLDER or file:FOLDER?max-gb=GB") from error


def _read_exactly(file: int, memory: memoryview, offset: int) -> bool:
    """Fill memory from a file. Returns False if the file ends before."""
    while memory.nbytes:
        count = os.preadv(file, [memory], offset)
        if count == 0:
            return False
        memory, offset = memory[count:], offset + count
    return True
