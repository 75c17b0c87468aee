"""Are refined runs, coalesced loops and fused fields the same bytes as cell by cell, and as few as can be?"""

from itertools import product

import numpy as np
import pytest

from kvreshard.model import AxisMap, Cyclic, Digit, Interval
from kvreshard.plan.pattern import Bases, build_pattern, coalesce, fuse
from kvreshard.plan.refine import Loop, Run, fold, refine


def cells(run: Run) -> list[tuple[int, int, int, int]]:
    """Every cell of a run, as (source page, source byte, destination page, destination byte)."""
    found = []
    for steps in product(*(range(loop.count) for loop in run.loops)):
        src = run.src_byte + sum(k * loop.src_step for k, loop in zip(steps, run.loops, strict=True))
        dst = run.dst_byte + sum(k * loop.dst_step for k, loop in zip(steps, run.loops, strict=True))
        found.append((run.src_page, src, run.dst_page, dst))
    return found


def paged(owned: Interval | Cyclic, *digits: Digit) -> AxisMap:
    return AxisMap("token", owned, (*digits, Digit(None, 1, 0)))


ALL = Interval(0, None)
MAPS = [
    paged(ALL, Digit(8, 0, 2)),
    paged(ALL, Digit(4, 0, 6), Digit(3, 0, 2)),
    paged(ALL, Digit(2, 0, 1), Digit(2, 0, 40), Digit(3, 0, 7)),
    paged(Cyclic(1, 2, 5), Digit(6, 0, 3)),
    paged(Cyclic(0, 3, 4), Digit(2, 0, 9), Digit(2, 0, 2)),
    paged(ALL, Digit(1, 0, 5)),
]


def check_refined(
    src: AxisMap, dst: AxisMap, chosen: Interval | Cyclic, src_low: int, dst_low: int, length: int
) -> list[Run]:
    """The runs of a window, which have each cell that all three hold once."""
    window = np.arange(length, dtype=np.int64)
    held = (
        src.owned.contains(window + src_low) & dst.owned.contains(window + dst_low) & chosen.contains(window + src_low)
    )
    src_page, src_byte = src.locate(src.owned.to_local(window[held] + src_low))
    dst_page, dst_byte = dst.locate(dst.owned.to_local(window[held] + dst_low))
    expected = np.stack([src_page, src_byte, dst_page, dst_byte], axis=1).tolist()
    runs = refine(src, dst, chosen, src_low, dst_low, length)
    assert sorted(map(list, (cell for run in runs for cell in cells(run)))) == sorted(expected)
    return runs


@pytest.mark.parametrize("src", MAPS)
@pytest.mark.parametrize("dst", MAPS)
def test_runs_hold_every_common_cell_once(src: AxisMap, dst: AxisMap) -> None:
    for chosen in (src.owned, Cyclic(0, 1, 2), Cyclic(2, 3, 7)):
        for src_low, dst_low, length in ((0, 0, 25), (7, 3, 11), (4, 4, 1), (30, 13, 40)):
            check_refined(src, dst, chosen, src_low, dst_low, length)


@pytest.mark.parametrize("seed", range(8))
def test_runs_hold_every_common_cell_of_intervals_once(seed: int) -> None:
    """Bounded axes, and sequences that are held whole."""
    rng = np.random.default_rng(seed)
    num_one, num_none = 0, 0
    for _ in range(200):
        is_sequence, extent = rng.random() < 0.5, int(rng.integers(1, 40))
        maps, low = [], [0, 0]
        for side in range(2):
            digits = tuple(Digit(int(n), 0, int(step)) for n, step in zip(rng.integers(1, 9, 2), (3, 100), strict=True))
            start, stop = sorted(rng.choice(extent + 1, size=2, replace=False).tolist())
            if is_sequence:
                maps.append(AxisMap("token", ALL, (*digits, Digit(None, 1, 0))))
                low[side] = int(rng.integers(0, 9))
            else:
                maps.append(AxisMap("head", Interval(start, stop), (*digits, Digit(stop - start, 0, 5000))))
        start, stop = sorted(rng.choice(extent + 1, size=2, replace=False).tolist())
        chosen = ALL if is_sequence else Interval(start, stop)
        length = int(rng.integers(0, extent + 1))
        found = check_refined(*maps, chosen, *low, length)
        num_one += len(found) == 1
        num_none += not found
    assert num_one > 20
    assert num_none > 5


def test_one_axis_with_equal_maps_is_one_run() -> None:
    mapped = AxisMap("head", Interval(0, 12), (Digit(2, 0, 4), Digit(6, 0, 100)))
    (run,) = refine(mapped, mapped, Interval(0, 12), 0, 0, 12)
    assert run.num_repeats == 12
    assert run.loops == (Loop(2, 4, 4), Loop(6, 100, 100))


