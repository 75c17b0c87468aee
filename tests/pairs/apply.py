"""Carries out a plan on the oracle's memory in plain NumPy, and checks that exactly the bytes of the oracle are left.

`run_transfer` compiles, binds, copies and zeroes for every destination rank, and checks on the way what the final bytes
cannot show: no copy leaves its region, no destination byte is written twice, nothing is zeroed that a copy wrote. It is
slow and simple on purpose: addresses are virtual, each copy is looked up in the regions of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tests.pairs.carry import carry

from kvreshard.model.changed import replace
from kvreshard.model.errors import BindError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.rank import Rank, Region
from kvreshard.model.tables import Request
from kvreshard.plan import (
    CopyList,
    RankTransfer,
    ReadPlan,
    Route,
    bind,
    compile_route,
    elect,
    find_unwritten,
    match_fields,
    plan_reads,
)
from kvreshard.plan.cost import Way
from kvreshard.plan.stage import Move
from kvreshard.testing.oracle import Bytes, Memory, differing_bytes, oracle_transfer, write_values

Int64s = NDArray[np.int64]
POISON = 0xFF
# Of the requests, those that are also carried out on real memory: it takes as long as the rest of a check.
CARRIED_SHARE = 0.25
WAYS: tuple[Way | None, ...] = (None, "direct", "staged")


class WrongBytes(AssertionError):
    """A transfer left other bytes than the oracle, or touched bytes in a way that it must not."""


def random_memory(layout: EngineLayout, rng: np.random.Generator) -> dict[tuple[int, str], Bytes]:
    """Every region of every rank, filled with random bytes."""
    return {
        (rank.rank, region.name): rng.integers(0, 256, region.size_bytes, dtype=np.uint8)
        for rank in layout.ranks
        for region in rank.regions
    }


def poison_new_pages(layout: EngineLayout, memory: Mapping[tuple[int, str], Bytes], request: Request) -> None:
    """Fill every page that the request calls new, so that a byte left undefined is seen."""
    for rank in layout.ranks:
        for slab in rank.slabs:
            for group in layout.groups:
                if group.pool == slab.pool:
                    for page in np.asarray(request.dst_new_pages.get(group.name, ()), dtype=np.int64).tolist():
                        start = slab.offset_bytes + page * slab.page_stride_bytes
                        memory[rank.rank, slab.region][start : start + slab.page_bytes] = POISON


def compile_all(src: EngineLayout, dst: EngineLayout) -> list[Route]:
    """The routes of all destination ranks, from one election."""
    table = elect(src, dst, match_fields(src, dst).names)
    return [compile_route(src, dst, rank.rank, election=table) for rank in dst.ranks]


def run_transfer(
    src: EngineLayout,
    dst: EngineLayout,
    routes: Sequence[Route],
    request: Request,
    src_memory: Memory,
    dst_memory: Memory,
    staging_bytes: int | None = None,
) -> dict[tuple[int, str], Bytes]:
    """The destination's memory after the planned transfer, as a copy; through staging if it has a size. Raises WrongBytes."""
    after = {place: content.copy() for place, content in dst_memory.items()}
    for route in routes:
        # Every other rank posts pages, so that both types of copies are held to the oracle.
        bound = bind(route, request) if route.dst_rank % 2 else plan_reads(route, request, min_paged=1).direct
        lists = [copies.flat() for copies in bound]
        rank = dst.rank_by_number[route.dst_rank]
        written = {region.name: np.zeros(region.size_bytes, dtype=np.int64) for region in rank.regions}
        if staging_bytes is None:
            for copies in lists:
                _apply(src.rank_by_number[copies.src_rank], rank, copies, src_memory, after, written)
        else:
            _run_staged(src, rank, route, request, src_memory, after, written, staging_bytes)
        for name, times in written.items():
            if (times > 1).any():
                raise WrongBytes(
                    f"rank {rank.rank}, region '{name}': byte {int((times > 1).argmax())} is written twice"
                )
        unwritten = find_unwritten(dst, rank.rank, request, lists)
        regions, offsets = _locate(rank, unwritten.start, unwritten.stop - unwritten.start)
        for region, offset, size in zip(
            regions, offsets.tolist(), (unwritten.stop - unwritten.start).tolist(), strict=True
        ):
            if written[region][offset : offset + size].any():
                raise WrongBytes(f"rank {rank.rank}, region '{region}': bytes from {offset} are copied, then zeroed")
            after[rank.rank, region][offset : offset + size] = 0
    return after


def _run_staged(
    src: EngineLayout,
    dst_rank: Rank,
    route: Route,
    request: Request,
    src_memory: Memory,
    after: Mapping[tuple[int, str], Bytes],
    written: Mapping[str, Int64s],
    staging_bytes: int,
) -> None:
    """Every transfer through a buffer of `staging_bytes`, or of one slot where that is larger. The buffer starts poisoned."""
    staged = replace(route, transfers=tuple(_staged(transfer) for transfer in route.transfers))
    plan: ReadPlan | None = None
    while plan is None:
        try:
            plan = plan_reads(staged, request, staging_bytes)
        except BindError:  # one slot does not fit
            staging_bytes *= 2
    if plan.direct:
        raise WrongBytes(
            f"rank {route.dst_rank}: {len(plan.direct)} lists are direct, where all transfers are to be staged"
        )
    for batch in plan.batches:
        buffer = Region("staging", 0, staging_bytes)
        memory = {(-1, buffer.name): np.full(staging_bytes, POISON, dtype=np.uint8)}
        touched = {buffer.name: np.zeros(staging_bytes, dtype=np.int64)}
        rank = Rank.of(-1, (), (buffer,), (), ())
        _apply(src.rank_by_number[batch.reads.src_rank], rank, batch.reads, src_memory, memory, touched)
        for move in batch.moves:
            _apply(rank, dst_rank, _listed(route.dst_rank, move), memory, after, written)


