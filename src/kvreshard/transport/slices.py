"""How is a copy list cut, so that posting one part takes about 20 ms?

Posting to NIXL blocks for the whole copy when the peer is on the same host (measured: 302 ms for 160 x 4 MiB), and a
thread that posts answers nobody. So:

1. `SliceCursor` cuts pieces above 16 MiB, gives every piece a cost, and groups pieces by memory kind on both sides,
   because a NIXL list has one kind.
2. `take(budget)` hands out the next pieces up to a cost, as the arrays that NIXL wants, without a loop over pieces.
3. `SliceBudget` corrects the budget from the time that each post took.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.transport.base import Addresses, Copies
from kvreshard.transport.regions import RegionTable

# One piece must not be a slice of 20 ms by itself: 16 MiB is 2 to 4 ms at a core's 4 to 8 GB/s.
MAX_PIECE_BYTES = 16 * 1024 * 1024

# A descriptor costs 2 to 3 us beside its bytes (NIXL 1.5.1, CMA), the time of 16 KiB at 6.5 GB/s.
DESCRIPTOR_COST_BYTES = 16 * 1024

# Slower links shrink to the lower bound in a few posts; above the upper one there is nothing left to amortise.
FIRST_BUDGET_BYTES = 32 * 1024 * 1024
MIN_BUDGET_BYTES = 256 * 1024
MAX_BUDGET_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Pieces for one post: rows of (address, bytes, device number), shape (n, 3) uint64, of one memory kind a side.

    `local_kind` and `remote_kind` are "cpu" or "cuda".
    """

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    local_kind: str
    remote_kind: str
    cost_bytes: int

    def __len__(self) -> int:
        return len(self.local)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    kinds: tuple[str, str]
    cumulative_cost: NDArray[np.uint64]


class SliceCursor:
    """Hands out a checked copy list slice by slice.

    Args:
        copies: the pieces.
        local, remote: the regions of both sides; every piece must lie inside one region of each.
        remote_side: how to name the remote side in a refusal.

    Raises:
        TransportError: a piece is outside the regions.
    """

    __slots__ = ("_groups", "_row")

    def __init__(self, copies: Copies, local: RegionTable, remote: RegionTable, remote_side: str) -> None:
        local_region = local.locate("local", copies.local_address, copies.length_bytes)
        remote_region = remote.locate(remote_side, copies.remote_address, copies.length_bytes)
        self._groups = _groups(copies, local, local_region, remote, remote_region)
        self._row = 0

    @property
    def exhausted(self) -> bool:
        """Whether all pieces were handed out or dropped."""
        return not self._groups

    def drop(self) -> None:
        """Hand out no more."""
        self._groups = []

    def take(self, budget_bytes: int) -> Slice:
        """The next pieces whose cost together stays within the budget, at least one. Not when exhausted."""
        group, first = self._groups[0], self._row
        before = int(group.cumulative_cost[first - 1]) if first else 0
        last = int(np.searchsorted(group.cumulative_cost, np.uint64(before + budget_bytes), side="right"))
        last = max(last, first + 1)
        cost = int(group.cumulative_cost[last - 1]) - before
        if last == len(group.local):
            self._groups = self._groups[1:]
            self._row = 0
        else:
            self._row = last
        return Slice(group.local[first:last], group.remote[first:last], *group.kinds, cost_bytes=cost)


def _groups(
    copies: Copies,
    local: RegionTable,
    local_region: NDArray[np.intp],
    remote: RegionTable,
    remote_region: NDArray[np.intp],
) -> list[_Group]:
    """The pieces as rows, grouped by memory kind on both sides; none above `MAX_PIECE_BYTES`."""
    addresses, length = (copies.local_address, copies.remote_address), copies.length_bytes
    if len(length) and int(length.max()) > MAX_PIECE_BYTES:
        owner, offset, length = _cut(length)
        addresses = (addresses[0][owner] + offset, addresses[1][owner] + offset)
        local_region, remote_region = local_region[owner], remote_region[owner]
    sides = [_devices(local, local_region), _devices(remote, remote_region)]
    rows = [_rows(address, length, device) for address, (_, device) in zip(addresses, sides, strict=True)]
    (local_kind, _), (remote_kind, _) = sides
    if isinstance(local_kind, int) and isinstance(remote_kind, int):
        return [_group(rows[0], rows[1], 2 * local_kind + remote_kind)] if len(length) else []
    kinds = np.broadcast_to(2 * np.asarray(local_kind) + np.asarray(remote_kind), length.shape)
    return [_group(rows[0][kinds == kind], rows[1][kinds == kind], int(kind)) for kind in np.unique(kinds)]


def _rows(address: Addresses, length: Addresses, device: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    rows = np.empty((len(length), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = address, length, device
    return rows


def _devices(table: RegionTable, index: NDArray[np.intp]) -> tuple[int | NDArray[np.intp], int | NDArray[np.uint64]]:
    """Of the regions at `index`: 0 for "cpu" or 1 for "cuda", and the device number; one number where all are alike."""
    numbers = [region.device.partition(":")[2] for region in table.regions]
    if len(set(numbers)) == 1:
        return int(bool(numbers[0])), int(numbers[0] or 0)
    kind = np.array([bool(number) for number in numbers], dtype=np.intp)
    return kind[index], np.array([int(number or 0) for number in numbers], dtype=np.uint64)[index]


def _cut(length_bytes: Addresses) -> tuple[NDArray[np.intp], Addresses, Addresses]:
    """Pieces of at most `MAX_PIECE_BYTES`: the row that each comes from, its offset in that row, its bytes."""
    limit = np.uint64(MAX_PIECE_BYTES)
    parts = ((length_bytes - np.uint64(1)) // limit + np.uint64(1)).astype(np.intp)
    owner = np.repeat(np.arange(len(parts)), parts)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = ordinal.astype(np.uint64) * limit
    return owner, offset, np.minimum(length_bytes[owner] - offset, limit)


def _group(local: NDArray[np.uint64], remote: NDArray[np.uint64], kind: int) -> _Group:
    names = ("cpu", "cuda")
    cost = np.cumsum(local[:, 1] + np.uint64(DESCRIPTOR_COST_BYTES))
    return _Group(local, remote, (names[kind // 2], names[kind % 2]), cost)


class SliceBudget:
    """The cost that makes a post take about `target_s` seconds, learnt from the posts so far."""

    __slots__ = ("_target_s", "budget_bytes")

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self.budget_bytes = FIRST_BUDGET_BYTES

    def learn(self, cost_bytes: int, seconds: float) -> None:
        """Correct the budget by one post. A post well below the budget says nothing unless it was too slow."""
        if cost_bytes < self.budget_bytes // 2 and seconds <= self._target_s:
            return
        # At most halved or doubled per post, since one post may have been slow for reasons of its own.
        factor = min(2.0, max(0.5, self._target_s / max(seconds, 1e-9)))
        self.budget_bytes = min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, int(cost_bytes * factor)))
