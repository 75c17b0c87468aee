"""Does the comparison of two memories find every byte, wherever the parts that it compares begin?"""

import numpy as np
import pytest

from kvreshard.testing import oracle


@pytest.mark.parametrize("compared_bytes", [1, 3, 7, 10, 64])
def test_differences_are_found_across_the_parts_of_a_comparison(
    monkeypatch: pytest.MonkeyPatch, compared_bytes: int
) -> None:
    monkeypatch.setattr(oracle, "COMPARED_BYTES", compared_bytes)
    expected = {(0, "kv"): np.zeros(20, np.uint8), (1, "kv"): np.zeros(5, np.uint8), (1, "none"): np.zeros(0, np.uint8)}
    got = {place: content.copy() for place, content in expected.items()}
    assert oracle.differing_bytes(expected, got) == {}
    got[0, "kv"][[0, 6, 7, 8, 19]] = 1
    assert oracle.differing_bytes(expected, got) == {(0, "kv"): [(0, 1), (6, 9), (19, 20)]}
