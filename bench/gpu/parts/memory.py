"""Zeroing, permutes and digests of memory on the device: each against the same on the processor."""

from __future__ import annotations

import time

import numpy as np
from tests.pairs.small import engine, request

from bench.gpu.findings import Bench
from kvreshard.kinds import Attention
from kvreshard.kinds.assemble import relocate
from kvreshard.plan import compile_route
from kvreshard.testing.rank_memory import make_block
from kvreshard.tools.digest import digest_transfers
from kvreshard.transport.local import HostMemory

SIZE = 1 << 20
NUM_TAILS = 10_000
KIND = Attention(8, 32, "bfloat16")


def run(bench: Bench) -> None:
    """All of them, over random addresses."""
    _zeroing(bench)
    _many_ranges(bench)
    _sums(bench)
    _digests(bench)


def _zeroing(bench: Bench) -> None:
    with bench.check("zeroing of random ranges") as found:
        rng = np.random.default_rng(0)
        seen, block = make_block(SIZE, bench.device)
        seen[:] = rng.integers(1, 256, SIZE, dtype=np.uint8)
        expected = seen.copy()
        block.upload()
        start = np.sort(rng.choice(SIZE - 300, 500, replace=False))
        stop = start + rng.integers(0, 300, 500)
        block.memory.zero(block.region.address + start, block.region.address + stop)
        for low, high in zip(start.tolist(), stop.tolist(), strict=True):
            expected[low:high] = 0
        block.download()
        found.figure(bytes_zeroed=int((expected == 0).sum()))
        if not np.array_equal(seen, expected):
            found.fail("other bytes than the processor's")


def _many_ranges(bench: Bench) -> None:
    """Tails of pages: what a load zeroes on the session's thread."""
    with bench.check(f"zeroing of {NUM_TAILS:,} tails") as found:
        seen, block = make_block(NUM_TAILS * 1024, bench.device)
        seen[:] = 1
        block.upload()
        start = block.region.address + np.arange(NUM_TAILS, dtype=np.int64) * 1024
        block.memory.zero(start[:1], start[:1] + 16)
        started_s = time.perf_counter()
        block.memory.zero(start, start + 256)
        found.figure(ms=(time.perf_counter() - started_s) * 1e3)
        block.download()
        if seen.reshape(NUM_TAILS, 1024)[:, :256].any() or not seen.reshape(NUM_TAILS, 1024)[:, 256:].all():
            found.fail("other bytes are zero")


def _sums(bench: Bench) -> None:
    with bench.check("weighted sums of a digest, any addresses") as found:
        rng = np.random.default_rng(1)
        seen, block = make_block(SIZE, bench.device)
        seen[:] = rng.integers(0, 256, SIZE, dtype=np.uint8)
        block.upload()
        content, host, summed = seen.copy(), HostMemory(), 0
        for _ in range(100):
            unit_bytes = int(rng.choice([1, 2]))
            weights = rng.integers(-(2**63), 2**63, rng.integers(1, 40, 2), dtype=np.int64)
            rows, runs = rng.integers(0, SIZE // 4, 200), rng.integers(0, SIZE // 4, len(weights))
            theirs = host.weighted_sums(int(content.ctypes.data) + rows, runs, weights, unit_bytes)
            mine = block.memory.weighted_sums(block.region.address + rows, runs, weights, unit_bytes)
            summed += len(rows) * weights.size * unit_bytes
            if not np.array_equal(theirs, mine):
                found.fail(f"sums of {weights.shape} units of {unit_bytes} bytes differ")
                break
        found.figure(bytes_summed=summed)


def _digests(bench: Bench) -> None:
    with bench.check("digests of a rank's pages") as found:
        digests = []
        for device in ("cpu", bench.device):
            src = engine("prefill", tp=2, page=16, num_pages=40, kind=KIND, stages=(0, 0, 0))
            dst = engine("decode", tp=4, page=24, num_pages=40, kind=KIND, stages=(0, 0, 0))
            (region,) = src.ranks[0].regions
            seen, block = make_block(region.size_bytes, device)
            seen[:] = np.random.default_rng(2).integers(0, 256, len(seen), dtype=np.uint8)
            block.upload()
            src = relocate(src, {rank.rank: {region.name: block.region.address} for rank in src.ranks}, device)
            wanted = request(src, dst, 300)
            transfers = compile_route(src, dst, 0).transfers
            digests.append(digest_transfers(transfers, "src", wanted, block.memory, b"key"))
        found.figure(digests=len(digests[0]))
        if not digests[0] or digests[0] != digests[1]:
            found.fail(f"the device's digests are {digests[1]}, the processor's {digests[0]}")
