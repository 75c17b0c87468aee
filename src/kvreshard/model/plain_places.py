"""Is what an outline says of slabs and shards plainly right, seen for all of them at once?

`layout_check` looks at each slab and each shard and says what is wrong. Mostly nothing is, and most outlines are simple: slabs follow one
another, every shard lies in one slab, and none reaches into the next. That is seen here with a few comparisons of whole columns:

1. `PlainSlabs.of`: every slab lies in its region with all pages of its pool, and ends where the next begins, or before.
2. `PlainSlabs.hold`: every shard's page lies in one slab of its pool and stride, and ends before the next shard's begins.

Both answer only "yes" or "look closer", never that something is wrong; they refuse nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.loops import int64s
from kvreshard.model.outline import Int64s, Outline

# Places of all regions together are numbers far from where they wrap around.
MAX_PLACE = 1 << 62


class PlainSlabs(msgspec.Struct, frozen=True, eq=False):
    """Slabs of an outline in the order of their places, columns of shape (slabs,): pages are `[start, stop)` every `stride_bytes`.

    A place counts the bytes of all regions before: `region_start`, shape (regions,). `pool_numbers` says which number a pool has.
    """

    region_start: Int64s
    start: Int64s
    stop: Int64s
    stride_bytes: Int64s
    pool: Int64s
    pool_numbers: Mapping[str, int]

    @staticmethod
    def of(outline: Outline, pages_of_pool: Mapping[str, int]) -> PlainSlabs | None:
        """None where somebody must look closer; names are checked before."""
        slabs = outline.slabs
        if not slabs or sum(outline.region_bytes) >= MAX_PLACE or min(outline.region_bytes) <= 0:
            return None
        regions = {name: number for number, name in enumerate(outline.region_names)}
        pools = {name: number for number, name in enumerate(pages_of_pool)}
        strides = [slab.page_stride_bytes for slab in slabs]
        if max(pages_of_pool.values()) * max(strides) >= MAX_PLACE or min(strides) <= 0:
            return None
        try:
            offset, size, stride, region, pool = (
                int64s(column)
                for column in (
                    [slab.offset_bytes for slab in slabs],
                    [slab.page_bytes for slab in slabs],
                    strides,
                    [regions[slab.region] for slab in slabs],
                    [pools[slab.pool] for slab in slabs],
                )
            )
        except OverflowError:
            return None
        num_pages = int64s(list(pages_of_pool.values()))
        region_start = int64s([0, *accumulate(outline.region_bytes)][:-1])
        if offset.min() < 0 or size.min() <= 0 or (stride < size).any() or offset.max() >= MAX_PLACE:
            return None
        end = offset + (num_pages[pool] - 1) * stride + size
        start = region_start[region] + offset
        order = np.argsort(start, kind="stable")
        last = (region_start[region] + end)[order]
        start = start[order]
        if (end > outline.sizes[region]).any() or (last[:-1] > start[1:]).any():
            return None
        return PlainSlabs(region_start, start, start + size[order], stride[order], pool[order], pools)

    def hold(
        self, outline: Outline, which: Int64s, pages: Sequence[Int64s], strides: Sequence[int], pools: Sequence[str]
    ) -> bool:
        """Whether all shards are plainly in their places. `which`: the kind of each shard, shape (shards,); of each kind the runs of its
        page, sorted, shape (n, 2), its page stride and its pool.
        """
        first = int64s([int(runs[0, 0]) for runs in pages])
        last = int64s([int(runs[-1, 1]) for runs in pages])
        start = self.region_start[outline.region_numbers] + outline.offsets
        slab = np.searchsorted(self.start, start, side="right") - 1
        if not len(start) or slab.min() < 0 or first.min() < 0 or last.max() >= MAX_PLACE:
            return False
        stop = start + last[which]
        is_inside: NDArray[np.bool_] = stop <= self.stop[slab]
        is_inside &= self.stride_bytes[slab] == int64s(strides)[which]
        is_inside &= self.pool[slab] == int64s([self.pool_numbers[pool] for pool in pools])[which]
        if not is_inside.all():
            return False
        order = np.argsort(start, kind="stable")
        return not (stop[order][:-1] > start[order][1:]).any()
