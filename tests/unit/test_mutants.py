"""Every break of `tests/mutants.py` still has something to break and tests that look: one that has not is tried by nobody."""

from __future__ import annotations

import pytest
from tests.mutants import BREAKS, ROOT, Break


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_a_break_names_code_and_tests_that_exist(one: Break) -> None:
    holder, name = one.find()
    assert hasattr(holder, name)
    assert (ROOT / one.tests).is_file()


def test_names_of_breaks_are_unique() -> None:
    assert len({one.name for one in BREAKS}) == len(BREAKS) > 20
