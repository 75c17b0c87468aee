"""Do two ways of carrying out a request bring the same bytes to the same places?

Each way is a set of copies. Both are cut at the other's borders; every piece of destination memory is then written by both
from the same source byte, by both from different ones, or by one alone. Nothing is moved, and page tables play no role.

Refused with ValueError: copies of one way that write a byte twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.plan.copies import CopyList

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MovesCompared:
    """Bytes of destination memory, by who writes them. `first_elsewhere`: the first address with two sources."""

    same_bytes: int
    elsewhere_bytes: int
    only_left_bytes: int
    only_right_bytes: int
    first_elsewhere: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """Copies in the order of their destination; `shift`: source address minus destination address."""

    start: Int64s
    stop: Int64s
    rank: Int64s
    shift: Int64s

    def at(self, addresses: Int64s) -> tuple[NDArray[np.bool_], Int64s]:
        """Which addresses are written, and by which copy."""
        if not len(self.start):
            return np.zeros(len(addresses), np.bool_), np.zeros(len(addresses), np.int64)
        index = np.maximum(np.searchsorted(self.start, addresses, side="right") - 1, 0)
        return (self.start[index] <= addresses) & (addresses < self.stop[index]), index


def compare_moves(left: Iterable[CopyList], right: Iterable[CopyList]) -> MovesCompared:
    """Compare two ways to fill the memory of one rank."""
    a, b = _sorted(left), _sorted(right)
    edges = np.unique(np.concatenate([a.start, a.stop, b.start, b.stop]))
    low, size = edges[:-1], np.diff(edges)
    in_a, index_a = a.at(low)
    in_b, index_b = b.at(low)
    both = in_a & in_b
    same = both.copy()
    same[both] = (a.rank[index_a[both]] == b.rank[index_b[both]]) & (a.shift[index_a[both]] == b.shift[index_b[both]])
    elsewhere = both & ~same
    return MovesCompared(
        int(size[same].sum()),
        int(size[elsewhere].sum()),
        int(size[in_a & ~in_b].sum()),
        int(size[in_b & ~in_a].sum()),
        int(low[elsewhere][0]) if elsewhere.any() else None,
    )


def _sorted(copies: Iterable[CopyList]) -> _Sorted:
    lists = list(copies)
    if not lists:
        none = np.zeros(0, np.int64)
        return _Sorted(none, none, none, none)
    dst = np.concatenate([part.dst_address for part in lists])
    length = np.concatenate([part.length for part in lists])
    rank = np.concatenate([np.full(part.num_copies, part.src_rank, np.int64) for part in lists])
    shift = np.concatenate([part.src_address for part in lists]) - dst
    order = np.argsort(dst, kind="stable")
    dst, length, rank, shift = dst[order], length[order], rank[order], shift[order]
    if (dst[1:] < dst[:-1] + length[:-1]).any():
        at = int(np.argmax(dst[1:] < dst[:-1] + length[:-1]))
        raise ValueError(
            f"two copies write address {dst[at + 1]:#x}: {length[at]} bytes from {dst[at]:#x}, {length[at + 1]} from there"
        )
    return _Sorted(dst, dst + length, rank, shift)
