"""What does meeting a prefill engine cost, up to the moment when the first request could be posted?

160 regions of 10,000 pages (Llama-3.1-70B with K and V apart), prefill TP 8 -> decode TP 4: each decode rank meets two source
ranks. Ours: decode the card and its layout, compare facts, elect, compile, prove, add both peers, bind the request, make the
first transfers. In-tree: its own `add_remote_agent` per source, then its own preparation of the request. In both, `transfer` is
left out. Then both are let go, and the bytes are compared with their sources. `limit`: in-tree's time over that of NIXL's own calls in
ours, which meet the same two agents, each with NIXL's threads: nobody who meets them through NIXL is faster by more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.arena import Arena
from bench.compare import compare
from bench.intree import InTree, Pair, available, tables_of
from bench.prepare import Listed, Prepared
from bench.results import Result, compared, skipped
from bench.shapes import Shape, request
from kvreshard.plan.route import compile_route
from kvreshard.session.card import RankCard, check_facts, decode_card, encode_card, make_card
from kvreshard.session.transfer import pull

ROW = "a handshake"
BAR = "at least 300x less CPU time"
NUM_TOKENS = 1024
ENGINE = "order=HND,interior=separate"
SHAPE = Shape(
    "Llama-3.1-70B, 160 regions x 10,000 pages, TP 8 -> 4",
    "llama-3.1-70b",
    f"tp=8,{ENGINE}",
    f"tp=4,{ENGINE}",
    Pair(8, 8, 4, 16),
)


def run(full: bool) -> Iterator[Result]:
    """The row, and how many seconds each side takes."""
    why = available()
    if why is not None or SHAPE.pair is None:
        yield skipped(ROW, SHAPE.name, why or "", BAR)
        return
    src, dst = SHAPE.layouts(10_000)
    with Arena(src, dst, 0, (0, 1)) as arena:
        wanted = request(arena.src, arena.dst, NUM_TOKENS, "random")
        arena.fill(wanted)
        facts = {"model": "bench"}
        cards = [RankCard(rank.rank, arena.metadata.get(rank.rank, b""), 0, 0) for rank in arena.src.ranks]
        card = encode_card(make_card(arena.src, bytes(32), facts, cards, 30.0))
        mine = make_card(
            arena.dst, bytes(32), facts, [RankCard(rank.rank, b"", 0, 0) for rank in arena.dst.ranks], 30.0
        )
        prepared, listed = Prepared(arena), Listed.of(wanted)

        def ours() -> None:
            theirs_card = decode_card(card)
            check_facts(mine, theirs_card)
            route = compile_route(theirs_card.decode_layout(), arena.dst, 0)
            cards = theirs_card.rank_by_number
            arena.transport.add_peers({f"source {rank}": cards[rank].metadata for rank in route.src_ranks})
            prepared.prepare(route, listed)

        intree = InTree(SHAPE.pair, arena.dst, 0, arena.plain, arena.address)
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

        found = compare(ours, theirs, pairs=10 if full else 6, budget_s=90, between=reset)
        calls_s = []
        for _ in range(5):
            reset()
            calls_s.append(prepared.clocked(ours))
        reset()
        # The bytes, of both.
        arena.wipe(wanted)
        theirs()
        for handle in handles:
            arena.plain.transfer(handle)
        intree.wait(handles)
        handles.clear()
        route = compile_route(arena.src, arena.dst, 0)
        num_bytes = arena.check_arrived(route, wanted)
        theirs_left = arena.snapshot(wanted)
        arena.wipe(wanted)
        pull(arena.mover(), route, wanted, arena.dst)
        assert arena.snapshot(wanted) == theirs_left, "ours and in-tree left different bytes"
        per_source = len(arena.src_ranks)
        yield compared(
            ROW, SHAPE.name, found, BAR, 300, cpu=True, checked_bytes=num_bytes,
            ours_ms_per_source=found.ours.cpu_s / per_source * 1e3, theirs_ms_per_source=found.theirs.cpu_s / per_source * 1e3,
            limit=found.theirs.cpu_s / float(np.median(calls_s)), nixl_ms_per_source=float(np.median(calls_s)) / per_source * 1e3,
        )  # fmt: skip
