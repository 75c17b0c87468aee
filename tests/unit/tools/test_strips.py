"""Do strips hold every offset once and in order, whatever the list?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.tools.strips import strips


def listed(offsets: np.ndarray) -> list[int]:
    found: list[int] = []
    for strip in strips(offsets):
        places = np.array([offsets[strip.first]])
        for count, step in zip(strip.counts, strip.steps, strict=True):
            places = (places[:, None] + np.arange(count) * step).reshape(-1)
        found += places.tolist()
    return found


@pytest.mark.parametrize(
    ("offsets", "number"),
    [
        ([5], 1),
        ([0, 4, 8, 12], 1),
        ([0, 2, 32, 34, 64, 66], 1),
        ([0, 1, 4, 5, 100, 101, 104, 105], 1),
        ([2, 4, 6, 100, 102, 104, 106], 2),
        ([12, 16, 0, 4, 8], 2),
        ([8, 8, 8], 1),
    ],
)
def test_regular_lists_take_few_strips(offsets: list[int], number: int) -> None:
    array = np.array(offsets, dtype=np.int64)
    assert listed(array) == offsets
    assert len(strips(array)) == number


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_any_list(offsets: list[int]) -> None:
    assert listed(np.array(offsets, dtype=np.int64)) == offsets
