"""Cuts one axis into runs: cells whose addresses grow by constant steps on both sides.

Two address maps of one axis break at different coordinates: pages of 16 and 24, tiles of 16, turns of several ranks. `refine` walks from
break to break, within a window of one page or one bounded axis:

1. What source, destination and chosen part do not all hold is skipped.
2. Up to the next break of either side both addresses are affine: that is one run, a loop over its cells.
3. `fold` puts runs that repeat at constant distances into loops, innermost first, none of which steps back.

The work grows with the number of breaks in the window, never with its cells or with the length of a sequence.

Tokens of 10 bytes in pages of 6, copied to tokens of 4 bytes in tiles of 2 that lie 100 bytes apart:

>>> from kvreshard.model import Digit, Interval
>>> src = AxisMap("token", Interval(0, None), (Digit(6, 0, 10), Digit(None, 1, 0)))
>>> dst = AxisMap("token", Interval(0, None), (Digit(2, 0, 4), Digit(3, 0, 100), Digit(None, 1, 0)))
>>> for run in refine(src, dst, Interval(0, None), 0, 0, 6):
...     print(run)
page 0 byte 0 -> page 0 byte 0, (2,3):(10,20)->(4,100)
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import msgspec

from kvreshard.model.address import AxisMap, Digit, canonical
from kvreshard.model.ownership import Ownership, count_within


class Loop(msgspec.Struct, frozen=True):
    """`count` repetitions, each `src_step` / `dst_step` bytes further, on neither side back."""

    count: int
    src_step: int
    dst_step: int


class Run(msgspec.Struct, frozen=True):
    """`length` bytes that are contiguous on both sides, from a byte of a page to a byte of a page, repeated by loops, innermost first.

    Along one axis a run has no length yet, only places. Pages are relative to the first ones that overlap.
    """

    src_page: int
    dst_page: int
    src_byte: int
    dst_byte: int
    length: int = 0
    loops: tuple[Loop, ...] = ()

    @property
    def num_repeats(self) -> int:
        return prod([loop.count for loop in self.loops])

    def __str__(self) -> str:
        """Where it begins, and its loops as `(counts):(source steps)->(destination steps)`."""
        counts, *steps = (",".join(str(getattr(loop, name)) for loop in self.loops) for name in Loop.__struct_fields__)
        length = f"{self.length} bytes, " if self.length else ""
        places = f"page {self.src_page} byte {self.src_byte} -> page {self.dst_page} byte {self.dst_byte}"
        return f"{length}{places}, ({counts}):({steps[0]})->({steps[1]})"


def refine(src: AxisMap, dst: AxisMap, chosen: Ownership, src_low: int, dst_low: int, length: int) -> list[Run]:
    """Runs of the `length` coordinates that are `src_low + x` in the source's frame and `dst_low + x` in the destination's.

    The frames are those of the window's first page on each side; `chosen` is in the source's. Post-condition: the runs have every
    coordinate of the window that source, destination and chosen part hold, exactly once.
    """
    sides = ((src, _inner(src.digits), src_low), (dst, _inner(dst.digits), dst_low))
    src_step, dst_step = (inner[0].byte_step for _, inner, _ in sides)
    owners = ((src.owned, src_low), (dst.owned, dst_low), (chosen, src_low))
    runs: list[Run] = []
    at = 0
    while at < length:
        held, stop = at, length
        for owned, low in owners:
            start, end = owned.next_held(low + at)
            held, stop = max(held, start - low), min(stop, end - low)
        if held > at:
            at = held
            continue
        places = []
        for mapped, inner, low in sides:
            local = mapped.owned.to_local(low + at)
            wrap = inner[0].extent or 1
            stop = min(stop, at + wrap - local % wrap)
            places.append(_place(mapped, inner, local))
        (src_page, src_byte), (dst_page, dst_byte) = places
        loops = (Loop(stop - at, src_step, dst_step),) if stop - at > 1 else ()
        runs.append(Run(src_page, dst_page, src_byte, dst_byte, 0, loops))
        at = stop
    return fold(runs)


def count_cuts(src: AxisMap, dst: AxisMap, chosen: Ownership, src_low: int, dst_low: int, length: int) -> int:
    """At most how many steps `refine` takes, without taking them."""
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


def _place(mapped: AxisMap, inner: tuple[Digit, ...], local: int) -> tuple[int, int]:
    """Page relative to the frame's first page, and byte inside it."""
    page, local = divmod(local, mapped.indices_per_page)
    offset = 0
    for digit in inner:
        local, value = divmod(local, digit.extent or 1)
        offset += value * digit.byte_step
    return page, offset


def fold(runs: list[Run]) -> list[Run]:
    """Replace equal runs at constant distances by one with one more loop, until nothing folds.

    >>> for run in fold([Run(0, 0, 10 * i, 7 * i, 4) for i in range(3)]):
    ...     print(run)
    4 bytes, page 0 byte 0 -> page 0 byte 0, (3):(10)->(7)
    """
    while True:
        folded: list[Run] = []
        index = 0
        while index < len(runs):
            count, first = _num_repeats(runs, index), runs[index]
            if count > 1:
                following = runs[index + 1]
                loop = Loop(count, following.src_byte - first.src_byte, following.dst_byte - first.dst_byte)
                first = msgspec.structs.replace(first, loops=(*first.loops, loop))
            folded.append(first)
            index += count
        if len(folded) == len(runs):
            return runs
        runs = folded


def _num_repeats(runs: list[Run], index: int) -> int:
    """How many runs from `index` on are equal but for their bytes, which lie at constant distances, none of which goes back: a view
    of memory begins at its first byte, and torch has no negative strides.
    """
    first, last = runs[index], index
    step: tuple[int, int] | None = None
    while last + 1 < len(runs):
        here, following = runs[last], runs[last + 1]
        distance = (following.src_byte - here.src_byte, following.dst_byte - here.dst_byte)
        alike = (following.length, following.loops, following.src_page, following.dst_page) == (
            first.length,
            first.loops,
            first.src_page,
            first.dst_page,
        )
        if not alike or min(distance) < 0 or (step is not None and distance != step):
            break
        step, last = distance, last + 1
    return last - index + 1
