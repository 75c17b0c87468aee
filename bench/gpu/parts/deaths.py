"""What happens to a rank when a peer dies in the middle of a read, when regions come and go, and when its thread has no context?"""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from bench.gpu.findings import Bench
from kvreshard.plan.copies import CopyList
from kvreshard.testing.rank_memory import DeviceBlock
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import Direction, MemoryRegion
from kvreshard.transport.device import allocate
from kvreshard.transport.nixl import NixlTransport

MEMORY_BYTES = 64 << 20
PIECE_BYTES, NUM_PIECES = 256, 200_000
SETTLE_S = 20.0
ROUNDS = 50


def run(bench: Bench) -> None:
    """All three."""
    _a_peer_dies(bench)
    _regions_come_and_go(bench)
    _context(bench)


def _a_peer_dies(bench: Bench) -> None:
    name = "a peer that is killed during a read"
    with bench.check(name) as found, ProcessRanks(3, MEMORY_BYTES, devices=[bench.device] * 3) as ranks:
        ranks.connect_all()
        small = np.random.default_rng(0).permutation(MEMORY_BYTES // PIECE_BYTES)[:NUM_PIECES].astype(
            np.uint64
        ) * np.uint64(PIECE_BYTES)
        many = CopyList.of(ranks.address(1) + small, ranks.address(0) + small, PIECE_BYTES)
        job = ranks.post(0, 1, Direction.READ, many)
        os.kill(ranks.process_id(1), signal.SIGKILL)
        started_s = time.monotonic()
        report = ranks.wait(0, job, timeout_s=SETTLE_S)
        found.figure(state=report.state, settled_s=time.monotonic() - started_s, error=(report.error or "")[:160])
        one = CopyList.of([ranks.address(2)], [ranks.address(0)], 4096)
        ranks.memory(2)[:4096] = 77
        ranks.give(2)
        ranks.run(0, 2, Direction.READ, one)
        if not (ranks.memory(0)[:4096] == 77).all():
            found.fail("a read from another peer brought other bytes")
        ranks.restart(1)
        if report.state != "pending":  # a peer comes back when its slices have settled
            ranks.disconnect(0, 1)
            ranks.connect(0, 1)
            ranks.memory(1)[:4096] = 99
            ranks.give(1)
            ranks.run(0, 1, Direction.READ, CopyList.of([ranks.address(1)], [ranks.address(0)], 4096))
            if not (ranks.memory(0)[:4096] == 99).all():
                found.fail("a read from the restarted peer brought other bytes")
        else:
            found.fail(f"the read had not settled after {SETTLE_S:g} s")


def _regions_come_and_go(bench: Bench) -> None:
    with bench.check(f"{ROUNDS} times registered and deregistered") as found:
        blocks = [DeviceBlock(np.zeros(MEMORY_BYTES, dtype=np.uint8), bench.device) for _ in range(2)]
        transport = NixlTransport("come-and-go", enter=blocks[0].enter)
        try:
            seconds = []
            for _ in range(ROUNDS):
                started_s = time.monotonic()
                for block in blocks:
                    transport.register([block.region])
                size = len(transport.metadata())
                for block in blocks:
                    transport.deregister([block.region])
                seconds.append(time.monotonic() - started_s)
            found.figure(ms_per_round=float(np.median(seconds)) * 1e3, metadata_bytes=size)
            inner = MemoryRegion(blocks[0].region.address + (1 << 20), 1 << 20, blocks[0].region.device)
            transport.register([inner])  # a part of an allocation, as a view of a cache may be
            transport.deregister([inner])
        finally:
            transport.close()


def _context(bench: Bench) -> None:
    if bench.device == "cpu":
        bench.skip("the owner's thread has the device's context", "the processor has none")
        return
    with bench.check("the owner's thread has the device's context") as found:
        import ctypes

        driver, current = ctypes.CDLL("libcuda.so.1"), []

        def ask(_agent: object) -> None:
            context = ctypes.c_void_p()
            driver.cuCtxGetCurrent(ctypes.byref(context))
            current.append(bool(context.value))

        block = allocate(1 << 20, bench.device)
        for enter in (DeviceBlock(np.zeros(1 << 20, dtype=np.uint8), bench.device).enter, lambda: None):
            transport = NixlTransport("context", enter=enter)
            transport._owner.call(ask)
            transport.close()
        found.figure(entered=current[0], not_entered=current[1], bytes=block.nbytes)
        if not current[0]:
            found.fail("a thread that has entered the device has no context of it")
