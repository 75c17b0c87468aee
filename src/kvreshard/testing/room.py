"""How much memory a trial or a replay may take on this machine without taking it from somebody else.

1. What the kernel says could be given out without swapping: `MemAvailable`, page cache that can be dropped included
   (Linux, Documentation/filesystems/proc.rst).
2. Less where the process is in a control group with a limit: the limit, less what its members hold but for page cache that can be
   dropped (Documentation/admin-guide/cgroup-v2.rst, `memory.max`, `memory.current`, `inactive_file`).

Nothing is refused here. What cannot be read counts as no bound.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can be had, or None where neither the machine nor a control group tells."""
    bounds = [bound for bound in (_of_machine(meminfo), _of_group(cgroup)) if bound is not None]
    return max(0, min(bounds)) if bounds else None


def _of_machine(meminfo: Path) -> int | None:
    kibibytes = _values(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _of_group(cgroup: Path) -> int | None:
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return limit - used + _values(cgroup / "memory.stat").get("inactive_file", 0)


def _values(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}
