"""Row b: preparing one request, on a route that is known, beside the in-tree connector. All shapes, several block tables and lengths.

Ours: read lists of page ids, check, cut, bind, choose, check against regions, NIXL's transfer requests. In-tree: its own
`_read_blocks_for_req`, with `transfer` held back. Processor time of both. The shortest request is carried out by both as well and compared
with its sources.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench import bars
from bench.arena import Arena
from bench.beside import named
from bench.compare import compare
from bench.intree import InTree, tables_of
from bench.prepare import Listed, Prepared
from bench.results import Result, compared
from bench.shapes import Shape, first_token_s, pool_for, request, shapes
from bench.tables import KINDS
from kvreshard.model.tables import Request
from kvreshard.plan.compile import compile_route
from kvreshard.plan.route import Route
from kvreshard.session.transfer import pull

ROW = "b preparation"
LENGTHS = {False: (1024, 32_768), True: (1024, 8192, 32_768, 131_072)}


def run(release: str, full: bool) -> Iterator[Result]:
    """One result per case."""
    for shape in shapes():
        yield from _shape(shape, release, full)


def _shape(shape: Shape, release: str, full: bool) -> Iterator[Result]:
    assert shape.pair is not None
    lengths = LENGTHS[full]
    src, dst = shape.layouts(pool_for(shape, lengths[-1]))
    first = compile_route(src, dst, 0)
    # In-tree meets every source rank of its share, also those that it only notifies.
    met = range(max(1, shape.pair.src_tp // shape.pair.dst_tp))
    with Arena(src, dst, 0, sorted({*first.src_ranks, *met})) as arena:
        route = compile_route(arena.src, arena.dst, 0)
        arena.mover()
        prepared = Prepared(arena)
        intree = InTree(shape.pair, arena.dst, 0, arena.plain, arena.address)
        for rank in intree.handshake_ranks:
            intree.meet(arena.src, rank, arena.native[rank], arena.src_address(rank))
        for num_tokens in lengths:
            for kind in KINDS if full else ("fresh", "random", "steady"):
                wanted = request(arena.src, arena.dst, num_tokens, kind)
                listed = Listed.of(wanted)
                tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
                checked = _check_both(arena, intree, route, wanted) if num_tokens == lengths[0] else 0

                def release_all() -> None:
                    intree.release(intree.held.handles)
                    intree.held.handles.clear()
                    prepared.release()

                def ours() -> None:
                    prepared.prepare(route, listed)  # noqa: B023 (called here)

                def theirs() -> None:
                    intree.read(*tables, post=False)  # noqa: B023

                # Of the short ones many pairs: a neighbour on the host disturbs a tenth of a second, and a hundred pairs take no longer.
                with prepared.resting():
                    found = compare(
                        ours, theirs, pairs=1001 if full else 101, budget_s=6 if full else 0.5, between=release_all
                    )
                release_all()
                wait_s = first_token_s(shape, num_tokens)
                yield compared(
                    ROW, f"{shape.name}, {num_tokens // 1024}k tokens, {kind}", named(release), found,
                    bars.preparation(found.ours.cpu_s, found.theirs.cpu_s, wait_s), cpu=True, first_token_ms=wait_s * 1e3,
                    reads=prepared.num_reads, staged=prepared.num_staged, checked_bytes=checked,
                )  # fmt: skip


def _check_both(arena: Arena, intree: InTree, route: Route, wanted: Request) -> int:
    """Carry the request out by both, and compare every byte with its source; how many. Raises AssertionError."""
    tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
    arena.fill(wanted)
    arena.wipe(wanted)
    intree.wait(intree.read(*tables, post=True))
    checked = arena.check_arrived(route, wanted)
    arena.wipe(wanted)
    pull(arena.mover(), route, wanted, arena.dst)
    assert arena.check_arrived(route, wanted) == checked
    return checked
