"""Which slots are read together? Those of one form: the same bytes of a source page to the same bytes of a page, from some place on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvreshard.plan.pattern import Bases, Pattern
from kvreshard.plan.slot import Slot, find_boxes, make_slot


def slot(
    dst: Sequence[int], src: Sequence[int] = (0, 64), length: int = 32, bases: Sequence[int] = (1000, 2000)
) -> Slot:
    """Two runs of one source page to one destination page."""
    addresses, zeros = np.array(bases, dtype=np.int64), np.zeros(2, dtype=np.int64)
    offsets = np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64)
    pattern = Pattern(Bases(addresses, addresses + 7, zeros), (), *offsets, np.full(2, length), zeros, zeros)
    return make_slot(pattern, find_boxes(pattern, 0))


def test_slots_that_go_elsewhere_in_their_page_are_of_one_form() -> None:
    near, far = slot([0, 100]), slot([500, 600])
    assert near.form == far.form
    assert (near.shift_bytes, far.shift_bytes) == (0, 500)
    assert near.steps == far.steps


def test_others_are_not() -> None:
    known = slot([0, 100]).form
    assert slot([0, 104]).form != known  # further apart in the page
    assert slot([100, 0]).form != known  # the other way round
    assert slot([0, 100], src=(0, 72)).form != known  # other bytes of the source
    assert slot([0, 100], length=16).form != known
    assert slot([0, 100], bases=(1000, 2008)).form != known  # fields at other addresses, as where others are fused
    assert slot([0, 100], bases=(1000,)).form != known
