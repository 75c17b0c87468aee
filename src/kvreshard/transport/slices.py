"""How is a copy list cut, so that posting one part takes about 20 ms?

Posting to NIXL blocks for the whole copy when the peer is on the same host (measured: 302 ms for 160 x 4 MiB), unless its own
threads share it, and a thread that posts answers nobody. So:

1. `SliceCursor` cuts pieces above 16 MiB, gives every piece a cost, and groups pieces by memory kind on both sides,
   because a NIXL list has one kind.
2. `take(budget)` hands out the next pieces up to a cost, as the arrays that NIXL wants, without a loop over pieces.
3. Copies that are posted part by part are placed once (`PlacedCopies`); a `PartCursor` hands out the rows of a part.
4. `SliceBudget` corrects the budget from the time that each post took.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvreshard.model.loops import affordable, piece_rows
from kvreshard.transport.base import Addresses, Copies
from kvreshard.transport.regions import RegionTable

# One piece must not be a slice of 20 ms by itself: 16 MiB is 2 to 4 ms at a core's 4 to 8 GB/s.
MAX_PIECE_BYTES = 16 * 1024 * 1024

# A descriptor costs 2 to 3 us beside its bytes (NIXL 1.5.1, CMA), the time of 16 KiB at 6.5 GB/s.
DESCRIPTOR_COST_BYTES = 16 * 1024

# So many pieces of one post are shared by NIXL's threads, whose own bound is 1024. A staged batch has fewer, and is read faster by the thread
# that posts it (docs/design/0020).
SPLIT_PIECES = 64
# Two, four and eight threads divide what they share without a rest.
SHARES = 8

# Slower links shrink to the lower bound in a few posts; above the upper one there is nothing left to amortise.
FIRST_BUDGET_BYTES = 32 * 1024 * 1024
MIN_BUDGET_BYTES = 256 * 1024
MAX_BUDGET_BYTES = 1024 * 1024 * 1024


KINDS = ("cpu", "cuda")


class Slice(msgspec.Struct, frozen=True, eq=False):
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


class _Side(msgspec.Struct, frozen=True, eq=False):
    """One side of the pieces: addresses, shape (n,), and where they lie: 0 for "cpu" or 1 for "cuda", and the device number;
    one of each where all are alike.
    """

    address: Addresses
    kind: int | NDArray[np.intp]
    number: int | NDArray[np.uint64]

    @property
    def is_of_one_device(self) -> bool:
        """Whether all pieces lie on one, so that kind and number are one each."""
        return isinstance(self.kind, int) and isinstance(self.number, int)

    def of(self, rows: NDArray[np.intp]) -> _Side:
        """Some of the pieces."""
        if isinstance(self.kind, int) or isinstance(self.number, int):
            return _Side(self.address[rows], self.kind, self.number)
        return _Side(self.address[rows], self.kind[rows], self.number[rows])

    def rows(self, first: int, last: int, length_bytes: Addresses) -> NDArray[np.uint64]:
        """NIXL's form of the pieces `[first, last)`: made slice by slice, since pages of fresh memory are dear."""
        rows = np.empty((last - first, 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = self.address[first:last], length_bytes
        rows[:, 2] = self.number if isinstance(self.number, int) else self.number[first:last]
        return rows


class _Group(msgspec.Struct, frozen=True, eq=False):
    """Pieces of one memory kind a side, and the cost of all before each, shape (n + 1,)."""

    local: _Side
    remote: _Side
    length_bytes: Addresses
    kinds: tuple[str, str]
    cost: NDArray[np.uint64]


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
        length = copies.length_bytes
        self._groups = _groups(
            _side("local", local, copies.local_address, length),
            _side(remote_side, remote, copies.remote_address, length),
            length,
        )
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
        num_pieces = len(group.length_bytes)
        last = in_shares(first, affordable(group.cost, first, num_pieces, budget_bytes), num_pieces)
        cost_bytes = int(group.cost[last]) - int(group.cost[first])
        if last == num_pieces:
            self._groups = self._groups[1:]
            self._row = 0
        else:
            self._row = last
        length = group.length_bytes[first:last]
        return Slice(
            group.local.rows(first, last, length), group.remote.rows(first, last, length), *group.kinds, cost_bytes
        )


class PlacedCopies(msgspec.Struct, frozen=True, eq=False):
    """What every post of a part of some copies needs of them: NIXL's rows of both sides as in `Slice`, and the cost of all rows
    before each, shape (n + 1,).
    """

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    local_kind: str
    remote_kind: str
    cost_bytes: NDArray[np.uint64]

    @staticmethod
    def of(copies: Copies, local: RegionTable, remote: RegionTable, remote_side: str) -> PlacedCopies | None:
        """Found once for all parts; None where a row is not a piece: memory of two kinds, pieces that must be cut.

        Raises:
            TransportError: a piece is outside the regions.
        """
        length = copies.length_bytes
        ours = _side("local", local, copies.local_address, length)
        theirs = _side(remote_side, remote, copies.remote_address, length)
        if not len(length) or not ours.is_of_one_device or not theirs.is_of_one_device:
            return None
        pieces, devices = (ours.address, theirs.address, length), (int(ours.number), int(theirs.number))
        local_rows, remote_rows, cost_bytes, longest = piece_rows(pieces, devices, DESCRIPTOR_COST_BYTES)
        if longest > MAX_PIECE_BYTES:
            return None
        return PlacedCopies(local_rows, remote_rows, KINDS[int(ours.kind)], KINDS[int(theirs.kind)], cost_bytes)


class PartCursor:
    """Hands out rows `[first, stop)` of placed copies, slice by slice."""

    __slots__ = ("_placed", "_row", "_stop")

    def __init__(self, placed: PlacedCopies, first: int, stop: int) -> None:
        self._placed, self._row, self._stop = placed, first, stop

    @property
    def exhausted(self) -> bool:
        """Whether all pieces were handed out or dropped."""
        return self._row == self._stop

    def drop(self) -> None:
        """Hand out no more."""
        self._row = self._stop

    def take(self, budget_bytes: int) -> Slice:
        """The next pieces whose cost together stays within the budget, at least one. Not when exhausted."""
        placed, first = self._placed, self._row
        self._row = last = in_shares(first, affordable(placed.cost_bytes, first, self._stop, budget_bytes), self._stop)
        cost_bytes = int(placed.cost_bytes[last]) - int(placed.cost_bytes[first])
        return Slice(
            placed.local[first:last], placed.remote[first:last], placed.local_kind, placed.remote_kind, cost_bytes
        )


def in_shares(first: int, stop: int, end: int) -> int:
    """Where a slice ends that may end at `stop` of `end` pieces: where NIXL's threads share it and others follow, in `SHARES` equal parts.

    NIXL makes what is left over a share of its own. It is a piece or two, but the thread that posts waits for it: with 5,461 pieces instead of
    5,460 the 99th percentile of its answers to peers was 28 to 42 ms instead of 21 to 25.
    """
    is_shared = stop - first >= SPLIT_PIECES and stop < end
    return stop - (stop - first) % SHARES if is_shared else stop


def cost_before(length_bytes: Addresses) -> NDArray[np.uint64]:
    """What all pieces before each cost, and all of them: shape (n + 1,)."""
    cost = np.zeros(len(length_bytes) + 1, dtype=np.uint64)
    np.add.accumulate(length_bytes + np.uint64(DESCRIPTOR_COST_BYTES), out=cost[1:])
    return cost


def _side(name: str, table: RegionTable, address: Addresses, length_bytes: Addresses) -> _Side:
    """Raises TransportError if a piece is outside the table's regions."""
    if table.device is not None:
        table.check(name, address, length_bytes)
        number = table.device.partition(":")[2]
        return _Side(address, int(bool(number)), int(number or 0))
    index = table.locate(name, address, length_bytes)
    numbers = [region.device.partition(":")[2] for region in table.regions]
    kind = np.array([bool(number) for number in numbers], dtype=np.intp)
    return _Side(address, kind[index], np.array([int(number or 0) for number in numbers], dtype=np.uint64)[index])


def _groups(local: _Side, remote: _Side, length: Addresses) -> list[_Group]:
    """The pieces grouped by memory kind on both sides; none above `MAX_PIECE_BYTES`."""
    if not len(length):
        return []
    if int(np.maximum.reduce(length)) > MAX_PIECE_BYTES:
        owner, offset, length = _cut(length, MAX_PIECE_BYTES)
        local, remote = (replace(one, address=one.address + offset) for one in (local.of(owner), remote.of(owner)))
    if isinstance(local.kind, int) and isinstance(remote.kind, int):
        return [_group(local, remote, length, 2 * local.kind + remote.kind)]
    kinds = np.broadcast_to(2 * np.asarray(local.kind) + np.asarray(remote.kind), length.shape)
    chosen = {int(kind): np.flatnonzero(kinds == kind) for kind in np.unique(kinds)}
    return [_group(local.of(rows), remote.of(rows), length[rows], kind) for kind, rows in chosen.items()]


def _group(local: _Side, remote: _Side, length: Addresses, kind: int) -> _Group:
    return _Group(local, remote, length, (KINDS[kind // 2], KINDS[kind % 2]), cost_before(length))


def _cut(sizes: Addresses, most: int) -> tuple[NDArray[np.intp], Addresses, Addresses]:
    """Pieces of at most `most`: the row that each comes from, what of that row is before it, and its size."""
    limit = np.uint64(most)
    parts = ((sizes - np.uint64(1)) // limit + np.uint64(1)).astype(np.intp)
    owner = np.repeat(np.arange(len(parts)), parts)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    before = ordinal.astype(np.uint64) * limit
    return owner, before, np.minimum(sizes[owner] - before, limit)


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
