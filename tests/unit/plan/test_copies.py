"""Do joining and cutting keep every byte of some copies, and do paged copies list what they say?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.plan.copies import CopyList, Int64s, Page, PagedCopies, coalesce, cut_long

COPIES = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30)


def columns(drawn: list[tuple[bool, int]]) -> tuple[Int64s, Int64s, Int64s]:
    """Copies each of which continues the one before, or not."""
    src, dst, length = list[int](), list[int](), list[int]()
    for is_next, size in drawn:
        last = (src[-1] + length[-1], dst[-1] + length[-1]) if src else (0, 1000)
        src.append(last[0] + (0 if is_next else 1))
        dst.append(last[1] + (0 if is_next or len(src) % 2 else 5))
        length.append(size)
    a, b, c = (np.array(column, dtype=np.int64) for column in (src, dst, length))
    return a, b, c


def byte_pairs(src: Int64s, dst: Int64s, length: Int64s) -> list[tuple[int, int]]:
    rows = zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)
    return sorted((here + k, there + k) for here, there, size in rows for k in range(size))


@given(COPIES, st.integers(1, 40))
def test_joined_copies_have_the_same_bytes_and_none_is_much_too_long(
    drawn: list[tuple[bool, int]], max_bytes: int
) -> None:
    given_copies = columns(drawn)
    joined = coalesce(*given_copies, max_bytes=max_bytes)
    assert byte_pairs(*joined) == byte_pairs(*given_copies)
    assert all(size < max_bytes + 9 for size in joined[2].tolist())


@given(COPIES)
def test_without_a_bound_no_joined_copy_continues_another(drawn: list[tuple[bool, int]]) -> None:
    src, dst, length = coalesce(*columns(drawn), max_bytes=1 << 40)
    assert not ((src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])).any()


@given(COPIES, st.integers(1, 12))
def test_cut_copies_have_the_same_bytes_and_none_is_too_long(drawn: list[tuple[bool, int]], max_bytes: int) -> None:
    given_copies = columns(drawn)
    *cut, row = cut_long(*given_copies, max_bytes=max_bytes)
    assert byte_pairs(*cut) == byte_pairs(*given_copies)
    assert all(size <= max_bytes for size in cut[2].tolist())
    assert row.tolist() == sorted(row.tolist())
    assert np.array_equal(np.bincount(row, cut[2], len(drawn)), given_copies[2])


def test_paged_copies_are_every_entry_of_every_pair() -> None:
    page = Page.of([1000, 5000], [200, 900], 8, (64, 32), (10, 20))
    copies = PagedCopies(3, 1, page, np.array([9, 0]), np.array([2, 19]))
    flat = copies.flat()
    assert (flat.src_rank, flat.dst_rank) == (3, 1)
    assert flat.src_address.tolist() == [1000 + 9 * 64, 1000, 5000 + 9 * 64, 5000]
    assert flat.dst_address.tolist() == [200 + 2 * 32, 200 + 19 * 32, 900 + 2 * 32, 900 + 19 * 32]
    assert flat.length.tolist() == [8, 8, 8, 8]
    assert (copies.num_copies, copies.num_bytes) == (flat.num_copies, flat.num_bytes) == (4, 32)
    assert flat.flat() is flat


def test_pages_are_alike_where_their_entries_lie_alike() -> None:
    """So that a copy of one may continue a copy of the other, in the same regions."""
    first = Page.of([1000, 5000], [200, 900], 8, (64, 32), (10, 20))
    assert Page.of([1040, 5040], [260, 960], 24, (64, 32), (10, 20)).shape == first.shape
    assert Page.of([1040, 5041], [260, 960], 8, (64, 32), (10, 20)).shape != first.shape
    assert Page.of([1040, 5040], [260, 961], 8, (64, 32), (10, 20)).shape != first.shape
    apart = Page(first.src_start, first.dst_start, 8, np.array([0, 1]), 64, 32, 10, 20)
    assert apart.shape != first.shape


@pytest.mark.parametrize("length", [5, [5, 5]])
def test_a_list_is_made_of_whatever_numbers(length: int | list[int]) -> None:
    found = CopyList.of([1, 2], np.array([3, 4], dtype=np.uint64), length)
    assert [column.dtype for column in (found.src_address, found.dst_address, found.length)] == [np.int64] * 3
    assert (found.num_copies, found.num_bytes, found.length.tolist()) == (2, 10, [5, 5])
