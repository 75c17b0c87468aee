"""Row a: meeting a prefill engine, up to the moment when the first request could be posted, beside the in-tree connector.

160 regions of 10,000 pages (Llama-3.1-70B with K and V apart), prefill TP 8 -> decode TP 4: each decode rank meets two source
ranks. Ours: decode the engine metadata and its layout, compare facts, elect, compile, prove, add both peers, bind the request, make the
first transfers. In-tree: its own `add_remote_agent` per source, then its own preparation of the request. In both, `transfer` is
left out. Then both are let go, and the bytes are compared with their sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench import bars
from bench.arena import Arena
from bench.beside import NEWEST, named
from bench.compare import compare
from bench.intree import InTree, Pair, tables_of
from bench.prepare import Listed, Prepared
from bench.results import Result, compared
from bench.shapes import Shape, request
from kvreshard.model.tables import Request
from kvreshard.plan.compile import compile_route
from kvreshard.session.engine_metadata import (
    RankMetadata,
    check_compatibility,
    decode_engine_metadata,
    encode_engine_metadata,
    make_engine_metadata,
)
from kvreshard.session.transfer import pull

ROW = "a handshake"
NUM_TOKENS = 1024
NUM_PAGES = 10_000
ENGINE = "order=HND,interior=separate"
PAIR = Pair(8, 8, 4, 16)
SHAPE = Shape(
    "Llama-3.1-70B, 160 regions x 10,000 pages, TP 8 -> 4", "llama-3.1-70b", f"tp=8,{ENGINE}", f"tp=4,{ENGINE}", PAIR
)


def run(release: str, full: bool) -> Iterator[Result]:
    """The row, and how many bytes were compared."""
    src, dst = SHAPE.layouts(NUM_PAGES)
    with Arena(src, dst, 0, (0, 1)) as arena:
        wanted = request(arena.src, arena.dst, NUM_TOKENS, "random")
        arena.fill(wanted)
        compatibility = {"model": "bench"}
        metadata_by_rank = [
            RankMetadata(rank.rank, arena.metadata.get(rank.rank, b""), 0, 0) for rank in arena.src.ranks
        ]
        engine_metadata = encode_engine_metadata(
            make_engine_metadata(arena.src, bytes(32), compatibility, metadata_by_rank, 30.0)
        )
        mine = make_engine_metadata(
            arena.dst, bytes(32), compatibility, [RankMetadata(rank.rank, b"", 0, 0) for rank in arena.dst.ranks], 30.0
        )
        prepared, listed = Prepared(arena), Listed.of(wanted)

        def ours() -> None:
            their_metadata = decode_engine_metadata(engine_metadata)
            check_compatibility(mine, their_metadata)
            route = compile_route(their_metadata.decode_layout(), arena.dst, 0)
            metadata_by_rank = their_metadata.rank_by_number
            arena.transport.add_peers(
                {f"source {rank}": metadata_by_rank[rank].transport_metadata for rank in route.src_ranks}
            )
            prepared.prepare(route, listed)

        intree = InTree(PAIR, arena.dst, 0, arena.plain, arena.address)
        tables = tables_of(arena.src, wanted.src_tables), tables_of(arena.dst, wanted.dst_tables)
        handles: list[Any] = []

        def theirs() -> None:
            for rank in intree.handshake_ranks:
                intree.meet(arena.src, rank, arena.native[rank], arena.src_address(rank))
            handles.extend(intree.read(*tables, post=False))

        def reset() -> None:
            intree.release(handles)
            handles.clear()
            intree.forget()
            prepared.release()
            for rank in arena.src_ranks:
                prepared.forget(f"source {rank}")

        found = compare(ours, theirs, pairs=41 if full else 21, budget_s=60 if full else 15, between=reset)
        reset()
        arena.wipe(wanted)
        theirs()
        for handle in handles:
            arena.plain.transfer(handle)
        intree.wait(handles)
        handles.clear()
        checked = _check_both(arena, wanted)
        judged = bars.handshake(found, release == NEWEST)
        yield compared(ROW, SHAPE.name, named(release), found, judged, cpu=True, checked_bytes=checked)


def _check_both(arena: Arena, wanted: Request) -> int:
    """What in-tree has read must be what its sources have, and what ours reads; how many bytes. Raises AssertionError."""
    route = compile_route(arena.src, arena.dst, 0)
    num_bytes = arena.check_arrived(route, wanted)
    theirs_left = arena.snapshot(wanted)
    arena.wipe(wanted)
    pull(arena.mover(), route, wanted, arena.dst)
    assert arena.snapshot(wanted) == theirs_left, "ours and in-tree left different bytes"
    return num_bytes
