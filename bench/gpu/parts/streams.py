"""Does a load wait for the engine's stream, and progress not run ahead of it? A kernel of half a second runs there.

Loads, zeroing and digests go on beside it. What it computes is told to readers when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair
from bench.shapes import Shape
from kvreshard.session.lease import LeaseTable
from kvreshard.session.progress import Progress, ProgressBoard, StepProgress
from kvreshard.testing.rank_memory import DeviceBlock
from kvreshard.transport.device import recorder

SHAPE = Shape("Llama NHD TP 4 -> 8", "llama-3.1-70b", "tp=4,order=NHD", "tp=8,order=NHD", None)
TOKENS = 512
CLOCK_HZ = 1_900_000_000
KERNEL_S = 0.5


def run(bench: Bench) -> None:
    """On the destination's default stream, which is the engine's there."""
    if bench.device == "cpu":
        for name in ("a staged load", "a direct load", "zeroing"):
            bench.skip(f"{name} beside a long kernel", "the processor has no streams")
        bench.skip("progress behind a long kernel", "the processor has no events")
        return
    _progress(bench)
    with Pair(SHAPE, TOKENS, bench.device) as pair:
        pair.fill()
        mover, wanted = pair.mover(), pair.request(TOKENS, "random")
        for way in ("staged", "direct"):
            route = pair.route(way)
            _beside_a_kernel(bench, f"a {way} load", pair, lambda route=route: pair.load(mover, route, wanted))  # type: ignore[misc]
        start = np.array([pair.block.region.address], dtype=np.int64)
        _beside_a_kernel(bench, "zeroing", pair, lambda: pair.block.memory.zero(start, start + (1 << 20)))


def _beside_a_kernel(bench: Bench, name: str, pair: Pair, work: Callable[[], object]) -> None:
    """The work must be over while the kernel still runs, and take about as long as without it."""
    import torch

    assert isinstance(pair.block, DeviceBlock)
    with bench.check(f"{name} beside a long kernel") as found:
        work()
        started_s = time.perf_counter()
        work()
        alone_s = time.perf_counter() - started_s
        torch.cuda.synchronize(bench.device)
        ended = torch.cuda.Event()
        torch.cuda._sleep(int(CLOCK_HZ * KERNEL_S))
        ended.record()
        started_s = time.perf_counter()
        work()
        beside_s, is_running = time.perf_counter() - started_s, not ended.query()
        torch.cuda.synchronize(bench.device)
        kernel_s = time.perf_counter() - started_s
        found.ratio = beside_s / alone_s
        found.figure(
            alone_ms=alone_s * 1e3, beside_ms=beside_s * 1e3, kernel_ms=kernel_s * 1e3, kernel_still_ran=is_running
        )
        if not is_running:
            found.fail("it ended only after the kernel: something waits for the engine's stream")


def _progress(bench: Bench) -> None:
    """A layer that a kernel is to compute is final when the kernel has ended, not when it was ordered; nobody waits for it."""
    import torch

    with bench.check("progress behind a long kernel") as found:
        table = LeaseTable(4)
        board = ProgressBoard(table, recorder((bench.device,)))
        table[1] = 77
        torch.cuda.synchronize(bench.device)
        board.begin([StepProgress(1, 77, 0, 8)])
        torch.cuda._sleep(int(CLOCK_HZ * KERNEL_S))
        started_s = time.perf_counter()
        board.layer(1)
        board.end()
        ordered_s = time.perf_counter() - started_s
        board.poll()
        early = int(table.progress[1])
        torch.cuda.synchronize(bench.device)
        board.poll()
        found.figure(ordered_us=ordered_s * 1e6)
        if early:
            found.fail(f"the word said {Progress.unpack(early)} while the kernel ran")
        elif Progress.unpack(int(table.progress[1])) != (8, 8, 0):
            found.fail(f"the word says {Progress.unpack(int(table.progress[1]))} when the kernel has ended")
        elif ordered_s > KERNEL_S / 2:
            found.fail("the engine's thread waited for the kernel")
