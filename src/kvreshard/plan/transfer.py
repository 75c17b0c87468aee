"""RankTransfer: what one destination rank reads from one source rank, and how their pages overlap.

A `RankTransfer` is the unit of work: congruent fields, with base addresses, page strides and, per axis, both address maps. Block
tables come later, at bind. Its patterns depend only on where two pages overlap, so they are computed at first use and kept (`pattern_cache`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from kvreshard.model.address import AxisMap
from kvreshard.model.field import Axis
from kvreshard.model.ownership import Coordinates, Ownership
from kvreshard.model.rank import Group
from kvreshard.plan.budget import Budget
from kvreshard.plan.cost import Choice
from kvreshard.plan.cover import count_common, count_in_windows
from kvreshard.plan.pattern import Bases, Pattern, build_pattern
from kvreshard.plan.pattern_cache import PatternCache
from kvreshard.plan.refine import Run, count_cuts, refine

# Interleaves that do not divide one another meet within a few laps, or a page costs about the same in each.
LAPS_LOOKED_AT = 8
# Where one side's pages are much smaller than the other's, that many overlaps, evenly spread, tell as much as all.
OVERLAPS_LOOKED_AT = 32
MAX_CUTS = 1 << 14
# Steps of each turn that is looked at; of each cut between two pages, and of each stretch that both hold.
TURN_STEPS, CUT_STEPS, HELD_STEPS = 10, 20, 300


class Overlap(NamedTuple):
    """Where one page lies over another: the first coordinate that both have, counted from the start of either side's span, and how many."""

    src_start: int
    dst_start: int
    length: int


class Span(msgspec.Struct, frozen=True):
    """How one side's pages cut the sequence: `indices` coordinates lie in `pages` consecutive pages.

    `ring_pages`: in how many pages a ring wraps, None without a ring; a state wraps in its one page. `capacity`: coordinates
    that a ring holds.
    """

    indices: int
    pages: int
    ring_pages: int | None
    capacity: int | None


class TransferAxis(msgspec.Struct, frozen=True):
    """One axis of a transfer: the fields' axis, both sides' maps of it, and the elected part."""

    axis: Axis
    src: AxisMap
    dst: AxisMap
    chosen: Ownership

    @property
    def name(self) -> str:
        return self.axis.name

    @property
    def extent(self) -> int | None:
        return self.axis.extent


@dataclass(frozen=True)
class RankTransfer:
    """Congruent fields that `dst_rank` reads from `src_rank`. Bases have shape (len(fields),), addresses in bytes.

    `src_span`, `dst_span`: how either side's pages cut the sequence. `choice`: how it is read; directly, unless `compile` decides otherwise.
    """

    src_rank: int
    dst_rank: int
    src_group: Group
    dst_group: Group
    fields: tuple[str, ...]
    bases: Bases
    element_bytes: int
    src_page_stride_bytes: int
    dst_page_stride_bytes: int
    axes: tuple[TransferAxis, ...]
    src_span: Span
    dst_span: Span
    choice: Choice = Choice()  # noqa: RUF009 (frozen)
    pattern_cache: PatternCache = field(default_factory=PatternCache, compare=False, repr=False)

    @cached_property
    def along(self) -> TransferAxis | None:
        """The sequence axis, None for a state."""
        return next((axis for axis in self.axes if axis.extent is None), None)

    @property
    def is_state(self) -> bool:
        """Whether a page holds a whole state, without a sequence axis."""
        return self.along is None

    @property
    def tokens_per_index(self) -> int:
        return self.along.axis.tokens_per_index if self.along else 1

    def pattern(self, overlap: Overlap) -> Pattern:
        """The runs where a source page and a destination page overlap; kept for the next time."""
        # The bases are the transfer's own object, and stay so in every choice of it.
        return self.pattern_cache.get(self.bases, overlap, lambda: self._make_pattern(overlap), Pattern.cached_bytes)

    def _make_pattern(self, overlap: Overlap) -> Pattern:
        return build_pattern(self.bases, self.element_bytes, [self._refine(axis, overlap) for axis in self.axes])

    def _refine(self, axis: TransferAxis, overlap: Overlap) -> list[Run]:
        if axis.extent is None:
            return refine(axis.src, axis.dst, axis.chosen, *overlap)
        return refine(axis.src, axis.dst, axis.chosen, 0, 0, axis.extent)

    def typical_window(self) -> tuple[int, int]:
        """The coordinates of the fullest overlap of two pages near the start of a sequence: what a page costs.

        Where ranks share the sequence, the first overlap may hold nothing of this transfer; some laps are looked at.
        """
        src_size, dst_size = self.src_span.indices, self.dst_span.indices
        along = self.along
        if along is None or along.src.owned.period == along.dst.owned.period == along.chosen.period == 1:
            return 0, min(src_size, dst_size)
        windows = typical_windows(src_size, dst_size)
        fullest = np.argmax(count_in_windows(along.chosen, along.dst.owned, *windows))
        return int(windows[0][fullest]), int(windows[1][fullest])

    def typical_pattern(self, budget: Budget) -> Pattern:
        """The pattern of `typical_window`. Raises LayoutMismatch where finding the window, or the runs in it, takes too long."""
        name, along = self.fields[0], self.along
        longest = 1 if along is None else max(along.chosen.period, along.dst.owned.period)
        turns = OVERLAPS_LOOKED_AT * (min(self.src_span.indices, self.dst_span.indices) // longest + 1)
        budget.spend(name, TURN_STEPS * turns, "pages of too many turns")
        low, high = self.typical_window()
        cuts, held = self._predict(low, high)
        budget.spend(name, CUT_STEPS * cuts + HELD_STEPS * held, "pages that cut one another into too many intervals")
        return self.pattern(self.overlap_of(low, high))

    def overlap_of(self, low: int, high: int) -> Overlap:
        """A window in the spans of both sides."""
        return Overlap(low % self.src_span.indices, low % self.dst_span.indices, high - low)

    def _predict(self, low: int, high: int) -> tuple[int, int]:
        """Of the pattern of a window, at most: how many cuts it has along all axes, and how many stretches are kept."""
        overlap = self.overlap_of(low, high)
        cuts, held = 0, 0
        for axis in self.axes:
            window = overlap if axis.extent is None else (0, 0, axis.extent)
            here = count_cuts(axis.src, axis.dst, axis.chosen, *window)
            if axis.extent is None:
                common = int(count_in_windows(axis.chosen, axis.dst.owned, np.array([low]), np.array([high]))[0])
            else:
                common = count_common(axis.extent, axis.chosen, axis.dst.owned)
            cuts, held = cuts + here, held + min(here, common)
        return cuts, held


@lru_cache(maxsize=64)
def typical_windows(src_size: int, dst_size: int) -> tuple[Coordinates, Coordinates]:
    """First and behind the last coordinate of some overlaps of spans of two sizes, from the start of the sequence on."""
    reach = min(
        math.lcm(src_size, dst_size), LAPS_LOOKED_AT * max(src_size, dst_size), MAX_CUTS * min(src_size, dst_size)
    )
    cuts = np.union1d(*(np.arange(0, reach + 1, size, dtype=np.int64) for size in (src_size, dst_size)))
    every = -(-len(cuts) // OVERLAPS_LOOKED_AT) | 1  # odd: where two ranks take turns, both turns are seen
    return cuts[:-1][::every], cuts[1:][::every]
