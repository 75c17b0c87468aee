"""Cuts one axis into stretches whose addresses grow by constant steps on both sides.

Two address maps of the same axis break at different coordinates: pages of 16 and 24, tiles of 16, cyclic runs. Within a
window the answer is a short list of `Strip`s, each a nest of loops with a constant step on both sides:

1. Cut the window at every edge of either side's ownership, of the chosen part, and of either side's innermost digit.
2. Keep the stretches that all three hold; within one, both addresses are affine.
3. Fold stretches that repeat at constant distances into loops that never step back, innermost first.

The work grows with the number of edges in the window (one page or one bounded axis), never with its elements or with
the length of a sequence.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import msgspec
import numpy as np

from kvreshard.model.address import AxisMap, Digit, canonical
from kvreshard.model.ownership import Coordinates, Interval, Ownership, count_within


class Loop(msgspec.Struct, frozen=True):
    """`count` repetitions, each `src_step` / `dst_step` bytes further, on neither side back."""

    count: int
    src_step: int
    dst_step: int


class Strip(msgspec.Struct, frozen=True):
    """Cells along one axis: first cell (page relative to the window's first page, byte within it) and loops, innermost first."""

    src_page: int
    dst_page: int
    src_byte: int
    dst_byte: int
    loops: tuple[Loop, ...]

    @property
    def num_cells(self) -> int:
        return prod([loop.count for loop in self.loops])


def refine(src: AxisMap, dst: AxisMap, chosen: Ownership, src_low: int, dst_low: int, length: int) -> list[Strip]:
    """Strips of the `length` coordinates that are `src_low + x` in the source's frame and `dst_low + x` in the destination's.

    The frames are those of the window's first page on each side; `chosen` is in the source's. Post-condition: the strips
    hold every coordinate of the window that source, destination and chosen part hold, exactly once.
    """
    src_inner, dst_inner = _inner(src.digits), _inner(dst.digits)
    if isinstance(src.owned, Interval) and isinstance(dst.owned, Interval) and isinstance(chosen, Interval):
        # What intervals have in common is one stretch, which mostly lies in one digit of both sides.
        low = max(0, src.owned.start - src_low, chosen.start - src_low, dst.owned.start - dst_low)
        stops = ((src.owned.stop, src_low), (chosen.stop, src_low), (dst.owned.stop, dst_low))
        high = min([length, *(stop - at for stop, at in stops if stop is not None)])
        if low >= high:
            return []
        if _is_in_one_digit(src, src_inner, low + src_low, high + src_low) and _is_in_one_digit(
            dst, dst_inner, low + dst_low, high + dst_low
        ):
            src_place, dst_place = _place(src, src_inner, low + src_low), _place(dst, dst_inner, low + dst_low)
            steps = Loop(high - low, src_inner[0].byte_step, dst_inner[0].byte_step)
            return [Strip(src_place[0], dst_place[0], src_place[1], dst_place[1], (steps,) if steps.count > 1 else ())]
    return _cut(src, dst, chosen, src_low, dst_low, length, src_inner, dst_inner)


def _cut(
    src: AxisMap,
    dst: AxisMap,
    chosen: Ownership,
    src_low: int,
    dst_low: int,
    length: int,
    src_inner: tuple[Digit, ...],
    dst_inner: tuple[Digit, ...],
) -> list[Strip]:
    """`refine`, whatever the axes look like."""
    cuts = [
        np.array([0, length], dtype=np.int64),
        src.owned.edges(src_low, src_low + length) - src_low,
        dst.owned.edges(dst_low, dst_low + length) - dst_low,
        chosen.edges(src_low, src_low + length) - src_low,
        _digit_edges(src.owned, src_inner, src_low, length),
        _digit_edges(dst.owned, dst_inner, dst_low, length),
    ]
    edges = np.unique(np.concatenate(cuts))
    starts, lengths = edges[:-1], np.diff(edges)
    held = (
        src.owned.contains(starts + src_low) & dst.owned.contains(starts + dst_low) & chosen.contains(starts + src_low)
    )
    starts, lengths = starts[held], lengths[held]
    src_page, src_byte = _locate(src, src_inner, starts + src_low)
    dst_page, dst_byte = _locate(dst, dst_inner, starts + dst_low)
    src_step, dst_step = src_inner[0].byte_step, dst_inner[0].byte_step
    stretches = [
        Strip(sp, dp, sb, db, (Loop(count, src_step, dst_step),) if count > 1 else ())
        for sp, dp, sb, db, count in zip(
            src_page.tolist(), dst_page.tolist(), src_byte.tolist(), dst_byte.tolist(), lengths.tolist(), strict=True
        )
    ]
    return fold(stretches)


def count_cuts(src: AxisMap, dst: AxisMap, chosen: Ownership, src_low: int, dst_low: int, length: int) -> int:
    """At most how many cuts `refine` makes, without making them."""
    cuts = 2
    for owned in (src.owned, dst.owned, chosen):
        cuts += 2 * (length // owned.period + 2 if owned.period > 1 else 1)
    for mapped, low in ((src, src_low), (dst, dst_low)):
        held = count_within(mapped.owned, low, low + length)
        cuts += held // (_inner(mapped.digits)[0].extent or 1) + 1
    return cuts


@lru_cache(maxsize=1 << 12)
def _inner(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """The digits inside a page, canonical. An engine's axes have a few kinds of them, and every transfer asks several times."""
    return canonical(tuple(d for d in digits if not d.page_step and d.extent is not None))


def _digit_edges(owned: Ownership, inner: tuple[Digit, ...], low: int, length: int) -> Coordinates:
    """Window coordinates at which the innermost digit wraps on one side."""
    extent = inner[0].extent or 1
    first, last = owned.count_below(low), owned.count_below(low + length)
    local = np.arange(-(-first // extent), -(-last // extent), dtype=np.int64) * extent
    return owned.to_global(local) - low


def _is_in_one_digit(mapped: AxisMap, inner: tuple[Digit, ...], start: int, stop: int) -> bool:
    """Whether the innermost digit does not wrap between the coordinates `[start, stop)` of an interval."""
    extent, first = inner[0].extent or 1, mapped.owned.start
    return (start - first) // extent == (stop - 1 - first) // extent


def _place(mapped: AxisMap, inner: tuple[Digit, ...], coordinate: int) -> tuple[int, int]:
    """`_locate` of one coordinate of an interval."""
    page, local = divmod(coordinate - mapped.owned.start, mapped.indices_per_page)
    offset = 0
    for digit in inner:
        local, value = divmod(local, digit.extent or 1)
        offset += value * digit.byte_step
    return page, offset


def _locate(mapped: AxisMap, inner: tuple[Digit, ...], coordinates: Coordinates) -> tuple[Coordinates, Coordinates]:
    """Page relative to the frame's first page, and byte inside it."""
    page, local = np.divmod(mapped.owned.to_local(coordinates), mapped.indices_per_page)
    offset = np.zeros_like(local)
    for digit in inner:
        local, value = np.divmod(local, digit.extent or 1)
        offset += value * digit.byte_step
    return page, offset


def fold(items: list[Strip]) -> list[Strip]:
    """Replace runs of equal strips at constant distances by one strip with one more loop, until nothing folds."""
    while True:
        folded: list[Strip] = []
        index = 0
        while index < len(items):
            count = _num_repeats(items, index)
            first = items[index]
            if count > 1:
                following = items[index + 1]
                loop = Loop(count, following.src_byte - first.src_byte, following.dst_byte - first.dst_byte)
                first = Strip(first.src_page, first.dst_page, first.src_byte, first.dst_byte, (*first.loops, loop))
            folded.append(first)
            index += count
        if len(folded) == len(items):
            return items
        items = folded


def _num_repeats(items: list[Strip], index: int) -> int:
    """How many strips from `index` on have the same loops and pages and lie at constant distances, none of which goes back: a view
    of memory begins at its first byte, and torch has no negative strides.
    """
    first, last = items[index], index
    step: tuple[int, int] | None = None
    while last + 1 < len(items):
        here, following = items[last], items[last + 1]
        distance = (following.src_byte - here.src_byte, following.dst_byte - here.dst_byte)
        same = (following.loops, following.src_page, following.dst_page) == (
            first.loops,
            first.src_page,
            first.dst_page,
        )
        if not same or min(distance) < 0 or (step is not None and distance != step):
            break
        step, last = distance, last + 1
    return last - index + 1
