"""Host memory available to this process: the machine's, or the remainder of its control groups.

A container, systemd unit or cluster job is held to the limits of its control group and of every enclosing group; the
kernel's figures for the whole machine then overstate what is available. Versions 1 and 2 are read, and both where both
are mounted. Without control groups (Windows, macOS) the machine's figures apply.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# Memory that the kernel reclaims by itself: clean file pages, and its own caches.
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
NOT_YET = ("file_dirty", "file_writeback", "dirty", "writeback")
NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes available now, and in total."""

    available: int
    total: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The machine's memory, or less where a control group allows less. `root`: parent directory of /proc and /sys."""
    machine = psutil.virtual_memory()
    available, total = int(machine.available), int(machine.total)
    for limit, used in _limits(root):
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return HostMemory(available, total)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use that cannot be reclaimed) of every control group of this process that has a limit."""
    for version, group, top in _groups(root):
        while True:
            if (found := _limit(group, version)) is not None:
                yield found
            if group == top or top not in group.parents:
                break
            group = group.parent


def _groups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yields (version, folder of this process's group, folder of the topmost visible group) of each hierarchy."""
    own: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, there, after = line.partition(" - ")
        if not there or before.count(" ") < 4:
            continue
        kind, options = after.split(" ")[0], after.split(" ")[-1].split(",")
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options else 0
        if version not in own:
            continue
        mounted_from, mounted_at = before.split(" ")[3:5]
        top = root / _unescaped(mounted_at).lstrip("/")
        # In a container's own mount, the process's path starts at the mount, or is not in it at all.
        its, base = PurePosixPath(own[version]), PurePosixPath(_unescaped(mounted_from))
        inside = its.relative_to(base) if its.is_relative_to(base) else PurePosixPath(str(its).lstrip("/"))
        group = top / inside
        yield version, group if ".." not in inside.parts and group.is_dir() else top, top


def _limit(group: Path, version: int) -> tuple[int, int] | None:
    """The limit of one group and its unreclaimable use, or None where it has none."""
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = [int(text) for name in names if (text := _first(group / name)).isdecimal() and int(text) < NO_LIMIT]
    used = _first(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if not limits or not used.isdecimal():
        return None
    counts = {}  # version 1: the group's own; "total_" includes the groups inside it
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            counts[name] = int(value)
    counts |= {name.removeprefix("total_"): count for name, count in counts.items() if name.startswith("total_")}
    cache = sum(counts.get(name, 0) for name in RECLAIMABLE) - sum(counts.get(name, 0) for name in NOT_YET)
    return min(limits), max(0, int(used) - max(0, cache))


def _unescaped(path: str) -> str:
    """A path of mountinfo with its octal escapes of blanks decoded."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _first(path: Path) -> str:
    return next(iter(_lines(path)), "").strip()


def _lines(path: Path) -> list[str]:
    """The lines of a small kernel file; none where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
