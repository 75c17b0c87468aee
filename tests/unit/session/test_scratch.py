"""Does every load have words of its own to read leases into?"""

from __future__ import annotations

import random

from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.mover import Scratch


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


def test_gaps_grow_together_again() -> None:
    scratch, rng = Scratch(256), random.Random(7)
    taken: dict[int, int] = {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            address = rng.choice(list(taken))
            del taken[address]
            scratch.give(address)
            continue
        count = rng.randint(1, 9)
        address = scratch.take(count)
        if address is not None:
            assert all(
                address + count * WORD_BYTES <= other or other + others * WORD_BYTES <= address
                for other, others in taken.items()
            )
            assert scratch.region.address <= address
            assert address + count * WORD_BYTES <= scratch.region.address + scratch.region.size_bytes
            taken[address] = count
    for address in taken:
        scratch.give(address)
    assert scratch.take(256) == scratch.region.address
