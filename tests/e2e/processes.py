"""What did an engine's processes use, and have they left anything behind?

Read from /proc, by process group, so that it says nothing about engines of other people on the same machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

SHARED = "/dev/shm/"


def members(group: int) -> list[int]:
    """Processes of the group that still run (a zombie does not)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            state, _, process_group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


def shared_files(pids: list[int]) -> set[str]:
    """Names in /dev/shm that the processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found.update(line[line.index(SHARED) :] for line in maps if SHARED in line)
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(f"/proc/{pid}/fd/{number}")
                    found.update([name] if name.startswith(SHARED) else [])
    return {name for name in found if not name.endswith(" (deleted)")}


def remove_shared(names: set[str]) -> list[str]:
    """Remove what stopped engines left in shared memory; the names that they should have removed themselves.

    Excused: the segments of vLLM's all-reduce between CPUs (`...-cpushm_N`). Their C++ destructor does not run in a worker
    that ends by a signal, and ordinary engines leave them too.
    """
    left = sorted(name for name in names if os.path.exists(name))
    for name in left:
        os.unlink(name)
    return [name for name in left if "-cpushm_" not in name]


def memory_bytes(pids: list[int]) -> int:
    """What the processes occupy; pages that several of them share are counted once (their proportional set size)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def wait_until_gone(group: int, seconds: float) -> list[int]:
    """Wait for the group to end; who is left after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def end_group(group: int) -> list[str]:
    """End what is left of a group, first politely. What it took, in words; an empty list when it had ended itself."""
    took: list[str] = []
    for signum, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        left = members(group)
        if not left:
            break
        took.append(f"{signal.Signals(signum).name} to processes {left}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signum)
        wait_until_gone(group, seconds)
    return took
