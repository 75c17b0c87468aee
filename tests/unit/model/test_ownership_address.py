"""Do ownership and address maps agree with the definition, coordinate by coordinate?"""

from itertools import product

import numpy as np
import pytest

from kvreshard.model import AxisMap, Cyclic, Digit, Interval, Ownership, canonical, count_within, split_evenly

OWNERS: list[Ownership] = [
    Interval(0, None),
    Interval(3, 9),
    Interval(0, 1),
    Cyclic(0, 1, 1),
    Cyclic(2, 3, 7),
    Cyclic(4, 1, 5),
]


@pytest.mark.parametrize("owned", OWNERS, ids=str)
def test_the_answers_agree(owned: Ownership) -> None:
    window = np.arange(40, dtype=np.int64)
    held = window[owned.contains(window)]
    assert owned.to_local(held).tolist() == list(range(len(held)))
    assert owned.to_global(owned.to_local(held)).tolist() == held.tolist()
    for bound in range(40):
        assert owned.count_below(bound) == int((held < bound).sum())
        start, stop = owned.next_held(bound)
        if start < 40:
            assert start == held[held >= bound][0]
            assert owned.contains(np.arange(start, min(stop, 40))).all()
            assert not owned.contains(np.array([stop]))[0] or owned.period == owned.run
        else:
            assert not (held >= bound).any()
    for low, high in product(range(0, 30, 3), repeat=2):
        if low <= high:
            assert count_within(owned, low, high) == int(((held >= low) & (held < high)).sum())
            flips = {c for c in range(low + 1, high) if owned.contains(np.array([c - 1, c])).tolist().count(True) == 1}
            assert flips <= set(owned.edges(low, high).tolist())


@pytest.mark.parametrize(("extent", "parts"), [(8, 3), (5, 5), (2, 7), (1, 16), (16, 1), (7, 4)])
def test_parts_cover_the_axis(extent: int, parts: int) -> None:
    found = [split_evenly(extent, parts, index) for index in range(parts)]
    held = sorted({c for part in found for c in range(part.start, part.stop or 0)})
    assert held == list(range(extent))
    sizes = {(part.stop or 0) - part.start for part in found}
    assert max(sizes) - min(sizes) <= 1
    if parts <= extent:
        assert sum((part.stop or 0) - part.start for part in found) == extent
    else:
        assert sizes == {1}


def test_canonical_keeps_every_address() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        digits, step = [], 2
        for _ in range(int(rng.integers(1, 5))):
            extent = int(rng.integers(1, 5))
            digits.append(Digit(extent, 0, step))
            step = step * extent + int(rng.choice([0, 0, 1]))
        short = canonical(tuple(digits))
        held = int(np.prod([digit.extent for digit in digits]))
        local = np.arange(held, dtype=np.int64)
        whole = AxisMap("a", Interval(0, held), tuple(digits)).locate(local)
        again = AxisMap("a", Interval(0, held), short).locate(local)
        assert [part.tolist() for part in whole] == [part.tolist() for part in again]
        assert len(short) <= len(digits)


def test_a_continued_digit_is_merged() -> None:
    assert canonical((Digit(4, 0, 2), Digit(1, 0, 99), Digit(3, 0, 8))) == (Digit(12, 0, 2),)
    assert canonical((Digit(4, 0, 2), Digit(3, 0, 9))) == (Digit(4, 0, 2), Digit(3, 0, 9))
    assert canonical((Digit(1, 0, 2),)) == (Digit(1, 0, 0),)


def test_a_ring_wraps_and_a_sequence_does_not() -> None:
    ring = AxisMap("t", Interval(0, None), (Digit(3, 0, 4), Digit(2, 1, 0), Digit(None, 0, 0)))
    pages, offsets = ring.locate(np.arange(8, dtype=np.int64))
    assert pages.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert offsets.tolist() == [0, 4, 8, 0, 4, 8, 0, 4]
    assert (ring.ring_pages, ring.indices_per_page) == (2, 3)
    paged = AxisMap("t", Interval(0, None), (Digit(3, 0, 4), Digit(None, 1, 0)))
    assert paged.locate(np.array([7], dtype=np.int64)) == (np.array([2]), np.array([4]))
    assert paged.ring_pages is None


def test_the_last_byte_counts_only_what_is_held() -> None:
    digits = (Digit(4, 0, 2), Digit(4, 0, 100))
    assert AxisMap("a", Interval(0, 16), digits).last_byte_offset == 306
    assert AxisMap("a", Interval(0, 3), digits).last_byte_offset == 4
    assert AxisMap("a", Interval(0, 5), digits).last_byte_offset == 106


def test_the_loops_of_a_page_are_those_of_its_digits() -> None:
    digits = (Digit(4, 0, 2), Digit(1, 0, 7), Digit(3, 0, 100))
    whole = AxisMap("a", Interval(5, 17), digits)
    assert whole.page_loops == ((2, 4), (100, 3))
    offsets = sorted(low + high for low in range(0, 8, 2) for high in range(0, 300, 100))
    assert whole.locate(np.arange(12, dtype=np.int64))[1].tolist() == offsets
    assert AxisMap("a", Interval(0, 3), digits).page_loops == ((2, 3),)
    assert AxisMap("a", Interval(0, 5), digits).page_loops == ((2, 4), (100, 2))
    assert AxisMap("t", Interval(0, None), (Digit(3, 0, 4), Digit(2, 1, 0), Digit(None, 0, 0))).page_loops == ((4, 3),)
