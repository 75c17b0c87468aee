"""Is staging on the device right, and how fast is it beside direct pieces? And what share of a plain copy's speed has its permute?"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair, in_turn
from bench.shapes import Shape
from kvreshard.testing.rank_memory import Block, DeviceBlock, make_block, time_plain_copy
from kvreshard.transport.device import TensorMemory
from kvreshard.transport.local import HostMemory, LocalMemory

MODEL = "llama-3.1-70b"
CASES = {
    "head split of token-major pages": ("tp=4,order=NHD", "tp=8,order=NHD"),
    "pages of 16 -> 64 tokens": ("tp=8,order=HND,page=16", "tp=8,order=HND,page=64"),
    "pages of 64 -> 16 tokens": ("tp=8,order=HND,page=64", "tp=8,order=HND,page=16"),
    "HND -> NHD, TP 8 -> 4": ("tp=8,order=HND", "tp=4,order=NHD"),
    "NHD -> HND, TP 4 -> 8": ("tp=4,order=NHD", "tp=8,order=HND"),
    "HND, TP 8 -> 4": ("tp=8,order=HND", "tp=4,order=HND"),
    "HND, TP 4 -> 8": ("tp=4,order=HND", "tp=8,order=HND"),
}
TOKENS, REHEARSAL_TOKENS = 2048, 128
# Bytes of a run, runs of a page, pages: a head split, a change of page size, single values.
PERMUTES = {"runs of 256 B": (256, 16, 32_768), "runs of 4 KiB": (4096, 4, 8192), "runs of 64 KiB": (65_536, 1, 2048)}


def run(bench: Bench) -> None:
    """Every case both ways, then the permute by itself."""
    cases = list(CASES.items())[:2] if bench.is_rehearsal else list(CASES.items())
    for name, (src, dst) in cases:
        _case(bench, name, Shape(name, MODEL, src, dst, None))
    for name, (run_bytes, runs, pages) in PERMUTES.items():
        _permute(bench, name, run_bytes, runs, pages // 64 if bench.is_rehearsal else pages)


def _case(bench: Bench, name: str, shape: Shape) -> None:
    num_tokens = REHEARSAL_TOKENS if bench.is_rehearsal else TOKENS
    with bench.check(f"{name}: staged beside direct") as found, Pair(shape, num_tokens, bench.device) as pair:
        pair.fill()
        mover, wanted = pair.mover(), pair.request(num_tokens, "random")
        routes = {way: pair.route(way) for way in ("direct", "staged")}
        contents = {}
        for way, route in routes.items():
            pair.wipe()
            num_bytes = pair.load(mover, route, wanted)
            contents[way] = pair.content()
        if not np.array_equal(*contents.values()) or not contents["direct"].any():
            found.fail("the two ways leave other bytes")
        works: list[Callable[[], object]] = [lambda r=route: pair.load(mover, r, wanted) for route in routes.values()]  # type: ignore[misc]
        direct_s, staged_s = in_turn(works, 3 if bench.is_rehearsal else 5)
        lane = routes["direct"].lanes[0].choice
        found.ratio = direct_s / staged_s
        found.figure(
            direct_ms=direct_s * 1e3,
            staged_ms=staged_s * 1e3,
            mib=num_bytes / (1 << 20),
            staged_gb_per_s=num_bytes / staged_s / 1e9,
            plain_copy_ms=time_plain_copy(num_bytes, bench.device) * 1e3,
            direct_runs_per_page=lane.num_runs,
            run_bytes=lane.run_bytes,
            model_says=pair.route().lanes[0].choice.way,
        )


def _permute(bench: Bench, name: str, run_bytes: int, runs: int, pages: int) -> None:
    """Pages whose runs lie twice as far apart in the cache, in random order: the connector's own permute beside a plain copy."""
    with bench.check(f"permute of {name}: share of a plain copy") as found:
        page_bytes = run_bytes * runs
        slots, here = make_block(page_bytes * pages, bench.device)
        content, there = make_block(4 * page_bytes * pages, bench.device)
        slots[:] = np.random.default_rng(0).integers(0, 256, len(slots), dtype=np.uint8)
        here.upload()
        memory = _both(here, there)
        order = np.random.default_rng(1).permutation(2 * pages)[:pages].astype(np.int64)
        base = np.array([there.region.address], dtype=np.int64)
        loops = [(runs, run_bytes, 2 * run_bytes)]

        def move() -> None:
            memory.move(here.region.address, page_bytes, base, order * 2 * page_bytes, run_bytes, loops, 0, 0)

        move()
        there.download()
        arrived = content.reshape(2 * pages, runs, 2, run_bytes)[order, :, 0]
        if not np.array_equal(arrived, slots.reshape(pages, runs, run_bytes)):
            found.fail("the permute left other bytes")
        seconds = []
        for _ in range(7):
            started_s = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - started_s)
        plain_s = min(time_plain_copy(len(slots), bench.device) for _ in range(5))
        median_s = float(np.median(seconds))
        found.ratio = plain_s / median_s
        found.figure(
            gb_per_s=len(slots) / median_s / 1e9, plain_gb_per_s=len(slots) / plain_s / 1e9, mib=len(slots) / (1 << 20)
        )


def _both(*blocks: Block) -> LocalMemory:
    """One memory over all of them."""
    tensors = [block.tensor for block in blocks if isinstance(block, DeviceBlock)]
    return TensorMemory(tensors) if tensors else HostMemory()
