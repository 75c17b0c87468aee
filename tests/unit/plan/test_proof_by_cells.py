"""Does the proof accept only what is right cell by cell? Routes with random boxes, against a count of every cell's sources."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from tests.pairs.small import engine

from kvreshard.kinds import Attention
from kvreshard.model import Cyclic, EngineLayout, Interval, LayoutError, Ownership
from kvreshard.model.changed import replace
from kvreshard.plan import RankTransfer, Route, compile_route
from kvreshard.plan.check import find_faults

KIND = Attention(4, 2, "bfloat16")
ENGINES = [
    {},
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "dcp": 2, "page": 6},
    {"tp": 2, "dcp": 2, "interleave": 2},
    {"tp": 3},
    {"tp": 6, "dcp": 3},
]


def draw(rng: np.random.Generator, extent: int | None) -> Ownership:
    """Of an axis, or of none."""
    while True:
        low, high, step = (int(number) for number in rng.integers(0, 8 if extent is None else extent + 2, 3))
        try:
            if extent is None and rng.integers(4):
                return Cyclic(low, high, step) if rng.integers(4) else Interval(0, None)
            return Interval(low, high) if rng.integers(6) else Cyclic(low, high, step)
        except LayoutError:
            continue


def with_box(transfer: RankTransfer, axis: int, chosen: Ownership) -> RankTransfer:
    axes = list(transfer.axes)
    axes[axis] = replace(axes[axis], chosen=chosen)
    return replace(transfer, axes=tuple(axes))


def changed(rng: np.random.Generator, route: Route) -> Route:
    """The route with a box less, one twice, one cut in two, two that have changed places, or one that is another."""
    transfers = list(route.transfers)
    number, axis = int(rng.integers(len(transfers))), int(rng.integers(3))
    transfer = transfers[number]
    match rng.integers(6):
        case 0:
            del transfers[number]
        case 1:
            transfers.append(transfer)
        case 2 if (
            isinstance(chosen := transfer.axes[1].chosen, Interval) and chosen.stop and chosen.stop - chosen.start > 1
        ):
            transfers[number : number + 1] = [
                with_box(transfer, 1, Interval(chosen.start, chosen.start + 1)),
                with_box(transfer, 1, Interval(chosen.start + 1, chosen.stop)),
            ]
        case 4:
            other = int(rng.integers(len(transfers)))
            mine, others = [axis.chosen for axis in transfer.axes], [axis.chosen for axis in transfers[other].axes]
            for index in range(3):
                transfers[number] = with_box(transfers[number], index, others[index])
                transfers[other] = with_box(transfers[other], index, mine[index])
        case 3:
            rng.shuffle(transfers)  # type: ignore[arg-type]
        case _:
            transfers[number] = with_box(transfer, axis, draw(rng, transfer.axes[axis].extent))
    return replace(route, transfers=tuple(transfers))


def is_right(route: Route, dst: EngineLayout) -> bool:
    """Whether every cell that the rank holds is written once, by a source that holds it, and so is no cell of an axis' outside."""
    rank = dst.rank_by_number[route.dst_rank]
    periods = {
        o.period
        for transfer in route.transfers
        for o in (transfer.axes[0].chosen, transfer.axes[0].src.owned, transfer.axes[0].dst.owned)
    }
    tokens = 2 * math.lcm(*periods, 8)
    for name, shard in rank.shard_by_field.items():
        mine = [held(mapped.owned, extent) for mapped, extent in zip(shard.geometry.axes, (tokens, 4, 2), strict=True)]
        written = dict.fromkeys(product(*mine), 0)
        for transfer in route.transfers:
            if name not in transfer.fields:
                continue
            boxes = [
                (held(axis.chosen, extent), held(axis.src.owned, extent), own)
                for axis, extent, own in zip(transfer.axes, (tokens, 4, 2), mine, strict=True)
            ]
            for cell in product(*(chosen & own for chosen, _, own in boxes)):
                written[cell] += 1
                if any(index not in given for index, (_, given, _) in zip(cell, boxes, strict=True)):
                    return False
        if set(written.values()) != {1}:
            return False
    return True


def held(owned: Ownership, extent: int) -> set[int]:
    coordinates = np.arange(extent)
    return set(coordinates[owned.contains(coordinates)].tolist())


def test_what_the_proof_accepts_is_right_cell_by_cell(run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    accepted = refused = 0
    for _ in range(300):
        src, dst = (engine(name, kind=KIND, **ENGINES[rng.integers(len(ENGINES))]) for name in ("prefill", "decode"))
        right = compile_route(src, dst, int(rng.choice([rank.rank for rank in dst.ranks])))
        assert is_right(right, dst)
        route = changed(rng, right)
        if next(find_faults(route, src, dst), None) is None:
            accepted += 1
            assert is_right(route, dst), route.transfers
        else:
            refused += 1
    assert min(accepted, refused) > 30
