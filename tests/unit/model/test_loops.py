"""Do the small functions over columns say of a few rows what a person says?"""

from __future__ import annotations

import numpy as np
import pytest

from kvreshard.model import loops
from kvreshard.model.tables import PageTable


def test_regions_follow_one_another_or_do_not() -> None:
    for addresses, sizes, found in (
        ((8, 16, 40), (8, 24, 1), (8, 1, 41, True)),
        ((8, 16, 40), (9, 24, 1), (8, 1, 41, False)),
        ((8, 16, 40), (8, 25, 0), (8, 0, 41, False)),
        ((40, 0), (2**63 - 1, 3), (0, 3, 2**63 + 39, False)),
        ((-1,), (-2,), (-1, -2, 0, False)),
        ((5, -1), (7, 2), (-1, 2, 0, False)),
    ):
        assert loops.extent_of(np.array(addresses), np.array(sizes)) == found


def test_rows_are_numbered_by_what_they_are() -> None:
    one, other = np.array([7, 7, 5, 7, 5, -1]), np.array([0, 1, 0, 0, 0, 0])
    which, firsts = loops.row_kinds((one, other))
    assert (which.tolist(), firsts) == ([0, 1, 2, 0, 2, 3], [0, 1, 2, 5])
    assert loops.row_kinds((one,))[1] == [0, 2, 5]
    assert loops.row_kinds((one[::2], other[:3]))[0].tolist() == [0, 1, 2]
    which, firsts = loops.row_kinds((one[:0],))
    assert (which.dtype, which.tolist(), firsts) == (np.int64, [], [])
    with pytest.raises(ValueError, match="zip"):
        loops.row_kinds((one, other[:2]))


def test_numbers_have_64_bits() -> None:
    with pytest.raises(OverflowError):
        loops.int64s((1, 2**63))
    assert loops.int64s((-(2**63), 2**63 - 1)).tolist() == [-(2**63), 2**63 - 1]


def test_slabs_and_shards_by_hand() -> None:
    """Two regions of 100 and 60 bytes; slabs of 2 pages, and one of 3 of another pool."""
    sizes, num_pages = np.array([100, 60]), np.array([2, 3])
    good = [np.array(column) for column in ([0, 1, 0], [0, 0, 50], [20, 20, 25], [20, 10, 25], [0, 1, 0])]
    begin, start, last, stop = loops.slab_places(sizes, tuple(good), num_pages)
    assert (begin.tolist(), start.tolist()) == ([0, 100], [0, 100, 50])
    assert (last.tolist(), stop.tolist()) == ([40, 150, 100], [20, 110, 75])
    for column, row, bad in (
        (1, 0, -1), (1, 2, 51), (1, 1, 2**62), (2, 0, 0), (2, 0, 19), (2, 2, 26), (2, 1, 2**62), (3, 1, 0), (3, 0, -1),
        (3, 0, 21), (4, 2, 1),
    ):  # fmt: skip
        changed = [one.copy() for one in good]
        changed[column][row] = bad
        assert loops.slab_places(sizes, tuple(changed), num_pages) is None, (column, row, bad)
    for bad_sizes in ([0, 60], [100, -1], [2**62, 60], [2**62 - 60, 60]):
        assert loops.slab_places(np.array(bad_sizes), tuple(good), num_pages) is None
    assert loops.slab_places(np.array([2**62 - 61, 60]), tuple(good), num_pages) is not None
    order = np.argsort(start)
    slabs = start[order], stop[order], good[2][order], good[4][order]
    kinds = np.array([0, 1, 0]), np.array([20, 10]), np.array([20, 20]), np.array([0, 1])
    assert loops.shard_places(np.array([0, 100, 0]), slabs, kinds).tolist() == [20, 110, 20]
    for places in ([1, 100, 0], [-1, 100, 0], [0, 101, 0], [0, 100, 50], [100, 100, 0], [0, 0, 0]):
        assert loops.shard_places(np.array(places), slabs, kinds) is None, places
    for number, bad in ((1, 21), (2, 25), (3, 1)):
        changed = [one.copy() for one in kinds]
        changed[number][0] = bad
        assert loops.shard_places(np.array([0, 100, 0]), slabs, tuple(changed)) is None
    assert loops.are_apart(np.array([0, 5, 9]), np.array([5, 9, 1]))
    assert not loops.are_apart(np.array([0, 5, 8]), np.array([5, 9, 9]))
    assert loops.are_apart(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert loops.are_within(np.array([0, 59]), np.array([0, 1]), sizes)
    for places in ([0, 60], [-1, 0]):
        assert not loops.are_within(np.array(places), np.array([0, 1]), sizes)


def test_a_block_table_is_a_copy_and_of_whole_numbers() -> None:
    given = np.array([1, 2, 3], dtype=np.int32)
    table = PageTable(given, 3)
    given[0] = 9
    assert table.pages.tolist() == [1, 2, 3]
    assert table.pages.dtype == np.int64
