"""Do the slices of some copies hold exactly their bytes, within the budget, one memory kind each?"""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from kvreshard.plan.copies import MAX_COPY_BYTES, CopyList, Page, PagedCopies
from kvreshard.transport.base import Direction, MemoryRegion, TransportError
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import (
    DESCRIPTOR_COST_BYTES,
    FIRST_BUDGET_BYTES,
    MAX_BUDGET_BYTES,
    MIN_BUDGET_BYTES,
    PLACED_AT_ONCE,
    SPLIT_COPIES,
    Cursor,
    Slice,
    SliceBudget,
    check_pages,
    is_indexed,
    listed_rows,
    make_rows,
)

LOCAL = RegionTable([MemoryRegion(0, 2**40), MemoryRegion(2**41, 2**40, "cuda:3")])
LOCAL_HOST, REMOTE_HOST = RegionTable([MemoryRegion(0, 2**40)]), RegionTable([MemoryRegion(2**50, 2**41)])
REMOTE = RegionTable([MemoryRegion(2**50, 2**41), MemoryRegion(2**52, 2**41, "cuda:1")])
BUDGETS = [1, 20_000, 41_000, 123_456, 400_000, 2**40]


def take_all(cursor: Cursor, budget_bytes: int) -> list[Slice]:
    found = []
    while not cursor.exhausted:
        found.append(cursor.take(budget_bytes))
        assert found[-1].cost_bytes <= budget_bytes or len(found[-1]) == 1
    return found


def row_set(copies: CopyList, budget_bytes: int = 2**62) -> list[Slice]:
    return take_all(Cursor(make_rows(copies, Direction.READ, LOCAL, REMOTE, "remote")), budget_bytes)


def many(count: int = 1000) -> CopyList:
    index = np.arange(count)
    return CopyList.of(index * 50 + 2**50, index * 100, index % 40 + 1)


def rows(slices: list[Slice], is_local: bool) -> NDArray[np.uint64]:
    return np.concatenate([(piece.local if is_local else piece.remote) for piece in slices])


@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("direction", list(Direction))
def test_slices_of_a_list_have_every_row_once_and_are_full(direction: Direction, budget_bytes: int) -> None:
    copies = many()
    is_read = direction is Direction.READ
    tables = (LOCAL_HOST, REMOTE_HOST) if is_read else (REMOTE_HOST, LOCAL_HOST)
    slices = take_all(Cursor(make_rows(copies, direction, *tables, "remote")), budget_bytes)
    for is_local in (True, False):
        found = rows(slices, is_local)
        assert np.array_equal(found[:, 0], copies.dst_address if is_local is is_read else copies.src_address)
        assert np.array_equal(found[:, 1], copies.length)
        assert not found[:, 2].any()
    costs, first = copies.length + DESCRIPTOR_COST_BYTES, 0
    for piece in slices:
        stop = first + len(piece)
        assert piece.cost_bytes == int(costs[first:stop].sum())
        # No fuller slice fits, but for what would not be equal shares of NIXL's threads.
        spare = 8 if len(piece) >= SPLIT_COPIES else 1
        assert stop == len(costs) or int(costs[first : stop + spare].sum()) > budget_bytes
        first = stop
    assert first == len(costs)


def test_a_large_piece_is_cut() -> None:
    size = 3 * MAX_COPY_BYTES + 5
    (piece,) = row_set(CopyList.of([2**50 + 1, 2**50 + 2**40], [7, 2**30], [size, 9]))
    steps = [0, MAX_COPY_BYTES, 2 * MAX_COPY_BYTES, 3 * MAX_COPY_BYTES]
    sizes = [MAX_COPY_BYTES] * 3 + [5, 9]
    assert piece.local.tolist() == [[at, n, 0] for at, n in zip([*(7 + s for s in steps), 2**30], sizes, strict=True)]
    assert piece.remote[:, 0].tolist() == [*(2**50 + 1 + s for s in steps), 2**50 + 2**40]


