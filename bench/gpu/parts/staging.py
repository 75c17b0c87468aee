"""Is staging on the device right, and how fast is it beside direct pieces? And what share of a plain copy's speed has its permute?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair, in_turn
from bench.shapes import Shape
from kvreshard.plan.cost import usual_cost
from kvreshard.plan.refine import Loop
from kvreshard.plan.stage import Move
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
        by_fields = replace(mover, memory=_both(pair.block, has_kernel=False))
        works: list[Callable[[], object]] = [
            lambda: pair.load(mover, routes["direct"], wanted),
            lambda: pair.load(mover, routes["staged"], wanted),
            lambda: pair.load(by_fields, routes["staged"], wanted),
        ]
        direct_s, staged_s, by_fields_s = in_turn(works, 3, budget_s=2.0)
        transfer = routes["direct"].transfers[0].choice
        found.ratio = direct_s / staged_s
        found.figure(
            direct_ms=direct_s * 1e3,
            staged_ms=staged_s * 1e3,
            staged_without_kernel_ms=by_fields_s * 1e3,
            mib=num_bytes / (1 << 20),
            staged_gb_per_s=num_bytes / staged_s / 1e9,
            plain_copy_ms=time_plain_copy(num_bytes, bench.device) * 1e3,
            direct_runs_per_page=transfer.num_runs,
            run_bytes=transfer.run_bytes,
            model_says=pair.route(cost=usual_cost(bench.device)).transfers[0].choice.way,
        )


def _permute(bench: Bench, name: str, run_bytes: int, runs: int, pages: int) -> None:
    """Pages whose runs lie twice as far apart in the cache, in random order: the connector's own permute beside a plain copy."""
    with bench.check(f"permute of {name}: share of a plain copy") as found:
        page_bytes = run_bytes * runs
        slots, here = make_block(page_bytes * pages, bench.device)
        content, there = make_block(4 * page_bytes * pages, bench.device)
        slots[:] = np.random.default_rng(0).integers(0, 256, len(slots), dtype=np.uint8)
        here.upload()
        order = np.random.default_rng(1).permutation(2 * pages)[:pages].astype(np.int64)
        first, base = np.zeros(1, dtype=np.int64), np.array([there.region.address], dtype=np.int64)
        loops = (Loop(runs, run_bytes, 2 * run_bytes),)
        permute = Move(run_bytes, loops, first, np.arange(pages) * page_bytes, base, order * 2 * page_bytes)
        plain_s = min(time_plain_copy(len(slots), bench.device) for _ in range(5))
        found.figure(plain_gb_per_s=len(slots) / plain_s / 1e9, mib=len(slots) / (1 << 20))
        for kind, has_kernel in (("by_fields", False), ("kernel", None)):
            memory = _both(here, there, has_kernel=has_kernel)
            content[:] = 0
            there.upload()

            def move() -> None:
                memory.move(here.region.address, permute)  # noqa: B023

            move()
            there.download()
            arrived = content.reshape(2 * pages, runs, 2, run_bytes)[order, :, 0]
            if not np.array_equal(arrived, slots.reshape(pages, runs, run_bytes)):
                found.fail(f"the permute {kind} left other bytes")
            (median_s,) = in_turn([move], 7)
            found.figure(**{f"{kind}_gb_per_s": len(slots) / median_s / 1e9, f"{kind}_share": plain_s / median_s})
            found.ratio = plain_s / median_s


def _both(*blocks: Block, has_kernel: bool | None = None) -> LocalMemory:
    """One memory over all of them."""
    tensors = [block.tensor for block in blocks if isinstance(block, DeviceBlock)]
    return TensorMemory(tensors, has_kernel=has_kernel) if tensors else HostMemory()
