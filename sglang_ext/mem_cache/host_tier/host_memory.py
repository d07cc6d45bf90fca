"""Host memory available to this process: the free memory of the machine, or less within the limits of its control groups.

The kernel ends processes at the limit of a control group, whatever the machine has free. A group's limits apply to all groups inside it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_ext.core import OptionError

# Version 1 represents "no limit" by a number larger than any memory.
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class AvailableMemory:
    """``available`` bytes of memory, and the limiting factor in words."""

    available: int
    limit: str

    @classmethod
    def find(cls, mounts: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> "AvailableMemory":
        """The minimum over the machine and the control groups of this process, mounted at ``mounts`` and named in the file ``own``."""
        of_machine = cls(psutil.virtual_memory().available, "all that this machine has left")
        return min([of_machine, *_of_groups(mounts, own)], key=lambda found: found.available)


def check(size: int, ranks: int = 1, flag: str = "--kv-host-gb", what: str = "full KV") -> None:
    """Refuse a flag that asks for more memory than the host has: ``size`` bytes on each of ``ranks`` ranks, for ``what``.

    Raises :class:`OptionError`, which names the requested and the available memory, the limit, and the remedy.
    """
    found = AvailableMemory.find()
    if size * ranks > found.available:
        most = math.floor(found.available / ranks / 1e8) / 10  # rounded down, so that the advised size is available
        each = f" for each of {ranks} ranks, {size * ranks / 1e9:.1f} GB together," if ranks > 1 else ""
        raise OptionError(
            f"{flag} asks for {size / 1e9:.1f} GB of host memory{each} for {what}; {found.available / 1e9:.1f} GB are "
            f"available ({found.limit}): pass at most {most:.1f}, free memory, or raise that limit"
        )


def _of_groups(mounts: Path, own: Path) -> Iterator[AvailableMemory]:
    """Yield the memory available in each group of this process and each enclosing group. Nothing if there are no readable limits."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # a system without control groups
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            # With groups of version 1, those of version 2 are mounted one folder deeper.
            for root in (mounts, mounts / "unified"):
                yield from _on_the_way(root, path, ("memory.max", "memory.high"), "memory.current", "")
        elif "memory" in controllers.split(","):
            # Usage includes the groups inside it. So do the counters with the prefix "total".
            yield from _on_the_way(mounts / "memory", path, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _on_the_way(root: Path, path: str, limits: tuple[str, ...], usage: str, counters: str) -> Iterator[AvailableMemory]:
    """Walk from a group to ``root``. In a container ``path`` may be relative to the outside. Then only the root exists."""
    folder = root / path.lstrip("/")
    while True:
        found = {name: limit for name in limits if (limit := _number(folder / name)) is not None and limit < NO_LIMIT}
        used = _number(folder / usage)
        if found and used is not None:
            name = min(found, key=found.__getitem__)
            left = found[name] - used + min(used, _file_cache(folder / "memory.stat", counters))
            yield AvailableMemory(max(0, left), f"{found[name] / 1e9:.1f} GB by {folder / name}")
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _number(file: Path) -> int | None:
    """The number in a file. None if there is no such file, or its content is ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(file: Path, prefix: str) -> int:
    """Bytes of cached files, which the kernel reclaims before it ends a process."""
    try:
        counts = dict(line.split() for line in file.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
