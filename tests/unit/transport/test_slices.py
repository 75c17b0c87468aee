"""Do the slices of a copy list hold exactly its bytes, within the budget, one memory kind each?"""

import numpy as np
import pytest

from kvreshard.transport.agent import Cursor
from kvreshard.transport.base import Copies, MemoryRegion, TransportError
from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.frames import FrameCursor, FramePlace, PlacedFrame
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import (
    DESCRIPTOR_COST_BYTES,
    FIRST_BUDGET_BYTES,
    MAX_BUDGET_BYTES,
    MAX_PIECE_BYTES,
    MIN_BUDGET_BYTES,
    SPLIT_PIECES,
    PartCursor,
    PlacedCopies,
    Slice,
    SliceBudget,
    SliceCursor,
)

LOCAL = RegionTable([MemoryRegion(0, 2**40), MemoryRegion(2**41, 2**40, "cuda:3")])
LOCAL_HOST, REMOTE_HOST = RegionTable([MemoryRegion(0, 2**40)]), RegionTable([MemoryRegion(2**50, 2**41)])
REMOTE = RegionTable([MemoryRegion(2**50, 2**41), MemoryRegion(2**52, 2**41, "cuda:1")])


def take_all(copies: Copies, budget_bytes: int) -> list[Slice]:
    cursor = SliceCursor(copies, LOCAL, REMOTE, "remote")
    slices = []
    while not cursor.exhausted:
        slices.append(cursor.take(budget_bytes))
    return slices


def test_a_large_piece_is_cut() -> None:
    size = 3 * MAX_PIECE_BYTES + 5
    slices = take_all(Copies.of([7, 2**30], [2**50 + 1, 2**50 + 2**40], [size, 9]), 2**62)
    assert len(slices) == 1
    steps = [0, MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES, 3 * MAX_PIECE_BYTES]
    lengths = [MAX_PIECE_BYTES] * 3 + [5, 9]
    assert slices[0].local.tolist() == [
        [address, length, 0] for address, length in zip([*(7 + step for step in steps), 2**30], lengths, strict=True)
    ]
    assert slices[0].remote[:, 0].tolist() == [*(2**50 + 1 + step for step in steps), 2**50 + 2**40]
    assert slices[0].remote[:, 1].tolist() == lengths


@pytest.mark.parametrize("budget_bytes", [1, 20_000, 100_000, 2**40])
def test_slices_hold_each_piece_once_in_order(budget_bytes: int) -> None:
    index = np.arange(1000, dtype=np.uint64)
    copies = Copies.of(index * np.uint64(100), index * np.uint64(50) + np.uint64(2**50), (index % np.uint64(40)) + 1)
    slices = take_all(copies, budget_bytes)
    local = np.concatenate([piece.local for piece in slices])
    remote = np.concatenate([piece.remote for piece in slices])
    assert np.array_equal(local[:, 0], copies.local_address)
    assert np.array_equal(remote[:, 0], copies.remote_address)
    assert np.array_equal(local[:, 1], copies.length_bytes)
    assert np.array_equal(remote[:, 1], copies.length_bytes)
    for piece in slices:
        assert piece.cost_bytes == int(piece.local[:, 1].sum()) + DESCRIPTOR_COST_BYTES * len(piece.local)
        assert piece.cost_bytes <= budget_bytes or len(piece.local) == 1


def test_memory_kinds_are_not_mixed() -> None:
    copies = Copies.of([1, 2**41, 2, 2**41 + 9], [2**50, 2**50 + 5, 2**52, 2**52 + 5], [1, 2, 3, 4])
    slices = take_all(copies, 2**40)
    found = {(piece.local_kind, piece.remote_kind): piece for piece in slices}
    assert len(slices) == len(found) == 4
    assert found["cuda", "cuda"].local.tolist() == [[2**41 + 9, 4, 3]]
    assert found["cuda", "cuda"].remote.tolist() == [[2**52 + 5, 4, 1]]
    assert found["cpu", "cuda"].remote.tolist() == [[2**52, 3, 1]]
    assert found["cuda", "cpu"].remote.tolist() == [[2**50 + 5, 2, 0]]


def test_dropping_ends_the_cursor() -> None:
    cursor = SliceCursor(Copies.of([0, 1], [2**50, 2**50], 1), LOCAL, REMOTE, "remote")
    cursor.take(1)
    cursor.drop()
    assert cursor.exhausted
    assert SliceCursor(Copies.of([], [], []), LOCAL, REMOTE, "remote").exhausted


