"""Is what an outline says of slabs and shards plainly right, seen for all of them at once?

`layout_check` looks at each slab and each shard and says what is wrong. Mostly nothing is, and most outlines are simple: slabs follow one
another, every shard lies in one slab, and none reaches into the next. That is seen here with a few comparisons of whole columns:

1. `PlainSlabs.of`: every slab lies in its region with all pages of its pool, and ends where the next begins, or before.
2. `PlainSlabs.hold`: every shard's page lies in one slab of its pool and stride, and ends before the next shard's begins.

Both answer only "yes" or "look closer", never that something is wrong; they refuse nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.loops import bounds, int64s
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
        slabs, sizes = outline.slabs, outline.region_bytes.array
        if not len(slabs):
            return None
        least_bytes, most_bytes = bounds(sizes)
        offset, size, stride = slabs.offsets_bytes.array, slabs.pages_bytes.array, slabs.strides_bytes.array
        least_stride, most_stride = bounds(stride)
        if least_bytes <= 0 or most_bytes * len(sizes) >= MAX_PLACE or least_stride <= 0:
            return None
        if max(pages_of_pool.values()) * most_stride >= MAX_PLACE:
            return None
        least, most = bounds(offset)
        if least < 0 or most >= MAX_PLACE or bounds(size)[0] <= 0 or np.logical_or.reduce(stride < size):
            return None
        pools = {name: number for number, name in enumerate(pages_of_pool)}
        pool = int64s([pools[name] for name in slabs.pools])[slabs.pool_of.array]
        num_pages = int64s(list(pages_of_pool.values()))[pool]
        region_start = np.zeros(len(sizes), dtype=np.int64)
        np.add.accumulate(sizes[:-1], out=region_start[1:])
        region = slabs.region_of.array
        end = offset + (num_pages - 1) * stride + size
        before = region_start[region]
        start, last = before + offset, before + end
        if np.logical_or.reduce(end > sizes[region]):
            return None
        if np.logical_and.reduce(start[1:] >= last[:-1]):
            return PlainSlabs(region_start, start, start + size, stride, pool, pools)
        order = start.argsort(kind="stable")
        start = start[order]
        if np.logical_or.reduce(last[order][:-1] > start[1:]):
            return None
        return PlainSlabs(region_start, start, start + size[order], stride[order], pool[order], pools)

    def hold(
        self, outline: Outline, which: Int64s, pages: Sequence[Int64s], strides: Sequence[int], pools: Sequence[str]
    ) -> bool:
        """Whether all shards are plainly in their places. `which`: the kind of each shard, shape (shards,); of each kind the runs of its
        page, sorted, shape (n, 2), its page stride and its pool.
        """
        firsts = [int(runs[0, 0]) for runs in pages]
        lasts = [int(runs[-1, 1]) for runs in pages]
        start = self.region_start[outline.region_of.array] + outline.offsets_bytes.array
        if not len(start) or min(firsts) < 0 or max(lasts) >= MAX_PLACE:
            return False
        slab = self.start.searchsorted(start, side="right") - 1
        if bounds(slab)[0] < 0:
            return False
        stop = start + int64s(lasts)[which]
        is_inside: NDArray[np.bool_] = stop <= self.stop[slab]
        is_inside &= self.stride_bytes[slab] == int64s(list(strides))[which]
        is_inside &= self.pool[slab] == int64s([self.pool_numbers[pool] for pool in pools])[which]
        if not np.logical_and.reduce(is_inside):
            return False
        if np.logical_and.reduce(start[1:] >= stop[:-1]):
            return True
        order = start.argsort(kind="stable")
        return not np.logical_or.reduce(stop[order][:-1] > start[order][1:])