def test_a_piece_across_regions_is_refused_also_where_it_is_cut_at_their_border() -> None:
    touching = RegionTable([MemoryRegion(0, MAX_COPY_BYTES), MemoryRegion(MAX_COPY_BYTES, MAX_COPY_BYTES)])
    with pytest.raises(TransportError, match=r"copy 0 of 1: local .* is not inside one registered region"):
        make_rows(CopyList.of([2**50], [0], 2 * MAX_COPY_BYTES), Direction.READ, touching, REMOTE_HOST, "remote")


def test_memory_kinds_are_not_mixed() -> None:
    copies = CopyList.of([2**50, 2**50 + 5, 2**52, 2**52 + 5], [1, 2**41, 2, 2**41 + 9], [1, 2, 3, 4])
    slices = row_set(copies, 2**40)
    found = {piece.row_set.kinds: piece for piece in slices}
    assert len(slices) == len(found) == 4
    assert found["cuda", "cuda"].local.tolist() == [[2**41 + 9, 4, 3]]
    assert found["cuda", "cuda"].remote.tolist() == [[2**52 + 5, 4, 1]]
    assert found["cpu", "cuda"].remote.tolist() == [[2**52, 3, 1]]
    assert found["cuda", "cpu"].remote.tolist() == [[2**50 + 5, 2, 0]]


