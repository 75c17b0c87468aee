"""How long does one request take to arrive? Over NIXL between processes of one host, 8k tokens (a quarter of it in the subset).

| case | beside |
|---|---|
| equal TP, every block table | the in-tree connector |
| TP 8 -> 4 and 4 -> 2, HND, fresh and random | the in-tree connector |
| head split of NHD, which in-tree refuses | the same plan with every piece posted directly |
| HND -> NHD and page 16 <-> 64, which in-tree refuses | the same bytes without the change of layout |
| fresh tables, equal TP | raw NIXL, one descriptor per region; and a plain copy of one core, as the limit |

The in-tree connector has four threads of NIXL's, as vLLM 0.32 gives it; raw NIXL has those of ours.
`limit`: their time over that of raw NIXL for as many bytes in pieces of 256 KiB. Wall time of one destination rank, from the block tables to the last byte; bytes are compared with their sources.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.arena import Arena
from bench.compare import compare
from bench.intree import POLL_S, InTree, Pair, available, tables_of
from bench.results import Result, compared, skipped
from bench.shapes import Shape, pool_for, request, total_bytes
from kvreshard.model.tables import Request
from kvreshard.plan.bind import bind
from kvreshard.plan.route import Route, compile_route
from kvreshard.session.mover import Mover
from kvreshard.session.transfer import pull
from kvreshard.testing.rank_memory import time_plain_copy

ROW = "c transfer"
# Enough pieces for NIXL's threads to have equal shares of them, and long ones.
RAW_BYTES = 256 << 10
NUM_TOKENS = {False: 2048, True: 8192}
LLAMA = "llama-3.1-70b"


@dataclass(frozen=True, slots=True)
class Case:
    """A shape and a block table, with the bar. `low`: on the interval's lower bound."""

    shape: Shape
    table: str
    at_least: float
    bar: str
    low: bool = False


def _llama(src_tp: int, dst_tp: int) -> Shape:
    return Shape(
        f"Llama-3.1-70B HND TP {src_tp} -> {dst_tp}",
        LLAMA,
        f"tp={src_tp},order=HND",
        f"tp={dst_tp},order=HND",
        Pair(8, src_tp, dst_tp, 16),
    )


def cases(full: bool) -> list[Case]:
    """Those with the in-tree connector beside."""
    same, halved, quarter = _llama(8, 8), _llama(8, 4), _llama(4, 2)
    equal = "lower bound >= 0.95 of in-tree"
    found = [
        Case(same, "random", 0.95, equal, True), Case(same, "reversed", 2, "2x in-tree"),
        Case(halved, "fresh", 2.5, "2.5x in-tree"), Case(quarter, "fresh", 2.5, "2.5x in-tree"),
        Case(halved, "random", 0.95, equal, True),
    ]  # fmt: skip
    if full:
        found += [Case(same, kind, 0.95, equal, True) for kind in ("fresh", "half", "steady")]
        found += [Case(halved, kind, 0.95, equal, True) for kind in ("half", "reversed", "steady")]
    return found


def run(full: bool) -> Iterator[Result]:
    """All of them."""
    why = available()
    by_shape: dict[Shape, list[Case]] = {}
    for case in cases(full):
        by_shape.setdefault(case.shape, []).append(case)
    for shape, alike in by_shape.items():
        if why is not None:
            yield from (skipped(ROW, f"{shape.name}, {case.table}", why, case.bar) for case in alike)
        else:
            yield from _beside_intree(shape, alike, full)
    yield from _head_split(full)
    yield from _relayout(full)
    yield from _raw(full)


def _tokens(shape: Shape, full: bool) -> int:
    return NUM_TOKENS[full] // 2 if "tp=2" in shape.dst else NUM_TOKENS[full]


