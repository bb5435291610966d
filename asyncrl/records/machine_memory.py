"""What the kernel says of main memory: how much is free, and whether it has killed for want of it.

A container's own limit is one of its control groups (cgroup, version 1 or 2), whose files lie under
/sys/fs/cgroup; a limit on a group above holds, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
KERNEL = Path("/proc/vmstat")
# of a group's folder, version 2 and version 1: its limit, and what is taken of it
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
EVENTS = ("memory.events", "memory.oom_control")


def free_bytes() -> int:
    """Bytes that this process can still take: what is free on the machine, or left of its control
    groups, whichever is less; file caches count as free.
    """
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for folder in _group_folders():
        cache = _numbers(folder / "memory.stat").get("inactive_file", 0)
        for limit, taken in LIMITS:
            try:
                most, now = (
                    int((folder / name).read_text(encoding="utf-8")) for name in (limit, taken)
                )
            except (OSError, ValueError):  # no such file; or "max": no limit
                continue
            left.append(max(0, most - now + cache))
    return min(left)


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since the machine started, and
    those of our control groups; None where it does not say.
    """
    found = [_numbers(KERNEL).get("oom_kill")]
    found += [
        _numbers(folder / name).get("oom_kill") for folder in _group_folders() for name in EVENTS
    ]
    known = [count for count in found if count is not None]
    return sum(known) if known else None


def _group_folders() -> Iterator[Path]:
    """The folders of this process's memory groups, each with those above it."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers not in ("", "memory"):
            continue
        top = GROUPS / controllers
        own = top / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _numbers(path: Path) -> dict[str, int]:
    """The lines `name number` of a file; none where it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) == 2}
    except (OSError, ValueError):
        return {}
