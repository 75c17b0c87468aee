"""Does every load have words of its own to read leases into?"""

from __future__ import annotations

from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.scratch import Scratch


def test_places_do_not_overlap_and_come_back() -> None:
    scratch = Scratch(8)
    first, second, third = scratch.take(3), scratch.take(2), scratch.take(3)
    start = scratch.region.address
    assert [first, second, third] == [start, start + 3 * WORD_BYTES, start + 5 * WORD_BYTES]
    assert (scratch.take(1), len(scratch)) == (None, 3)
    assert second is not None
    scratch.give(second)
    assert (scratch.take(3), scratch.take(2)) == (None, second)


def test_a_load_without_sources_has_no_place_and_gives_none_back() -> None:
    scratch = Scratch(4)
    nothing = scratch.take(0)
    first = scratch.take(2)
    assert nothing is not None
    assert first is not None
    assert nothing != first
    scratch.give(nothing)
    assert (len(scratch), scratch.take(2)) == (1, first + 2 * WORD_BYTES)
