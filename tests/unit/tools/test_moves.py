"""Are two ways of moving bytes compared byte by byte, however each is cut?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.plan.copies import CopyList
from kvreshard.tools.shadow_report import MovesCompared, compare_moves


def copies(*rows: tuple[int, int, int, int]) -> list[CopyList]:
    """Rows of (source rank, source address, destination address, length)."""
    return [CopyList(rank, 0, np.array([src]), np.array([dst]), np.array([length])) for rank, src, dst, length in rows]


def test_the_same_bytes_in_other_pieces_are_the_same() -> None:
    assert compare_moves(copies((0, 100, 10, 8)), copies((0, 104, 14, 4), (0, 100, 10, 4))) == MovesCompared(8, 0, 0, 0)


def test_each_kind_of_difference_is_counted_in_bytes() -> None:
    left = copies((0, 100, 10, 8), (1, 50, 30, 4))
    right = copies((0, 102, 12, 10), (2, 50, 30, 2), (1, 53, 32, 1))
    assert compare_moves(left, right) == MovesCompared(6, 3, 3, 4, 30)


def test_nothing_against_something() -> None:
    assert compare_moves([], copies((0, 0, 0, 5))) == MovesCompared(0, 0, 0, 5)
    assert compare_moves(copies((0, 0, 0, 5)), []) == MovesCompared(0, 0, 5, 0)
    assert compare_moves([], []) == MovesCompared(0, 0, 0, 0)


def test_a_byte_that_is_written_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two copies write address 0xc"):
        compare_moves(copies((0, 0, 10, 4), (0, 9, 12, 4)), [])


cells = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 1), st.integers(0, 3))), min_size=1, max_size=24)


@given(cells, cells)
def test_against_a_comparison_byte_by_byte(
    left: list[tuple[int, int] | None], right: list[tuple[int, int] | None]
) -> None:
    size = max(len(left), len(right))
    left, right = [side + [None] * (size - len(side)) for side in (left, right)]
    expected = [0, 0, 0, 0]
    for a, b in zip(left, right, strict=True):
        if a is not None or b is not None:
            expected[0 if a == b else 2 if b is None else 3 if a is None else 1] += 1
    ways = [copies(*((cell[0], cell[1], at, 1) for at, cell in enumerate(side) if cell)) for side in (left, right)]
    found = compare_moves(*ways)
    assert [found.same_bytes, found.elsewhere_bytes, found.missing_bytes, found.surplus_bytes] == expected