def _beside_intree(shape: Shape, alike: list[Case], full: bool) -> Iterator[Result]:
    num_tokens = _tokens(shape, full)
    assert shape.pair is not None
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, compile_route(src, dst, 0).src_ranks) as arena:
        route, mover = compile_route(arena.src, arena.dst, 0), arena.mover()
        intree = InTree(shape.pair, arena.dst, 0, arena.plain, arena.address)
        for rank in intree.handshake_ranks:
            intree.meet(arena.src, rank, arena.native[rank], arena.src_address(rank))
        for case in alike:
            wanted = request(arena.src, arena.dst, num_tokens, case.table)
            tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
            arena.fill(wanted)

            def ours() -> None:
                pull(mover, route, wanted, arena.dst)  # noqa: B023 (called here)

            def theirs() -> None:
                intree.wait(intree.read(*tables, post=True))  # noqa: B023

            checked = [_checked(arena, route, wanted, work) for work in (theirs, ours)]
            found = compare(ours, theirs, pairs=21 if full else 15, budget_s=30 if full else 4)
            raw_s = _raw_s(arena, route, wanted)
            yield compared(
                ROW, f"{shape.name}, {num_tokens // 1024}k tokens, {case.table}", found, case.bar, case.at_least, cpu=False, low=case.low,
                limit=found.theirs.wall_s / raw_s, raw_ms=raw_s * 1e3, checked_bytes=checked[0], plain_copy_ms=time_plain_copy(checked[0]) * 1e3, gb_per_s=checked[0] / found.ours.wall_s / 1e9,
            )  # fmt: skip


def _raw_s(arena: Arena, route: Route, wanted: Request) -> float:
    """Seconds that raw NIXL takes for as many bytes from the same ranks in pieces of 256 KiB, wherever they lie: the best of five.

    With the same threads; nothing on this transport is faster, whatever is planned.
    """
    num_bytes = sum(copies.num_bytes for copies in bind(route, wanted))
    each = min(num_bytes // len(route.src_ranks), arena.dst_bytes, arena.src_bytes) >> 20 << 20
    offsets = np.arange(0, each, RAW_BYTES, dtype=np.uint64)
    handles = []
    for rank in route.src_ranks:
        rows = [np.stack([base + offsets, np.full_like(offsets, RAW_BYTES), 0 * offsets], axis=1)
                for base in (np.uint64(arena.address), np.uint64(arena.src_address(rank)))]  # fmt: skip
        descs = [arena.raw.get_xfer_descs(one, "DRAM") for one in rows]
        handles.append(arena.raw.initialize_xfer("READ", *descs, arena.raw_peer(rank)))
    spent = []
    for _ in range(5):
        started_s = time.perf_counter()
        for handle in handles:
            arena.raw.transfer(handle)
        for handle in handles:
            while arena.raw.check_xfer_state(handle) != "DONE":
                time.sleep(POLL_S)
        spent.append(time.perf_counter() - started_s)
    for handle in handles:
        arena.raw.release_xfer_handle(handle)
    return min(spent) * num_bytes / (each * len(route.src_ranks))


def _checked(arena: Arena, route: Route, wanted: Request, work: Any) -> int:
    arena.wipe(wanted)
    work()
    return arena.check_arrived(route, wanted)


def _two_ways(
    arena: Arena, num_tokens: int, table: str, ours: Route, theirs: Route, movers: tuple[Mover, Mover], full: bool
) -> tuple[Any, int]:
    wanted = request(arena.src, arena.dst, num_tokens, table)
    arena.fill(wanted)
    works = [lambda m=m, r=r: pull(m, r, wanted, arena.dst) for m, r in zip(movers, (ours, theirs), strict=True)]
    checked = [_checked(arena, ours, wanted, work) for work in works]
    return compare(*works, pairs=15 if full else 7, budget_s=30 if full else 3), checked[0]


def _head_split(full: bool) -> Iterator[Result]:
    shape = Shape("Llama-3.1-70B NHD TP 4 -> 8", LLAMA, "tp=4,order=NHD", "tp=8,order=NHD", None)
    num_tokens = 2048
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, compile_route(src, dst, 0).src_ranks) as arena:
        mover = arena.mover()
        routes = compile_route(arena.src, arena.dst, 0), compile_route(arena.src, arena.dst, 0, way="direct")
        for table in ("fresh", "half", "random", "reversed", "steady") if full else ("fresh", "random"):
            found, checked = _two_ways(arena, num_tokens, table, *routes, (mover, mover), full)
            yield compared(
                ROW, f"{shape.name}, head split, 2k tokens, {table}, beside posting pieces directly", found, "4x", 4, cpu=False,
                checked_bytes=checked,
            )  # fmt: skip