def test_work_does_not_grow_with_the_extent() -> None:
    """A head of a million channels is one run, whatever is asked of it."""
    src = AxisMap("channel", Interval(0, 1 << 20), (Digit(1 << 20, 0, 2),))
    dst = AxisMap("channel", Interval(1 << 10, 1 << 19), (Digit(1 << 20, 0, 2),))
    (run,) = refine(src, dst, Interval(0, 1 << 20), 0, 0, 1 << 20)
    assert (run.num_repeats, run.src_byte, run.dst_byte) == ((1 << 19) - (1 << 10), 2 << 10, 0)


def test_fold_joins_what_repeats_and_nothing_else() -> None:
    one = [Run(0, 0, 10 * i, 7 * i) for i in range(4)]
    assert fold(one) == [Run(0, 0, 0, 0, 0, (Loop(4, 10, 7),))]
    pages = [Run(i, 0, 10 * i, 7 * i) for i in range(3)]
    assert fold(pages) == pages, "runs of different pages lie at distances that only a block table knows"
    uneven = [Run(0, 0, byte, byte) for byte in (0, 10, 25)]
    assert sorted(c for s in fold(uneven) for c in cells(s)) == sorted(c for s in uneven for c in cells(s))


def test_no_loop_steps_back() -> None:
    """Heads of a source page from its 12th token on, then from its first: at the destination the second lies before the first."""
    for sign in (1, -1):
        backwards = [Run(0, 0, 60 + sign * 10 * i, 60 - sign * 7 * i) for i in range(4)]
        assert fold(backwards) == backwards
    again = [Run(0, 0, src, dst) for src, dst in ((0, 50), (10, 60), (20, 70), (40, 0), (50, 10), (60, 20))]
    assert fold(again) == [Run(0, 0, 0, 50, 0, (Loop(3, 10, 10),)), Run(0, 0, 40, 0, 0, (Loop(3, 10, 10),))]


@pytest.mark.parametrize(
    ("loops", "expected"),
    [
        ([Loop(4, 2, 2), Loop(3, 8, 8)], (24, ())),
        ([Loop(3, 8, 8), Loop(4, 2, 2)], (24, ())),
        ([Loop(4, 2, 2), Loop(3, 8, 9)], (8, (Loop(3, 8, 9),))),
        ([Loop(4, 2, 4)], (2, (Loop(4, 2, 4),))),
        ([Loop(4, 4, 2)], (2, (Loop(4, 4, 2),))),
        ([Loop(1, 50, 60)], (2, ())),
        ([Loop(4, 10, 20), Loop(3, 40, 80)], (2, (Loop(12, 10, 20),))),
        ([Loop(4, 10, 20), Loop(3, 40, 90)], (2, (Loop(4, 10, 20), Loop(3, 40, 90)))),
    ],
)
def test_coalesce(loops: list[Loop], expected: tuple[int, tuple[Loop, ...]]) -> None:
    assert coalesce(2, loops) == expected


def bases(src: list[int], dst: list[int], region: list[int] | None = None) -> Bases:
    numbers = region or [0] * len(src)
    return Bases(*(np.array(values, dtype=np.int64) for values in (src, dst, numbers)))


@pytest.mark.parametrize(
    ("given", "fused"),
    [
        (bases([0, 8, 16], [100, 108, 116]), ([0], [100])),
        (bases([16, 0, 8], [116, 100, 108]), ([0], [100])),
        (bases([0, 8, 16, 24], [100, 108, 200, 208]), ([0, 16], [100, 200])),
        (bases([0, 8], [100, 109]), None),
        (bases([0, 9], [100, 108]), None),
        (bases([0, 8], [108, 100]), None),
        (bases([0, 8, 16], [100, 108, 200]), None),
        (bases([0, 8, 16, 30], [100, 108, 116, 130]), None),
        (bases([0], [100]), None),
        (bases([0, 8], [100, 108], [0, 1]), None),
    ],
)
def test_fuse_joins_only_what_continues_on_both_sides(given: Bases, fused: tuple[list[int], list[int]] | None) -> None:
    found = fuse(given, 8)
    assert (None if found is None else (found.src.tolist(), found.dst.tolist())) == fused


def test_a_fused_run_grows_over_its_loops_too() -> None:
    """K and V of a cell side by side, cells in a row: one run, not one per cell."""
    token = [Run(0, 0, 0, 0, 0, (Loop(5, 16, 16),))]
    channel = [Run(0, 0, 0, 0, 0, (Loop(4, 2, 2),))]
    pattern = build_pattern(bases([0, 8], [1000, 1008]), 2, [token, channel])
    assert (pattern.lengths.tolist(), pattern.bases.src.tolist(), pattern.num_bytes) == ([80], [0], 80)


def test_runs_are_listed_by_source_page_and_byte() -> None:
    runs = [Run(1, 0, 4, 0), Run(0, 0, 8, 10), Run(0, 0, 2, 20)]
    pattern = build_pattern(bases([0], [0]), 2, [runs])
    assert list(zip(pattern.src_pages.tolist(), pattern.src_offsets.tolist(), strict=True)) == [(0, 2), (0, 8), (1, 4)]
    assert pattern.dst_offsets.tolist() == [20, 10, 0]
