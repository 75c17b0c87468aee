"""Does anything grow over 500 loads? Device memory, handles of NIXL, prepared lists, file descriptors, threads; and are regions registered once?"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair
from bench.shapes import Shape

SHAPE = Shape("Llama NHD TP 4 -> 8", "llama-3.1-70b", "tp=4,order=NHD", "tp=8,order=HND", None)
TOKENS, LOADS, REHEARSAL_LOADS = 64, 500, 40
# A driver hands memory out in steps.
SLACK_BYTES = 4 << 20


def run(bench: Bench) -> None:
    """Loads of changing tables, direct and staged in turn."""
    loads = REHEARSAL_LOADS if bench.is_rehearsal else LOADS
    with bench.check(f"{loads} loads") as found, Pair(SHAPE, TOKENS, bench.device) as pair:
        pair.fill()
        mover, routes = pair.mover(), [pair.route("direct"), pair.route("staged")]

        def load(number: int) -> None:
            pair.load(mover, routes[number % 2], pair.request(TOKENS, "random"))

        for number in range(10):  # what is made once is there
            load(number)
        before = _counts(pair, bench)
        for number in range(loads):
            load(number)
        after = _counts(pair, bench)
        found.figure(**{name: f"{before[name]:,} -> {after[name]:,}" for name in before})
        for name, count in after.items():
            if count > before[name] + (SLACK_BYTES if name.endswith("_bytes") else 0):
                found.fail(f"{name} grew from {before[name]:,} to {count:,}")
    with bench.check("after the end") as found:
        gc.collect()
        left = [thread.name for thread in threading.enumerate() if "pair" in thread.name]
        found.figure(threads_left=len(left))
        if left:
            found.fail(f"threads live on: {', '.join(left)}")


def _counts(pair: Pair, bench: Bench) -> dict[str, int]:
    gc.collect()
    found = {
        "file_descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(os.listdir("/proc/self/task")),
        "regions": len(pair.transport._table.regions),
        "prepared_lists": pair.transport._owner.call(lambda watched: sum(map(len, watched.agent._prepared.values()))),  # type: ignore[attr-defined]
        "slices_in_flight": pair.transport._owner._windows.num_in_flight,
    }
    if bench.device != "cpu":
        import torch

        free, _ = torch.cuda.mem_get_info(bench.device)
        found["device_bytes"] = torch.cuda.get_device_properties(bench.device).total_memory - free
        found["torch_bytes"] = torch.cuda.memory_allocated(bench.device)
    return found
