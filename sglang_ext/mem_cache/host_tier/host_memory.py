"""Host memory that this process may still take: what the machine has, or what its control groups leave of that.

In a container, or in a service with a limit, the kernel ends processes at the limit of a control group, however much the
machine has. A group's limits hold for all groups inside it, so that all on the way to the root are looked at.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_ext.core import OptionError

# Version 1 says "no limit" by a number that no machine has.
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class AvailableMemory:
    """What may still be taken.

    Attributes:
        available: bytes.
        limit: what says so, in words.
    """

    available: int
    limit: str

    @classmethod
    def find(cls, mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> "AvailableMemory":
        """The least of what the machine and the groups of this process leave.

        Args:
            mounts: where control groups are mounted.
            own: the file that names this process's groups.
        """
        of_machine = cls(psutil.virtual_memory().available, "all that this machine has left")
        return min([of_machine, *_of_groups(mounts, own)], key=lambda found: found.available)


def check(size: int, ranks: int = 1, flag: str = "--kv-host-gb", what: str = "full KV") -> None:
    """Refuse a flag that asks for memory that the host lacks.

    Args:
        size: bytes that each rank takes.
        ranks: of this host.
        flag: that says how much, in GB.
        what: what it is for, in words.

    Raises:
        OptionError: names what is asked for, what there is, what limits it, and what to do.
    """
    found = AvailableMemory.find()
    if size * ranks > found.available:
        most = math.floor(found.available / ranks / 1e8) / 10  # what is advised is there
        each = f" for each of {ranks} ranks, {size * ranks / 1e9:.1f} GB together," if ranks > 1 else ""
        raise OptionError(
            f"{flag} asks for {size / 1e9:.1f} GB of host memory{each} for {what}; {found.available / 1e9:.1f} GB are "
            f"available ({found.limit}): pass at most {most:.1f}, free memory, or raise that limit"
        )


def _of_groups(mounts: Path, own: Path) -> Iterator[AvailableMemory]:
    """What each group of this process, and each around it, leaves; nothing where there are no limits to read."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # a system without control groups
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            # Beside groups of version 1 those of version 2 are mounted one folder deeper.
            for root in (mounts, mounts / "unified"):
                yield from _on_the_way(root, path, _second_version)
        elif "memory" in controllers.split(","):
            yield from _on_the_way(mounts / "memory", path, _first_version)


def _on_the_way(root: Path, path: str, read: Callable[[Path], AvailableMemory | None]) -> Iterator[AvailableMemory]:
    """From a group to ``root``. In a container ``path`` may be as seen from outside: then only the root is there."""
    folder = root / path.lstrip("/")
    while True:
        found = read(folder)
        if found is not None:
            yield found
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _second_version(folder: Path) -> AvailableMemory | None:
    limits = {name: limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None}
    used = _number(folder / "memory.current")
    if not limits or used is None:
        return None
    name = min(limits, key=limits.__getitem__)
    return _left(folder / name, limits[name], used, _file_cache(folder / "memory.stat", ""))


def _first_version(folder: Path) -> AvailableMemory | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= NO_LIMIT:
        return None
    # Usage is of the group with those inside it; so is what begins with "total".
    return _left(folder / "memory.limit_in_bytes", limit, used, _file_cache(folder / "memory.stat", "total_"))


def _left(file: Path, limit: int, used: int, reclaimable: int) -> AvailableMemory:
    return AvailableMemory(max(0, limit - used + min(used, reclaimable)), f"{limit / 1e9:.1f} GB by {file}")


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(file: Path, prefix: str) -> int:
    """Bytes of cached files, which the kernel takes back before it ends a process."""
    try:
        counts = dict(line.split() for line in file.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
