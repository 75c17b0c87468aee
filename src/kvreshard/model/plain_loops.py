"""What `_loops.pyx` does, in NumPy: by this it is tested, and this runs where nothing was compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]


def page_ids(pages: ArrayLike) -> NDArray[np.generic]:
    """A copy of the page ids, as an array of whatever they are."""
    return np.array(pages)


def bounds(values: Int64s) -> tuple[int, int]:
    """The least and the greatest of some numbers, at least one."""
    return int(np.minimum.reduce(values)), int(np.maximum.reduce(values))


def neighbours(src: Int64s, dst: Int64s) -> tuple[bool, int, int]:
    """Whether `src` ascends; if so, how many pairs continue the one before on both sides, and how many do at the source."""
    steps = src[1:] - src[:-1]
    if len(steps) and np.minimum.reduce(steps) < 0:
        return False, 0, 0
    continues = steps == 1
    return True, int(np.count_nonzero(continues & (dst[1:] - dst[:-1] == 1))), int(np.count_nonzero(continues))


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
