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

from kvreshard.model.loops import MAX_PLACE, are_apart, int64s, shard_places, slab_places
from kvreshard.model.outline import Int64s, Outline


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
        if not len(slabs):
            return None
        pools = {name: number for number, name in enumerate(pages_of_pool)}
        pool, stride = int64s([pools[name] for name in slabs.pools])[slabs.pool_of.array], slabs.strides_bytes.array
        columns = slabs.region_of.array, slabs.offsets_bytes.array, stride, slabs.pages_bytes.array, pool
        found = slab_places(outline.region_bytes.array, columns, int64s(list(pages_of_pool.values())))
        if found is None:
            return None
        region_start, start, last, stop = found
        if not are_apart(start, last):
            order = start.argsort(kind="stable")
            start, stop, stride, pool = start[order], stop[order], stride[order], pool[order]
            if not are_apart(start, last[order]):
                return None
        return PlainSlabs(region_start, start, stop, stride, pool, pools)

    def hold(
        self, outline: Outline, which: Int64s, pages: Sequence[Int64s], strides: Sequence[int], pools: Sequence[str]
    ) -> bool:
        """Whether all shards are plainly in their places. `which`: the kind of each shard, shape (shards,); of each kind the runs of its
        page, sorted, shape (n, 2), its page stride and its pool.
        """
        lasts = [int(runs[-1, 1]) for runs in pages]
        if not len(which) or min([int(runs[0, 0]) for runs in pages]) < 0 or max(lasts) >= MAX_PLACE:
            return False
        start = self.region_start[outline.region_of.array] + outline.offsets_bytes.array
        kinds = which, int64s(lasts), int64s(list(strides)), int64s([self.pool_numbers[pool] for pool in pools])
        stop = shard_places(start, (self.start, self.stop, self.stride_bytes, self.pool), kinds)
        if stop is None:
            return False
        if are_apart(start, stop):
            return True
        order = start.argsort(kind="stable")
        return are_apart(start[order], stop[order])
