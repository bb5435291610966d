"""Read free and resident main memory and out-of-memory kills from the kernel.

A container's limit is that of its control groups (cgroup version 1 or 2), whose files are under
/sys/fs/cgroup.  The limits of parent groups apply, too.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
KERNEL = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
# files in a group's folder, for version 2 and 1: its limit and its use
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
EVENTS = ("memory.events", "memory.oom_control")


def read_free_bytes() -> int:
    """Return the bytes that this process can still allocate.

    It is the smaller of the machine's free memory and the remainders of its control groups'
    limits. File caches count as free."""
    lines = (line.split() for line in MEMINFO.read_bytes().splitlines())
    # the kernel's estimate of the memory that can be allocated without swapping
    free = [next(int(line[1]) for line in lines if line[0] == b"MemAvailable:") << 10]
    for folder in _list_group_folders():
        cache = _read_numbers(folder / "memory.stat").get("inactive_file", 0)
        for limit_name, used_name in LIMITS:
            try:
                limit, used = (
                    int((folder / name).read_bytes()) for name in (limit_name, used_name)
                )
            except (OSError, ValueError):  # no such file; or "max": no limit
                continue
            free.append(max(0, limit - used + cache))
    return min(free)


def read_resident_bytes() -> int:
    """Return the bytes of main memory that this process occupies."""
    return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_memory_kills() -> int | None:
    """Count the kernel's out-of-memory kills since boot and in our control groups.

    None if the kernel does not report them."""
    counts = [_read_numbers(KERNEL).get("oom_kill")]
    counts += [
        _read_numbers(folder / name).get("oom_kill")
        for folder in _list_group_folders()
        for name in EVENTS
    ]
    reported = [count for count in counts if count is not None]
    return sum(reported) if reported else None


def _list_group_folders() -> Iterator[Path]:
    """Yield the folders of this process's memory groups and of their parents."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers not in ("", "memory"):
            continue
        top = GROUPS / controllers
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _read_numbers(path: Path) -> dict[str, int]:
    """Read the lines `name number` of a file; none if it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) == 2}
    except (OSError, ValueError):
        return {}