@pytest.mark.parametrize("budget_bytes", [1, 20_000, 100_000, 2**40])
def test_parts_are_the_rows_of_their_whole(budget_bytes: int) -> None:
    index = np.arange(1000, dtype=np.uint64)
    copies = Copies.of(index * np.uint64(100), index * np.uint64(50) + np.uint64(2**50), (index % np.uint64(40)) + 1)
    placed = PlacedCopies.of(copies, LOCAL_HOST, REMOTE_HOST, "remote")
    assert placed is not None
    for first, stop in ((0, 1), (0, 1000), (17, 500), (999, 1000)):
        cursor, slices = PartCursor(placed, first, stop), []
        while not cursor.exhausted:
            slices.append(cursor.take(budget_bytes))
        rows = slice(first, stop)
        for name, address in (("local", copies.local_address), ("remote", copies.remote_address)):
            found = np.concatenate([getattr(piece, name) for piece in slices])
            assert np.array_equal(found[:, 0], address[rows])
            assert np.array_equal(found[:, 1], copies.length_bytes[rows])
            assert not found[:, 2].any()
        for piece in slices:
            assert (piece.local_kind, piece.remote_kind) == ("cpu", "cpu")
            assert piece.cost_bytes == int(piece.local[:, 1].sum()) + DESCRIPTOR_COST_BYTES * len(piece.local)
            assert piece.cost_bytes <= budget_bytes or len(piece.local) == 1
    assert PartCursor(placed, 5, 5).exhausted
    cursor = PartCursor(placed, 5, 15)
    cursor.take(1)
    cursor.drop()
    assert cursor.exhausted


def test_copies_whose_rows_are_not_pieces_have_no_place() -> None:
    """They are posted as if they were not parts."""
    two_kinds = Copies.of([1, 2**41], [2**50, 2**50 + 5], 1)
    assert PlacedCopies.of(two_kinds, LOCAL, REMOTE, "remote") is None
    assert PlacedCopies.of(Copies.of([1], [2**50], MAX_PIECE_BYTES + 1), LOCAL_HOST, REMOTE_HOST, "remote") is None
    with pytest.raises(TransportError, match="piece 1 of 2: remote"):
        PlacedCopies.of(Copies.of([1, 2], [2**50, 2**50 - 1], 1), LOCAL_HOST, REMOTE_HOST, "remote")


def test_the_budget_finds_the_link_speed() -> None:
    budget = SliceBudget(0.020)
    for _ in range(40):
        budget.learn(budget.budget_bytes, budget.budget_bytes / 1e9)
    assert budget.budget_bytes == pytest.approx(20_000_000, rel=0.01)
    for _ in range(40):
        budget.learn(budget.budget_bytes, 1.0)
    assert budget.budget_bytes == MIN_BUDGET_BYTES
    for _ in range(40):
        budget.learn(budget.budget_bytes, 0.0)
    assert budget.budget_bytes == MAX_BUDGET_BYTES


def test_a_small_post_says_nothing_unless_it_was_slow() -> None:
    budget = SliceBudget(0.020)
    budget.learn(1000, 0.000_001)
    assert budget.budget_bytes == FIRST_BUDGET_BYTES
    budget.learn(1_000_000, 0.040)
    assert budget.budget_bytes == 500_000


@pytest.mark.parametrize("budget_pieces", [1, 63, 64, 71, 100, 126, 999, 1000, 5000])
def test_slices_that_others_follow_are_equal_shares(budget_pieces: int) -> None:
    """For NIXL's threads, whatever hands them out, and no smaller than that takes."""
    index = np.arange(1004, dtype=np.int64)
    copies = Copies.of(index * 100, index * 50 + 2**50, 7)
    placed = PlacedCopies.of(copies, LOCAL_HOST, REMOTE_HOST, "remote")
    assert placed is not None
    frame = Frame.of([0, 2000, 4000, 6000], [0, 2000, 4000, 6000], 7, 8, 8, 251, 251)
    place = PlacedFrame.of(frame, FramePlace("cpu", "cpu", 0, 0))
    cursors: list[Cursor] = [
        SliceCursor(copies, LOCAL_HOST, REMOTE_HOST, "remote"),
        PartCursor(placed, 0, 1004),
        FrameCursor(FramedCopies(frame, index[:251], index[:251]), place),
    ]
    each = budget_pieces if budget_pieces < SPLIT_PIECES else budget_pieces // 8 * 8
    wanted = [each] * ((1004 - budget_pieces - 1) // each + 1) if budget_pieces < 1004 else []
    wanted.append(1004 - sum(wanted))
    for cursor in cursors:
        sizes = []
        while not cursor.exhausted:
            piece = cursor.take(budget_pieces * (7 + DESCRIPTOR_COST_BYTES))
            assert piece.cost_bytes == len(piece) * (7 + DESCRIPTOR_COST_BYTES)
            sizes.append(len(piece))
        assert sizes == wanted
