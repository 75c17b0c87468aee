"""Are block tables what was given, and the caller's array still the caller's?"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from kvreshard.model.errors import BindError, UsageError
from kvreshard.model.tables import PageTable, Request


def test_a_block_table_is_a_copy_and_of_whole_numbers() -> None:
    given = np.array([1, 2, 3], dtype=np.int32)
    table = PageTable(given, 3)
    given[0] = 9
    assert table.pages.tolist() == [1, 2, 3]
    assert table.pages.dtype == np.int64


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: PageTable([1], "8"), "num_tokens of a block table is '8'"),  # type: ignore[arg-type]
        (lambda: PageTable([1], 8.5), "num_tokens of a block table is 8.5"),  # type: ignore[arg-type]
        (lambda: PageTable([1], 8, 1.5), "first_page of a block table is 1.5"),  # type: ignore[arg-type]
        (lambda: Request({}, {}, [(0, 8)], {}), "intervals is of type list"),  # type: ignore[arg-type]
        (lambda: Request({}, {}, None, {}), "intervals is of type NoneType"),  # type: ignore[arg-type]
        (lambda: Request({}, {}, {"g": 8}, {}), "the intervals of group 'g' is of type int"),  # type: ignore[dict-item]
        (lambda: Request({}, {}, {"g": [(0, 8, 9)]}, {}), "an interval of group 'g' is (0, 8, 9)"),  # type: ignore[list-item]
        (lambda: Request({}, {}, {"g": [("0", "8")]}, {}), "is '0', and must be a whole number"),  # type: ignore[list-item]
        (lambda: Request({}, {}, {"g": [(0, 8.0)]}, {}), "is 8.0, and must be a whole number"),  # type: ignore[list-item]
        (lambda: Request({}, {}, {"g": [(0, float("nan"))]}, {}), "is nan, and must be a whole number"),  # type: ignore[list-item]
        (lambda: Request({}, {}, {"g": [(0, True)]}, {}), "is True, and must be a whole number"),
        (lambda: Request({}, {}, {}, [1]), "dst_new_pages is of type list"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_and_no_list_is_refused_when_it_is_made(make: Callable[[], object], fact: str) -> None:
    with pytest.raises(UsageError, match=re.escape(fact)):
        make()


def test_lists_of_different_lengths_are_no_block_table() -> None:
    with pytest.raises(BindError, match="a block table must be a flat list of page ids, got lists of different length"):
        PageTable([[1], [2, 3]], 8)


def test_numbers_of_a_few_bits_do_not_wrap_around() -> None:
    table = PageTable([1], np.int8(100), np.int8(100))  # type: ignore[arg-type]
    assert table.num_tokens + 100 == table.first_page + 100 == 200
    assert Request({}, {}, {"g": [[np.int8(0), np.int8(100)]]}, {}).intervals == {"g": [(0, 100)]}  # type: ignore[list-item]


@pytest.mark.parametrize("table", [{"num_tokens": 2**48 + 1}, {"num_tokens": 0, "first_page": 2**64}])
def test_a_table_beyond_all_coordinates_is_refused(table: dict[str, int]) -> None:
    with pytest.raises(BindError, match="a block table holds more than 281474976710656 tokens"):
        PageTable([1], **table)


def test_a_page_beyond_all_numbers_does_not_wrap_around() -> None:
    with pytest.raises(BindError, match="a block table: there is page 18446744073709551615"):
        PageTable(np.array([2**64 - 1], np.uint64), 8)


def test_a_request_keeps_its_intervals_whatever_becomes_of_the_caller_s_list() -> None:
    intervals = [(0, 40)]
    asked = Request({}, {}, {"g": intervals}, {})
    intervals[0] = (30, 10)
    assert asked.intervals == {"g": [(0, 40)]}
