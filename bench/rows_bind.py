"""What does preparing one request cost, on a route that is known? All shapes, all block tables, 1k to 128k tokens.

Ours: read lists of page ids, check, cut, bind, choose, check against regions, NIXL's transfer requests. In-tree: its own
`_read_blocks_for_req`, with `transfer` held back. `limit`: in-tree's time over that of NIXL's own calls in it or in ours, the
lesser: nobody who asks NIXL for a transfer is faster by more. Processor time of both. The bytes: where the request is small it is carried out by both and compared with
its sources; larger ones must prepare as many bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from bench.arena import Arena
from bench.compare import compare
from bench.intree import InTree, available, tables_of
from bench.prepare import Clocked, Listed, Prepared
from bench.results import Result, compared, skipped
from bench.shapes import Shape, pool_for, request, shapes
from bench.tables import KINDS
from kvreshard.plan.route import compile_route
from kvreshard.session.transfer import pull

ROW = "b preparation"
BAR = "lower bound >= 0.95 of in-tree's speed"
MEDIAN_BAR = "3x in the median case"
LENGTHS = {False: (1024, 32_768), True: (1024, 8192, 32_768, 131_072)}


def run(full: bool) -> Iterator[Result]:
    """One result per case, and one for the median of all."""
    why = available()
    if why is not None:
        yield skipped(ROW, "preparation of a request", why, BAR)
        return
    ratios: list[float] = []
    limits: list[float] = []
    for shape in shapes():
        for result in _shape(shape, full):
            ratios.append(result.ratio or 0.0)
            limits.append(result.limit or 0.0)
            yield result
    middle = float(np.median(ratios))
    limit = float(np.median(limits))
    yield Result(
        ROW, f"median of {len(ratios)} cases", None, None, "", middle, None, MEDIAN_BAR, middle >= 3, limit=limit
    )


def _shape(shape: Shape, full: bool) -> Iterator[Result]:
    assert shape.pair is not None
    lengths = LENGTHS[full]
    src, dst = shape.layouts(pool_for(shape, lengths[-1]))
    first = compile_route(src, dst, 0)
    # In-tree meets every source rank of its share, also those that it only notifies.
    met = range(max(1, shape.pair.src_tp // shape.pair.dst_tp))
    with Arena(src, dst, 0, sorted({*first.src_ranks, *met})) as arena:
        route = compile_route(arena.src, arena.dst, 0)
        mover, prepared = arena.mover(), Prepared(arena)
        intree = InTree(shape.pair, arena.dst, 0, arena.plain, arena.address)
        for rank in intree.handshake_ranks:
            intree.meet(arena.src, rank, arena.native[rank], arena.src_address(rank))
        for num_tokens in lengths:
            for kind in KINDS if full else ("fresh", "random", "steady"):
                wanted = request(arena.src, arena.dst, num_tokens, kind)
                listed = Listed.of(wanted)
                tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
                checked = 0
                if num_tokens == lengths[0]:
                    arena.fill(wanted)
                    arena.wipe(wanted)
                    intree.wait(intree.read(*tables, post=True))
                    checked = arena.check_arrived(route, wanted)
                    arena.wipe(wanted)
                    pull(mover, route, wanted, arena.dst)
                    assert arena.check_arrived(route, wanted) == checked

                def release() -> None:
                    intree.release(intree.held.handles)
                    intree.held.handles.clear()
                    prepared.release()

                def ours() -> None:
                    prepared.prepare(route, listed)  # noqa: B023 (called here)

                def theirs() -> None:
                    intree.read(*tables, post=False)  # noqa: B023

                # Of the short ones many pairs, or their interval says more of the machine than of them.
                found = compare(ours, theirs, pairs=101, budget_s=6 if full else 0.5, between=release)
                release()
                limits = []
                for _ in range(5):
                    started_s = time.perf_counter()
                    calls_s = intree.clocked(Clocked, theirs)
                    whole_s = time.perf_counter() - started_s
                    release()
                    limits.append(whole_s / min(calls_s, prepared.clocked(ours)))
                    release()
                yield compared(
                    ROW, f"{shape.name}, {num_tokens // 1024}k tokens, {kind}", found, BAR, 0.95, cpu=True, low=True,
                    limit=float(np.median(limits)), reads=prepared.num_reads, staged=prepared.num_staged, checked_bytes=checked,
                )  # fmt: skip
