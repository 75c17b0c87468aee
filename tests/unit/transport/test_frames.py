"""Do the slices of a framed post have all of its pieces, once each, within their budget?"""

import numpy as np
import pytest

from kvreshard.transport.base import MemoryRegion, TransportError
from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.frames import FrameCursor, FramePlace, PlacedFrame, place, strided_rows
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import DESCRIPTOR_COST_BYTES, MAX_PIECE_BYTES, PartCursor

PLACE = FramePlace("cpu", "cpu", 0, 0)


def make_frame(num_entries: int = 5, count: int = 50, length: int = 4096) -> Frame:
    start = np.arange(num_entries) * 1_000_000
    lengths = length + 8 * np.arange(num_entries)
    return Frame.of(start + 4096, start + 100_000_000, lengths, 8192, 16_384, count, count + 10)


def listed(cursor: FrameCursor, budget_bytes: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while not cursor.exhausted:
        piece = cursor.take(budget_bytes)
        assert len(piece) == len(piece.local_index) == len(piece.remote_index) > 0
        assert piece.cost_bytes <= budget_bytes or len(piece) == 1
        found += zip(piece.local_index.tolist(), piece.remote_index.tolist(), strict=True)
    return found


@pytest.mark.parametrize("budget_copies", [0, 1, 3, 20, 21, 45, 55, 10_000])
def test_slices_have_every_piece_once(budget_copies: int) -> None:
    frame, rng = make_frame(), np.random.default_rng(1)
    local, remote = rng.permutation(50)[:20], rng.permutation(50)[:20]
    cursor = FrameCursor(FramedCopies(frame, local, remote), PlacedFrame.of(frame, PLACE))
    found = listed(cursor, budget_copies * (4096 + 32 + DESCRIPTOR_COST_BYTES))
    wanted = [
        (entry * 50 + here, entry * 60 + there)
        for entry in range(5)
        for here, there in zip(local.tolist(), remote.tolist(), strict=True)
    ]
    assert found == wanted


@pytest.mark.parametrize("budget_bytes", [1, 41_000, 123_456, 400_000, 5_000_000])
def test_slices_are_as_full_as_their_budget_allows(budget_bytes: int) -> None:
    """Also where that ends in the middle of an entry: a post costs as much as a hundred pieces."""
    frame, pages = make_frame(length=1000), np.arange(17)
    cursor = FrameCursor(FramedCopies(frame, pages, pages), PlacedFrame.of(frame, PLACE))
    costs = [1000 + 8 * entry + DESCRIPTOR_COST_BYTES for entry in range(5) for _ in pages]
    first = 0
    while not cursor.exhausted:
        piece = cursor.take(budget_bytes)
        stop = first + len(piece)
        assert piece.cost_bytes == sum(costs[first:stop])
        assert stop == len(costs) or piece.cost_bytes + costs[stop] > budget_bytes
        first = stop
    assert first == len(costs)


@pytest.mark.parametrize("seed", range(20))
def test_budgets_may_change_from_slice_to_slice(seed: int) -> None:
    frame, rng, pages = make_frame(num_entries=9), np.random.default_rng(seed), np.arange(20)
    cursor = FrameCursor(FramedCopies(frame, pages, pages[::-1]), PlacedFrame.of(frame, PLACE))
    found: list[tuple[int, int]] = []
    while not cursor.exhausted:
        piece = cursor.take(int(rng.choice([1, 7, 21, 45, 62])) * (4096 + 72 + DESCRIPTOR_COST_BYTES))
        found += zip(piece.local_index.tolist(), piece.remote_index.tolist(), strict=True)
    assert found == [(entry * 50 + page, entry * 60 + 19 - page) for entry in range(9) for page in range(20)]


def test_a_dropped_cursor_and_an_empty_one_have_nothing() -> None:
    frame, none = make_frame(), np.zeros(0, dtype=np.int64)
    assert FrameCursor(FramedCopies(frame, none, none), PlacedFrame.of(frame, PLACE)).exhausted
    cursor = FrameCursor(FramedCopies(frame, np.arange(9), np.arange(9)), PlacedFrame.of(frame, PLACE))
    cursor.take(1)
    cursor.drop()
    assert cursor.exhausted


def test_flat_and_rows_say_the_same() -> None:
    frame, pages = make_frame(), np.array([7, 3])
    copies = FramedCopies(frame, pages, pages[::-1])
    flat = copies.flat()
    assert (len(flat), flat.num_bytes) == (len(copies), copies.num_bytes)
    rows = strided_rows(frame, PLACE, local=True)
    assert flat.local_address.tolist() == [int(row[0] + row[3] * page) for row in rows for page in (7, 3)]
    assert rows[:, 4].tolist() == [50] * 5


def dense_frame(page_bytes: int = 4096) -> Frame:
    start = np.array([0, 1 << 40, 5 << 40])
    return Frame.of(start, start[::-1] + 8, [page_bytes] * 3, page_bytes, page_bytes, 1000, 900)


def rows_of(cursor: PartCursor, budget_bytes: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    while not cursor.exhausted:
        piece = cursor.take(budget_bytes)
        assert piece.cost_bytes <= budget_bytes or len(piece) == 1
        both = zip(piece.local.tolist(), piece.remote.tolist(), strict=True)
        found += [(here[0], there[0], here[1], here[2], there[2]) for here, there in both if here[1] == there[1]]
    return found


@pytest.mark.parametrize("budget_bytes", [1, 400_000, 1 << 40])
def test_runs_are_listed_as_they_lie(budget_bytes: int) -> None:
    frame, runs = dense_frame(), np.array([1, 30, 5])
    copies = FramedCopies(frame, np.array([999, 20, 3]), np.array([0, 800, 895]), runs)
    listed = PlacedFrame.of(frame, FramePlace("cpu", "cuda", 0, 3)).listed(copies)
    assert listed is not None
    assert (listed.local_kind, listed.remote_kind) == ("cpu", "cuda")
    flat = copies.flat()
    assert (len(copies), copies.num_bytes) == (9, 3 * 36 * 4096) == (len(flat), flat.num_bytes)
    wanted = zip(
        *(column.tolist() for column in (flat.local_address, flat.remote_address, flat.length_bytes)), strict=True
    )
    assert rows_of(PartCursor(listed, 0, len(listed.local)), budget_bytes) == [(*row, 0, 3) for row in wanted]


@pytest.mark.parametrize(("page_bytes", "num_pages"), [(4096, 0), (MAX_PIECE_BYTES, 2), (MAX_PIECE_BYTES // 8, 9)])
def test_what_is_none_or_must_be_cut_is_not_listed(page_bytes: int, num_pages: int) -> None:
    frame = dense_frame(page_bytes)
    placed = PlacedFrame.of(frame, PLACE)
    one = np.array([3] * min(1, num_pages), dtype=np.int64)
    assert placed.listed(FramedCopies(frame, one, one, one * 0 + num_pages)) is None
    if num_pages:
        assert placed.listed(FramedCopies(frame, one, one, one * 0 + num_pages - 1)) is not None


def test_runs_that_a_frame_does_not_have_are_refused() -> None:
    one, two = np.array([1]), np.array([2])
    for runs in (np.array([0]), np.array([-1])):
        with pytest.raises(TransportError, match="a run has one page, or more that lie without gaps"):
            FramedCopies(dense_frame(), one, one, runs)
    with pytest.raises(TransportError, match="of a frame of 1000"):
        FramedCopies(dense_frame(), one, one, np.array([2**63 - 1]))  # with its page it would wrap around
    with pytest.raises(TransportError, match="runs of 2 to 2 pages"):
        FramedCopies(make_frame(), one, one, two)  # pages with gaps
    for gap in ([4096, 8192], [8192, 4096]):
        with pytest.raises(TransportError, match="runs of 2 to 2 pages"):
            FramedCopies(Frame.of([0], [0], [4096], *gap, 9, 9), one, one, two)
    with pytest.raises(TransportError, match=r"local pages from 999 to 1000, but the frame has \[0, 1000\)"):
        FramedCopies(dense_frame(), np.array([999]), one, two)
    with pytest.raises(TransportError, match=r"remote pages from 899 to 900, but the frame has \[0, 900\)"):
        FramedCopies(dense_frame(), one, np.array([899]), two)
    with pytest.raises(TransportError, match="in runs of"):
        FramedCopies(dense_frame(), one, one, np.array([1, 1]))


def tables(end: int = 1 << 40) -> tuple[RegionTable, RegionTable]:
    return RegionTable([MemoryRegion(4096, end - 4096)]), RegionTable([MemoryRegion(100_000_000, 1 << 40, "cuda:1")])


def test_a_frame_is_placed_with_all_of_its_pages() -> None:
    frame = make_frame()
    assert place(frame, *tables(), "remote") == FramePlace("cpu", "cuda", 0, 1)
    last = 4096 + 4_000_000 + 49 * 8192 + 4096 + 32
    assert place(frame, *tables(last), "remote") is not None
    with pytest.raises(TransportError, match="not inside one registered region"):
        place(frame, *tables(last - 1), "remote")


def test_what_cannot_be_told_apart_by_index_is_posted_one_by_one() -> None:
    assert place(make_frame(length=MAX_PIECE_BYTES + 1), *tables(), "remote") is None
    assert place(Frame.of([4096], [100_000_000], [1], 1, 1, 1 << 31, 1), *tables(), "remote") is None
    two_devices = RegionTable([MemoryRegion(0, 500_000), MemoryRegion(1_000_000, 1 << 40, "cuda:0")])
    assert place(make_frame(), two_devices, tables()[1], "remote") is None


@pytest.mark.parametrize("pages", [[-1], [50]])
def test_a_page_outside_the_frame_is_refused(pages: list[int]) -> None:
    with pytest.raises(TransportError, match=r"frame has \[0, 50\)"):
        FramedCopies(make_frame(), np.array(pages), np.array([0]))


def test_frames_that_make_no_sense_are_refused() -> None:
    for numbers in ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        with pytest.raises(TransportError, match="sizes are positive"):
            Frame.of([1], [1], [1], *numbers)
    with pytest.raises(TransportError, match="leave the 64-bit address space"):
        Frame.of([1 << 62], [1], [1], 1 << 62, 1, 5, 1)
    with pytest.raises(TransportError, match="local pages for"):
        FramedCopies(make_frame(), np.arange(2), np.arange(3))
