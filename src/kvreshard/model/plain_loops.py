"""What `_loops.pyx` does, in NumPy: by this it is tested, and this runs where nothing was compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]
# Places of all regions together are numbers far from where they wrap around.
MAX_PLACE = 1 << 62


def page_ids(pages: ArrayLike) -> NDArray[np.generic]:
    """A copy of the page ids, as an array of whatever they are."""
    return np.array(pages)


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


def run_bounds(first: Int64s, counts: Int64s) -> tuple[int, int]:
    """The least and the greatest of some runs of numbers, `counts[i]` from `first[i]` on, none of them empty, at least one."""
    return int(np.minimum.reduce(first)), int(np.maximum.reduce(first + (counts - 1)))


def ordered(src_parts: list[Int64s], dst_parts: list[Int64s]) -> tuple[Int64s, Int64s, int, int]:
    """Pairs of pages in the order of the source; how many continue the pair before on both sides, and how many do at the source.

    The pages of each side are those of its parts, one after another, at least one part; the same array where it is the only one and in order.
    """
    src = src_parts[0] if len(src_parts) == 1 else np.concatenate(src_parts)
    dst = dst_parts[0] if len(dst_parts) == 1 else np.concatenate(dst_parts)
    steps = src[1:] - src[:-1]
    if len(steps) and np.minimum.reduce(steps) < 0:
        order = src.argsort(kind="stable")
        src, dst = src[order], dst[order]
        steps = src[1:] - src[:-1]
    continues = steps == 1
    joined = int(np.count_nonzero(continues & (dst[1:] - dst[:-1] == 1)))
    return src, dst, joined, int(np.count_nonzero(continues))


def runs(src: Int64s, dst: Int64s, most_pages: int) -> tuple[Int64s, Int64s, Int64s]:
    """Source page, destination page and number of pages of every run that continues on both sides, a new one each `most_pages`."""
    begins = np.ones(len(src), dtype=bool)
    np.logical_or(src[1:] - src[:-1] != 1, dst[1:] - dst[:-1] != 1, out=begins[1:])
    begins[::most_pages] = True
    starts = np.flatnonzero(begins)
    return src[starts], dst[starts], np.diff(starts, append=len(src))


def frame_rows(
    entries: tuple[Uint64s, Uint64s, Uint64s],
    stride_bytes: tuple[int, int],
    devices: tuple[int, int],
    pages: tuple[Int64s, Int64s, Int64s],
    cost_bytes: int,
) -> tuple[Uint64s, Uint64s, Uint64s]:
    """The entries of a frame, one by one for some runs of pages, with what all before each cost beside its bytes.

    `entries`: addresses of both sides and lengths, shape (e,); `pages`: the first of both sides and how many, shape (n,). Returns rows
    (address, bytes, device) of both sides, shape (e * n, 3), and the cost before each and of all, shape (e * n + 1,).
    """
    lengths = (entries[2][:, None] * pages[2].astype(np.uint64)).reshape(-1)
    rows = []
    for side in range(2):
        at = pages[side].astype(np.uint64) * np.uint64(stride_bytes[side])
        rows.append(
            np.stack([(entries[side][:, None] + at).reshape(-1), lengths, np.full_like(lengths, devices[side])], 1)
        )
    cost = np.zeros(len(lengths) + 1, dtype=np.uint64)
    np.add.accumulate(lengths + np.uint64(cost_bytes), out=cost[1:])
    return rows[0], rows[1], cost


def strided_rows(address: Uint64s, length_bytes: Uint64s, device: int, stride_bytes: int, count: int) -> Uint64s:
    """Rows of (address, bytes, device, stride, count), shape (n, 5), of addresses and lengths of shape (n,). Raises ValueError."""
    rows = np.empty((len(length_bytes), 5), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = address, length_bytes
    rows[:, 2], rows[:, 3], rows[:, 4] = device, stride_bytes, count
    return rows


def lane_entries(lanes: list[tuple[Int64s, Int64s, Int64s, Int64s, Int64s]]) -> tuple[Int64s, Int64s, Int64s]:
    """What every field has of every run, lane after lane: where it starts on both sides, and its length, shape (n,).

    A lane: bases of its fields on both sides, shape (fields,), offsets of its runs on both sides and lengths, shape (runs,). At least one.
    """
    src = [(lane[0][:, None] + lane[2]).reshape(-1) for lane in lanes]
    dst = [(lane[1][:, None] + lane[3]).reshape(-1) for lane in lanes]
    length = [np.broadcast_to(lane[4], (len(lane[0]), len(lane[4]))).reshape(-1) for lane in lanes]
    return np.concatenate(src), np.concatenate(dst), np.concatenate(length)


def pieces_extent(local: Uint64s, remote: Uint64s, length_bytes: Uint64s) -> tuple[int, int, int, int, bool]:
    """The greatest address of both sides, the greatest length, the sum of all, and whether all lengths are equal; at least one piece."""
    longest = int(np.maximum.reduce(length_bytes))
    are_equal = int(np.minimum.reduce(length_bytes)) == longest
    most_local, most_remote = int(np.maximum.reduce(local)), int(np.maximum.reduce(remote))
    return most_local, most_remote, longest, int(np.add.reduce(length_bytes)), are_equal


def frame_copies(
    entries: tuple[Int64s, Int64s, Int64s], stride_bytes: tuple[int, int], pages: tuple[Int64s, Int64s, Int64s]
) -> tuple[Int64s, Int64s, Int64s]:
    """The entries of a frame, one by one for some runs of pages: addresses of both sides and lengths, shape (e * n,).

    `entries`: where they start on both sides, and lengths, shape (e,); `pages`: the first of both sides and how many, shape (n,).
    """
    src, dst = (
        (start[:, None] + page * stride).reshape(-1)
        for start, page, stride in zip(entries[:2], pages[:2], stride_bytes, strict=True)
    )
    return src, dst, (entries[2][:, None] * pages[2]).reshape(-1)


def frame_indices(
    local_page: Int64s, remote_page: Int64s, counts: tuple[int, int], first: int, stop: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pieces `[first, stop)` of a frame as indices of both sides, entry after entry: entry * `count` of its side + page, shape (n,)."""
    num_pages = len(local_page)
    entry = first // num_pages
    entries = np.arange(entry, -(-stop // num_pages))
    rows = slice(first - entry * num_pages, stop - entry * num_pages)
    local, remote = (
        (entries[:, None] * count + page).reshape(-1)[rows].astype(np.int32)
        for page, count in zip((local_page, remote_page), counts, strict=True)
    )
    return local, remote


def piece_rows(
    pieces: tuple[Uint64s, Uint64s, Uint64s], devices: tuple[int, int], cost_bytes: int
) -> tuple[Uint64s, Uint64s, Uint64s, int]:
    """Pieces, addresses of both sides and lengths of shape (n,), as rows (address, bytes, device) of both sides, shape (n, 3), with
    what all before each and all of them cost beside their bytes, shape (n + 1,), and the longest.
    """
    length = pieces[2]
    local, remote = (
        np.stack([address, length, np.full_like(length, device)], 1)
        for address, device in zip(pieces[:2], devices, strict=True)
    )
    cost = np.zeros(len(length) + 1, dtype=np.uint64)
    np.add.accumulate(length + np.uint64(cost_bytes), out=cost[1:])
    return local, remote, cost, int(np.maximum.reduce(length, initial=0))


def reach(address: Uint64s, length_bytes: Uint64s) -> tuple[int, int]:
    """The first byte of any piece and the last byte of any, at least one piece, none of them empty or around the end of memory."""
    return int(np.minimum.reduce(address)), int(np.maximum.reduce(address + (length_bytes - np.uint64(1))))


def slot_reads(
    src_page: Int64s,
    boxes: tuple[Int64s, Int64s, Int64s],
    sizes_bytes: tuple[int, int],
    bases: Int64s,
    fields_each: int,
) -> tuple[Int64s, Int64s, Int64s, int]:
    """What fills staging buffers, `fields_each` fields at a time: the boxes of every slot, those that continue on both sides joined.

    `src_page`: page ids, shape (slots, boxes) or (slots, 1); `boxes`: offsets in the page and in the slot, and lengths, shape (boxes,);
    `sizes_bytes`: page stride and slot. Returns addresses from `bases` on, offsets in the buffer, lengths, and how many of a field.
    """
    stride_bytes, slot_bytes = sizes_bytes
    source = src_page * stride_bytes + boxes[0]
    place = np.arange(len(src_page), dtype=np.int64)[:, None] * slot_bytes + boxes[1]
    length = np.broadcast_to(boxes[2], source.shape).reshape(-1)
    source, place = source.reshape(-1), place.reshape(-1)
    apart = (source[1:] != source[:-1] + length[:-1]) | (place[1:] != place[:-1] + length[:-1])
    starts = np.flatnonzero(np.concatenate([[True], apart]))
    source, place, length = source[starts], place[starts], np.add.reduceat(length, starts)
    field_at = np.arange(len(bases), dtype=np.int64) % fields_each * (len(src_page) * slot_bytes)
    found = (bases[:, None] + source).reshape(-1), (field_at[:, None] + place).reshape(-1)
    return *found, np.tile(length, len(bases)), len(length)


def shifted(values: Int64s, counts: list[int], by: list[int]) -> Int64s:
    """The values, which are groups of so many one after another, each greater by its group's number. Raises ValueError for other counts."""
    found: Int64s = values + np.repeat(np.array(by, dtype=np.int64), counts)
    return found


def are_pieces(local: Int64s, remote: Int64s, length_bytes: Int64s) -> bool:
    """Whether there is a length for every address of both sides, no address is negative, and no piece is empty."""
    if not len(local) == len(remote) == len(length_bytes):
        return False
    return not len(local) or bool(
        min(np.minimum.reduce(local), np.minimum.reduce(remote)) >= 0 and np.minimum.reduce(length_bytes) >= 1
    )


def affordable(cost_before: Uint64s, first: int, stop: int, budget: int) -> int:
    """Up to which of the pieces `[first, stop)` a budget reaches, at least past one.

    `cost_before`: what all before each piece cost, and all of them, shape (n + 1,).
    """
    before = int(cost_before[first])
    if int(cost_before[stop]) - before > budget:
        return max(first + 1, int(cost_before.searchsorted(np.uint64(before + budget), side="right")) - 1)
    return stop
