"""Small functions over columns of numbers, in NumPy: what decoding a layout and comparing its fields asks of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
# Places of all regions together are numbers far from where they wrap around.
MAX_PLACE = 1 << 62


def int64s(values: Sequence[int]) -> Int64s:
    """Whole numbers as an array. Raises OverflowError for one that has more than 64 bits."""
    return np.array(values, dtype=np.int64)


def extent_of(addresses: Int64s, sizes: Int64s) -> tuple[int, int, int, bool]:
    """The least address and size, where the last of some regions ends, and whether each begins where the one before ends, or after.

    At least one region, and as many sizes, shape (n,). 0 and False where an address or a size is negative.
    """
    low, least = int(np.minimum.reduce(addresses)), int(np.minimum.reduce(sizes))
    if low < 0 or least < 0:
        return low, least, 0, False
    ends = addresses.astype(np.uint64) + sizes.astype(np.uint64)
    return low, least, int(np.maximum.reduce(ends)), not (ends[:-1] > addresses[1:].astype(np.uint64)).any()


def row_kinds(columns: tuple[Int64s, ...]) -> tuple[Int64s, list[int]]:
    """Which rows of some columns, shape (n,), are equal: the kind of each row, numbered in the order of their first rows, and those."""
    first: dict[tuple[int, ...], int] = {}
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    for place, row in enumerate(rows):
        first.setdefault(row, place)
    number = {row: kind for kind, row in enumerate(first)}
    return np.array([number[row] for row in rows], dtype=np.int64), list(first.values())


def bounds(values: Int64s) -> tuple[int, int]:
    """The least and the greatest of some numbers, at least one."""
    return int(np.minimum.reduce(values)), int(np.maximum.reduce(values))


def are_within(places: Int64s, which: Int64s, sizes: Int64s) -> bool:
    """Whether every place lies in the thing it is of: `0 <= places[i] < sizes[which[i]]`. The numbers in `which` are right."""
    return bool(((places >= 0) & (places < sizes[which])).all())


def slab_places(
    sizes: Int64s, slabs: tuple[Int64s, Int64s, Int64s, Int64s, Int64s], num_pages: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s] | None:
    """Where regions begin, where slabs do, where their last pages end, and their first; None where a slab leaves its region, pages of it
    overlap, or numbers are too large to be sure.

    A place counts the bytes of all regions before. `sizes`: of the regions, shape (regions,). `slabs`: regions, offsets, strides, bytes of
    a page and pools, shape (slabs,), the numbers of regions and pools right. `num_pages`: of each pool.
    """
    region, offset, stride, page_bytes, pool = slabs
    if (sizes <= 0).any() or sum(sizes.tolist()) >= MAX_PLACE:
        return None
    if (offset < 0).any() or (offset >= MAX_PLACE).any() or (page_bytes <= 0).any() or (stride < page_bytes).any():
        return None
    if (num_pages[pool] > MAX_PLACE // stride).any():
        return None
    end = offset + (num_pages[pool] - 1) * stride + page_bytes
    if (end > sizes[region]).any():
        return None
    region_start = np.zeros(len(sizes), dtype=np.int64)
    np.add.accumulate(sizes[:-1], out=region_start[1:])
    before = region_start[region]
    return region_start, before + offset, before + end, before + offset + page_bytes


def shard_places(
    places: Int64s,
    slabs: tuple[Int64s, Int64s, Int64s, Int64s],
    kinds: tuple[Int64s, Int64s, Int64s, Int64s],
) -> Int64s | None:
    """Where the shards' first pages end; None where one does not lie in a slab of its stride and pool.

    `places`: where shards begin, shape (shards,). `slabs`, in the order of their places: where they begin, where their first pages end,
    strides and pools, shape (slabs,). `kinds`: of each shard the kind, shape (shards,), of each kind the bytes of a page, stride and pool.
    """
    which, reach_bytes, stride, pool = kinds
    begin, end, slab_stride, slab_pool = slabs
    slab = begin.searchsorted(places, side="right") - 1
    stops = places + reach_bytes[which]
    is_inside = (slab >= 0) & (stops <= end[slab])
    is_inside &= (slab_stride[slab] == stride[which]) & (slab_pool[slab] == pool[which])
    return stops if is_inside.all() else None


def are_apart(starts: Int64s, stops: Int64s) -> bool:
    """Whether each begins where the one before ends, or after."""
    return bool((starts[1:] >= stops[:-1]).all())