def _staged(transfer: RankTransfer) -> RankTransfer:
    return replace(transfer, choice=replace(transfer.choice, way="staged", forced=True, is_open=False))


def _listed(dst_rank: int, move: Move) -> CopyList:
    """A strided move as a list of copies from the staging buffer."""
    source = (move.src_bases[:, None] + move.src_at).reshape(-1)
    target = (move.dst_bases[:, None] + move.dst_at).reshape(-1)
    for loop in move.loops:
        if min(loop.src_step, loop.dst_step) < 0:  # `transport.local.LocalMemory.move` takes none
            raise WrongBytes(f"rank {dst_rank}: a move steps back, by {loop.src_step} and {loop.dst_step} bytes")
        steps = np.arange(loop.count, dtype=np.int64)
        source = (source + steps[:, None] * loop.src_step).reshape(-1)
        target = (target + steps[:, None] * loop.dst_step).reshape(-1)
    return CopyList(-1, dst_rank, source, target, np.full(len(source), move.length, dtype=np.int64))


def _apply(
    src_rank: Rank,
    dst_rank: Rank,
    copies: CopyList,
    src_memory: Memory,
    after: Mapping[tuple[int, str], Bytes],
    written: Mapping[str, Int64s],
) -> None:
    if not len(copies.length) == len(copies.src_address) == len(copies.dst_address):
        raise WrongBytes(f"copy list with {len(copies.length)} lengths and {len(copies.src_address)} source addresses")
    src_regions, src_offsets = _locate(src_rank, copies.src_address, copies.length)
    dst_regions, dst_offsets = _locate(dst_rank, copies.dst_address, copies.length)
    for src_region, dst_region in sorted(set(zip(src_regions, dst_regions, strict=True))):
        here = np.array(
            [(s, d) == (src_region, dst_region) for s, d in zip(src_regions, dst_regions, strict=True)], dtype=bool
        )
        lengths = copies.length[here]
        steps = np.arange(int(lengths.sum()), dtype=np.int64)
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(src_offsets[here], lengths) + steps - before
        target = np.repeat(dst_offsets[here], lengths) + steps - before
        after[dst_rank.rank, dst_region][target] = src_memory[src_rank.rank, src_region][source]
        np.add.at(written[dst_region], target, 1)


def _locate(rank: Rank, addresses: Int64s, lengths: Int64s) -> tuple[list[str], Int64s]:
    """The region of every stretch of bytes, and its offset there. Raises WrongBytes if one is not inside a region."""
    if not len(addresses):
        return [], addresses
    regions = sorted(rank.regions, key=lambda region: region.address)
    firsts = np.array([region.address for region in regions], dtype=np.int64)
    ends = np.array([region.address + region.size_bytes for region in regions], dtype=np.int64)
    index = np.searchsorted(firsts, addresses, side="right") - 1
    wrong = (index < 0) | (addresses + lengths > ends[index]) | (lengths <= 0)
    if wrong.any():
        at = int(wrong.argmax())
        raise WrongBytes(f"rank {rank.rank}: {int(lengths[at])} bytes at {int(addresses[at])} are in no region")
    return [regions[i].name for i in index.tolist()], addresses - firsts[index]


def check_transfer(
    src: EngineLayout,
    dst: EngineLayout,
    routes: Sequence[Route],
    request: Request,
    rng: np.random.Generator,
    staging_bytes: int | None = None,
) -> int:
    """Raises WrongBytes unless plan and oracle agree on every byte of the destination, and for a share of the requests also what the
    session's own steps leave. Returns the bytes that changed.
    """
    src_memory, dst_memory = random_memory(src, rng), random_memory(dst, rng)
    write_values(src, dst, src_memory, request, int(rng.integers(1 << 30)))
    poison_new_pages(dst, dst_memory, request)
    expected = oracle_transfer(src, dst, src_memory, dst_memory, request)
    got = run_transfer(src, dst, routes, request, src_memory, dst_memory, staging_bytes)
    _check_equal(expected, got, "the plan")
    if rng.random() < CARRIED_SHARE:
        is_push, way = rng.random() < 0.2, WAYS[int(rng.integers(len(WAYS)))]
        size_bytes = int(rng.choice([256, 1 << 12, 1 << 16]))
        carried = carry(src, dst, request, src_memory, dst_memory, way=way, staging_bytes=size_bytes, is_push=is_push)
        _check_equal(
            expected, carried, "what was pushed" if is_push else f"what was pulled, way {way or 'of the model'},"
        )
    return sum(int((expected[place] != dst_memory[place]).sum()) for place in expected)


def _check_equal(expected: Memory, got: Memory, what: str) -> None:
    wrong = differing_bytes(expected, got)
    if wrong:
        shown = "; ".join(f"rank {rank} region '{name}': {ranges[:3]}" for (rank, name), ranges in wrong.items())
        raise WrongBytes(f"{what} differs from the oracle at {shown[:600]}")