def _relayout(full: bool) -> Iterator[Result]:
    """The plain pair moves the same bytes between the same pools, with both layouts as the source's."""
    num_tokens = NUM_TOKENS[full]
    # Fresh tables of the smaller pages are where several source pages go to one, and should still be one read.
    for name, src_spec, dst_spec, short in (
        ("HND page 16 -> NHD page 64", "tp=4,order=HND,page=16", "tp=4,order=NHD,page=64", ("fresh", "random")),
        ("HND page 64 -> NHD page 16", "tp=4,order=HND,page=64", "tp=4,order=NHD,page=16", ("random",)),
    ):
        changed, plain = (Shape(name, LLAMA, src_spec, spec, None) for spec in (dst_spec, src_spec))
        yield from _relayout_cases(changed, plain, num_tokens, ("fresh", "random") if full else short, full)


def _relayout_cases(
    changed: Shape, plain: Shape, num_tokens: int, tables: tuple[str, ...], full: bool
) -> Iterator[Result]:
    pools = max(pool_for(changed, num_tokens), pool_for(plain, num_tokens))
    src, dst = changed.layouts(pools)
    _, same = plain.layouts(pools)
    with Arena(src, max(dst, same, key=lambda layout: total_bytes(layout, 0)), 0, (0,)) as arena:
        for table in tables:
            works, checked = [], 0
            for one in (arena.again(dst), arena.again(same)):
                wanted = request(one.src, one.dst, num_tokens, table)
                route, mover = compile_route(one.src, one.dst, 0), one.mover()
                one.fill(wanted)
                works.append(lambda m=mover, r=route, w=wanted, d=one.dst: pull(m, r, w, d))
                checked = _checked(one, route, wanted, works[-1])
            found = compare(*works, pairs=15 if full else 7, budget_s=30 if full else 3)
            yield compared(
                ROW, f"Llama-3.1-70B {changed.name}, {num_tokens // 1024}k tokens, {table}, beside the same bytes unchanged", found, "0.5", 0.5, cpu=False,
                checked_bytes=checked,
            )  # fmt: skip


def _raw(full: bool) -> Iterator[Result]:
    # Long enough that the hops between threads, some 0.2 ms, are not what is measured.
    shape, num_tokens = _llama(8, 8), NUM_TOKENS[True]
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, (0,)) as arena:
        route, mover = compile_route(arena.src, arena.dst, 0), arena.mover()
        wanted = request(arena.src, arena.dst, num_tokens, "fresh")
        arena.fill(wanted)
        peer = arena.raw_peer(0)
        (group,) = arena.src.groups
        pages = wanted.src_tables[group.name].pages
        local, remote = _one_per_region(arena, int(pages[0]), len(pages))

        def raw() -> None:
            descs = [arena.raw.get_xfer_descs(rows, "DRAM") for rows in (local, remote)]
            handle = arena.raw.initialize_xfer("READ", *descs, peer)
            arena.raw.transfer(handle)
            while arena.raw.check_xfer_state(handle) != "DONE":
                time.sleep(POLL_S)
            arena.raw.release_xfer_handle(handle)

        def ours() -> None:
            pull(mover, route, wanted, arena.dst)

        checked = [_checked(arena, route, wanted, work) for work in (raw, ours)]
        found = compare(ours, raw, pairs=21 if full else 11, budget_s=20 if full else 4)
        yield compared(
            ROW, f"{shape.name}, {num_tokens // 1024}k tokens, fresh, beside raw NIXL with one descriptor per region", found, "0.95 of it", 0.95, cpu=False,
            checked_bytes=checked[0], plain_copy_ms=time_plain_copy(checked[0]) * 1e3, gb_per_s=checked[0] / found.ours.wall_s / 1e9,
            raw_gb_per_s=checked[0] / found.theirs.wall_s / 1e9,
        )  # fmt: skip


def _one_per_region(arena: Arena, first_page: int, num_pages: int) -> tuple[Any, Any]:
    sides = []
    for layout, rank, base in ((arena.dst, 0, arena.address), (arena.src, 0, arena.src_address(0))):
        slabs = layout.rank_by_number[rank].slabs
        rows = [[base + s.offset_bytes + first_page * s.page_stride_bytes, num_pages * s.page_bytes, 0] for s in slabs]
        sides.append(np.array(rows, dtype=np.uint64))
    return sides[0], sides[1]
