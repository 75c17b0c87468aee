"""Pieces that a transport's tests copy, and the memory that they must leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvreshard.plan.copies import CopyList
from kvreshard.testing.ranks import Ranks
from kvreshard.transport.base import Direction

# Enough for pieces above 16 MiB, which the NIXL transport cuts.
MEMORY_BYTES = 40 * 1024 * 1024

# 1, odd, powers of two and their neighbours, and 1 MiB: lengths at which copy loops change.
LENGTHS_BYTES = (1, 2, 3, 7, 8, 31, 64, 255, 256, 1000, 4095, 4096, 65537, 1024 * 1024)
Pieces = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""Local offsets, remote offsets and lengths, shapes (n,)."""


def random_pieces(
    random: np.random.Generator, num_pieces: int, first_byte: int = 0, end_byte: int = MEMORY_BYTES
) -> Pieces:
    """Pieces that overlap on neither side.

    Gaps of 0 to 40 bytes between pieces make addresses unaligned; each side has its own order and gaps. Offsets lie
    in [first_byte, end_byte); fewer pieces come out when that is too small.
    """
    lengths = random.choice(LENGTHS_BYTES, size=num_pieces).astype(np.uint64)
    room = np.cumsum(lengths + np.uint64(40)) <= end_byte - first_byte
    lengths = lengths[room]

    def place() -> NDArray[np.uint64]:
        order = random.permutation(len(lengths))
        gaps = random.integers(0, 41, size=len(lengths)).astype(np.uint64)
        ends = np.cumsum(lengths[order] + gaps)
        offsets = np.empty(len(lengths), dtype=np.uint64)
        offsets[order] = np.uint64(first_byte) + ends - lengths[order]
        return offsets

    return place(), place(), lengths


def posted(direction: Direction, local: ArrayLike, remote: ArrayLike, length: ArrayLike) -> CopyList:
    """Copies between local and remote addresses, as the side that posts them in this direction sees them."""
    return CopyList.of(remote, local, length) if direction is Direction.READ else CopyList.of(local, remote, length)


def copies_of(
    ranks: Ranks, rank: int, peer: int, direction: Direction, pieces: tuple[Sequence[int] | NDArray[np.uint64], ...]
) -> CopyList:
    """Pieces given as offsets (local, remote, length), as copies that `rank` posts to `peer`."""
    local, remote, length = (np.asarray(column, dtype=np.int64) for column in pieces)
    return posted(direction, local + ranks.address(rank), remote + ranks.address(peer), length)


class Expectation:
    """The oracle: all memory as it must be after some transfers. Made before they are posted."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._memory = [ranks.memory(rank).copy() for rank in range(ranks.num_ranks)]

    def copied(self, rank: int, peer: int, direction: Direction, pieces: tuple[NDArray[np.integer], ...]) -> None:
        """One more transfer, posted by `rank`, of pieces given as offsets."""
        local, remote = self._memory[rank], self._memory[peer]
        for here, there, length in zip(*(column.tolist() for column in pieces), strict=True):
            if direction is Direction.READ:
                local[here : here + length] = remote[there : there + length]
            else:
                remote[there : there + length] = local[here : here + length]

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Compare every byte of every rank, between two offsets."""
        for rank, whole in enumerate(self._memory):
            expected, actual = whole[start:stop], self._ranks.memory(rank)[start:stop]
            if not np.array_equal(actual, expected):
                wrong = np.flatnonzero(actual != expected)
                raise AssertionError(
                    f"rank {rank}: {wrong.size} bytes differ, the first at offset {start + wrong[0]}: "
                    f"{actual[wrong[0]]} instead of {expected[wrong[0]]}"
                )
