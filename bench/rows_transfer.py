"""Row c: one request from its block tables to the last byte, over NIXL between processes of one host, beside the in-tree connector.

Llama-3.1-70B with head-major pages, which in-tree can read at every TP; wall time of one destination rank; bytes are compared with
their sources. The in-tree connector has four threads of NIXL's, as vLLM gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench import bars
from bench.arena import Arena
from bench.beside import named
from bench.compare import compare
from bench.intree import InTree, Pair, tables_of
from bench.results import Result, compared
from bench.shapes import Shape, pool_for, request
from bench.tables import KINDS
from kvreshard.plan.compile import compile_route
from kvreshard.session.transfer import pull

ROW = "c transfer"
NUM_TOKENS = {False: 2048, True: 8192}
# (prefill TP, decode TP), and the block tables of the short run.
PAIRS = (
    ((8, 8), ("fresh", "random", "reversed")),
    ((8, 4), ("fresh", "random", "steady")),
    ((4, 2), ("fresh", "random")),
)


def run(release: str, full: bool) -> Iterator[Result]:
    """One result per pair and block table."""
    for (src_tp, dst_tp), kinds in PAIRS:
        name = f"Llama-3.1-70B HND TP {src_tp} -> {dst_tp}"
        ends = f"tp={src_tp},order=HND", f"tp={dst_tp},order=HND"
        shape = Shape(name, "llama-3.1-70b", *ends, Pair(8, src_tp, dst_tp, 16))
        yield from _pair(shape, KINDS if full else kinds, release, full)


def _pair(shape: Shape, kinds: tuple[str, ...], release: str, full: bool) -> Iterator[Result]:
    assert shape.pair is not None
    num_tokens = NUM_TOKENS[full] // (2 if shape.pair.dst_tp == 2 else 1)
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, compile_route(src, dst, 0).src_ranks) as arena:
        route, mover = compile_route(arena.src, arena.dst, 0), arena.mover()
        intree = InTree(shape.pair, arena.dst, 0, arena.plain, arena.address)
        for rank in intree.handshake_ranks:
            intree.meet(arena.src, rank, arena.native[rank], arena.src_address(rank))
        for kind in kinds:
            wanted = request(arena.src, arena.dst, num_tokens, kind)
            tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
            arena.fill(wanted)

            def ours() -> None:
                pull(mover, route, wanted, arena.dst)  # noqa: B023 (called here)

            def theirs() -> None:
                intree.wait(intree.read(*tables, post=True))  # noqa: B023

            def checked(work: Callable[[], None]) -> int:
                arena.wipe(wanted)  # noqa: B023
                work()
                return arena.check_arrived(route, wanted)  # noqa: B023

            num_bytes = {checked(theirs), checked(ours)}
            assert len(num_bytes) == 1
            found = compare(ours, theirs, pairs=31 if full else 21, budget_s=30 if full else 4)
            yield compared(
                ROW, f"{shape.name}, {num_tokens // 1024}k tokens, {kind}", named(release), found,
                bars.transfer(found.wall_ratio[1:]), cpu=False, checked_bytes=num_bytes.pop(),
            )  # fmt: skip
