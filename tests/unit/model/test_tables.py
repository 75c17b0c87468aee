"""Are block tables what was given, and the caller's array still the caller's?"""

from __future__ import annotations

import numpy as np

from kvreshard.model.tables import PageTable


def test_a_block_table_is_a_copy_and_of_whole_numbers() -> None:
    given = np.array([1, 2, 3], dtype=np.int32)
    table = PageTable(given, 3)
    given[0] = 9
    assert table.pages.tolist() == [1, 2, 3]
    assert table.pages.dtype == np.int64