def test_dropping_ends_the_cursor_and_nothing_is_nothing() -> None:
    cursor = Cursor(make_rows(many(), Direction.READ, LOCAL, REMOTE, "remote"))
    cursor.take(1)
    cursor.drop()
    assert cursor.exhausted
    assert not row_set(CopyList.of([], [], []))
    none = np.zeros(0, dtype=np.int64)
    assert Cursor(make_rows(page(), Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote"), (none, none)).exhausted


@pytest.mark.parametrize(
    ("src", "dst", "length", "message"),
    [
        ([1, 2], [1], [1, 1], r"source int64 \(2,\), destination int64 \(1,\), length int64 \(2,\)"),
        ([1, 2], [1, 2], [1, 0], "copy 1 of 2: 0 bytes from 2 to 2"),
        ([1, 2], [1, 2], [1, -1], "copy 1 of 2: -1 bytes"),
        ([1, 2], [1, 2], [1, 2**62], "copy 1 of 2: 4611686018427387904 bytes"),
        ([1, -2], [1, 2], [1, 1], "copy 1 of 2: 1 bytes from -2 to 2"),
        ([1, 2], [-1, 2], [1, 1], "copy 0 of 2: 1 bytes from 1 to -1"),
        ([[1]], [[1]], [[1]], r"int64 \(1, 1\)"),
    ],
)
def test_what_are_no_copies_is_refused(src: list[int], dst: list[int], length: list[int], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        make_rows(CopyList.of(src, dst, length), Direction.READ, LOCAL, REMOTE, "remote")


def test_numbers_of_another_type_are_refused() -> None:
    wrong = np.array([1.0])
    with pytest.raises(TransportError, match="source float64"):
        make_rows(CopyList(0, 0, wrong, np.array([1]), np.array([1])), Direction.READ, LOCAL, REMOTE, "remote")


@pytest.mark.parametrize(("strides", "counts"), [((-1, 1), (1, 1)), ((1, 1), (1, 0)), ((2**62, 1), (3, 1))])
def test_pages_that_make_no_sense_are_refused(strides: tuple[int, int], counts: tuple[int, int]) -> None:
    with pytest.raises(TransportError, match=r"pages every .* do not lie in the address space"):
        make_rows(Page.of([2**50], [0], 1, strides, counts), Direction.READ, LOCAL, REMOTE, "remote")


def page(num_entries: int = 5, counts: tuple[int, int] = (60, 50), length: int = 4096) -> Page:
    start = np.arange(num_entries) * 1_000_000
    return Page.of(2**50 + start, 4096 + start, length, (16_384, 8192), counts)


def paged(one: Page, src: NDArray[np.int64], dst: NDArray[np.int64]) -> Cursor:
    return Cursor(make_rows(one, Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote"), (dst, src))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget_copies", [None, 0, 1, 3, 20, 21, 45, 55, 10_000])
@pytest.mark.parametrize("at_once", [1, 45, PLACED_AT_ONCE])
def test_slices_of_pages_have_every_entry_of_every_pair_once(
    at_once: int, budget_copies: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvreshard.transport.slices.PLACED_AT_ONCE", at_once)
    rng, one = np.random.default_rng(seed), page()
    dst, src = rng.permutation(50)[:20], rng.permutation(60)[:20]
    cursor, local, remote = paged(one, src, dst), list[int](), list[int]()
    while not cursor.exhausted:
        budget = int(rng.choice([1, 7, 21, 45, 62])) if budget_copies is None else budget_copies
        piece = cursor.take(budget * (4096 + DESCRIPTOR_COST_BYTES))
        local += piece.local.tolist()
        remote += piece.remote.tolist()
        assert len(piece) == 1 or piece.cost_bytes <= budget * (4096 + DESCRIPTOR_COST_BYTES)
    assert local == [entry * 50 + here for entry in range(5) for here in dst.tolist()]
    assert remote == [entry * 60 + there for entry in range(5) for there in src.tolist()]


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_slices_of_pages_are_as_full_as_their_budget_allows(budget_bytes: int) -> None:
    """Also where that ends in the middle of an entry: a post costs as much as a hundred copies."""
    pages, first = np.arange(17), 0
    costs = [1000 + DESCRIPTOR_COST_BYTES] * (3 * len(pages))
    for piece in take_all(paged(page(3, length=1000), pages, pages), budget_bytes):
        stop = first + len(piece)
        assert piece.cost_bytes == sum(costs[first:stop])
        assert stop == len(costs) or piece.cost_bytes + costs[stop] > budget_bytes
        first = stop
    assert first == len(costs)


def test_rows_of_a_page_and_its_copies_say_the_same() -> None:
    one, pages = page(), np.array([7, 3])
    copies = PagedCopies(0, 0, one, pages, pages[::-1])
    flat = copies.flat()
    assert (flat.num_copies, flat.num_bytes) == (copies.num_copies, copies.num_bytes)
    (found,) = make_rows(one, Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote")
    assert flat.src_address.tolist() == [int(row[0] + row[3] * number) for row in found.remote for number in (7, 3)]
    assert flat.dst_address.tolist() == [int(row[0] + row[3] * number) for row in found.local for number in (3, 7)]
    assert found.local[:, 4].tolist() == [50] * 5
    assert found.remote[:, 4].tolist() == [60] * 5


def test_a_page_is_placed_with_all_that_it_may_copy() -> None:
    last = 4096 + 4_000_000 + 49 * 8192 + 4096
    for end, is_inside in ((last, True), (last - 1, False)):
        local = RegionTable([MemoryRegion(4096, end - 4096, "cuda:1")])
        if is_inside:
            (found,) = make_rows(page(), Direction.READ, local, REMOTE_HOST, "remote")
            assert found.kinds == ("cuda", "cpu")
            assert found.local[:, 2].tolist() == [1] * 5
            continue
        with pytest.raises(TransportError, match=r"local .* is not inside one registered region"):
            make_rows(page(), Direction.READ, local, REMOTE_HOST, "remote")


def test_what_cannot_be_told_apart_by_index_is_not_indexed() -> None:
    assert is_indexed(page())
    assert not is_indexed(page(length=MAX_COPY_BYTES + 1))
    assert not is_indexed(page(2, (1 << 30, 1)))
    assert not is_indexed(page(2, (1, 1 << 30)))


def test_a_pool_of_more_pages_than_32_bits_count_has_rows_all_the_same() -> None:
    one = Page.of(2**50 + np.arange(3), np.arange(3) * 4096, 1, (16, 4), (1 << 33, 1 << 10))
    (found,) = make_rows(one, Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote")
    assert found.remote[:, 4].tolist() == [1 << 33] * 3


@pytest.mark.parametrize("most", [1, 7, 16, 17, 20, 45, 10_000])
def test_copies_of_a_page_in_lists_are_those_of_one_list(most: int) -> None:
    dst, src = np.random.default_rng(0).permutation(50)[:16], np.random.default_rng(1).permutation(60)[:16]
    copies = PagedCopies(3, 4, page(), src, dst)
    lists, whole = list(copies.in_lists(most)), copies.flat()
    assert max(listed.num_copies for listed in lists) <= most
    for name in ("src_address", "dst_address", "length"):
        assert np.array_equal(np.concatenate([getattr(listed, name) for listed in lists]), getattr(whole, name))
    assert {(listed.src_rank, listed.dst_rank) for listed in lists} == {(3, 4)}


def test_pages_without_indices_are_listed_as_they_are_posted() -> None:
    """A pool of 2**30 pages, which a peer's layout may claim: all copies at once would be 1.6 GB."""
    one = Page.of(2**50 + np.arange(1 << 10), np.arange(1 << 10) * 4096, 1, (1 << 10, 4), (1 << 30, 1 << 10))
    pages = np.arange(1 << 10)
    copies = PagedCopies(0, 0, one, np.arange(1 << 16), np.resize(pages, 1 << 16))
    assert not is_indexed(copies.page)
    tracemalloc.start()
    cursor = Cursor(listed_rows(copies, Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote"))
    first = [cursor.take(1 << 24) for _ in range(100)]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 << 20
    listed = next(copies.in_lists(1 << 16))
    assert np.array_equal(rows(first, is_local=False)[: 1 << 16, 0], listed.src_address)
    assert not cursor.exhausted
    cursor.drop()
    assert cursor.exhausted
    with pytest.raises(IndexError, match="no copies are left"):
        cursor.take(1)


@pytest.mark.parametrize(("src", "dst"), [(-1, 0), (60, 0), (0, -1), (0, 50)])
def test_page_ids_that_there_are_not_are_refused(src: int, dst: int) -> None:
    with pytest.raises(TransportError, match=r"pages from -?\d+ to -?\d+, but there are \[0, [56]0\)"):
        check_pages(PagedCopies(0, 0, page(), np.array([1, src]), np.array([1, dst])))
    with pytest.raises(TransportError, match=r"\(2,\) source pages for \(3,\)"):
        check_pages(PagedCopies(0, 0, page(), np.arange(2), np.arange(3)))


@pytest.mark.parametrize("other", [np.float64, np.int32, np.uint64, np.bool_])
def test_page_ids_of_another_type_are_refused(other: type) -> None:
    """A part of a page would be rounded, and a product of 32 bits with a stride wraps around."""
    good, wrong = np.array([1, 0]), np.array([1, 0], dtype=other)
    check_pages(PagedCopies(0, 0, page(), good, good))
    for side, ids in (("source", (wrong, good)), ("destination", (good, wrong))):
        with pytest.raises(TransportError, match=f"{side} pages are {np.dtype(other)}, and page ids must be int64"):
            check_pages(PagedCopies(0, 0, page(), *ids))


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
    """For NIXL's threads, whatever they are slices of, and no smaller than that takes."""
    index = np.arange(1004, dtype=np.int64)
    copies = CopyList.of(index * 50 + 2**50, index * 100, 7)
    one = Page.of(2**50 + index[:4] * 2000, index[:4] * 2000, 7, (8, 8), (251, 251))
    each = budget_pieces if budget_pieces < SPLIT_COPIES else budget_pieces // 8 * 8
    wanted = [each] * ((1004 - budget_pieces - 1) // each + 1) if budget_pieces < 1004 else []
    wanted.append(1004 - sum(wanted))
    for cursor in (
        Cursor(make_rows(copies, Direction.READ, LOCAL_HOST, REMOTE_HOST, "remote")),
        paged(one, index[:251], index[:251]),
    ):
        assert [len(piece) for piece in take_all(cursor, budget_pieces * (7 + DESCRIPTOR_COST_BYTES))] == wanted
