"""Is what a page needs of a source page read once, and does every destination page get its part of it?"""

from __future__ import annotations

import numpy as np
import pytest

from kvreshard.plan.copies import Int64s
from kvreshard.plan.pattern import Bases, Pattern
from kvreshard.plan.refine import Loop
from kvreshard.plan.stage import make_image


def array(*values: int) -> Int64s:
    return np.array(values, dtype=np.int64)


def pattern(src: Int64s, dst: Int64s, length: int = 32, src_page: int = 0, dst_page: int = 0) -> Pattern:
    bases, ones = Bases(array(1000, 2000), array(7, 8), array(0, 0)), np.ones_like(src)
    return Pattern(bases, (), src, dst, ones * length, ones * src_page, ones * dst_page)


@pytest.mark.parametrize(
    ("max_gap_bytes", "offsets", "lengths"),
    [(0, [0, 64], [32, 32]), (31, [0, 64], [32, 32]), (32, [0], [96])],
)
def test_runs_are_read_together_over_short_gaps(max_gap_bytes: int, offsets: list[int], lengths: list[int]) -> None:
    image = make_image([pattern(array(0, 64), array(500, 100))], max_gap_bytes)
    assert (image.offsets.tolist(), image.lengths.tolist()) == (offsets, lengths)
    assert image.image_bytes == sum(lengths)
    places = {(run.src_byte, run.dst_byte) for (runs,) in [image.runs] for run in runs}
    assert places == {(0, 500), (64 if max_gap_bytes == 32 else 32, 100)}


def test_bytes_that_several_destination_pages_want_are_read_once() -> None:
    """The same half of a source page goes to two destination pages, the other half to a third."""
    overlaps = [pattern(array(0), array(0)), pattern(array(0), array(96), dst_page=1), pattern(array(32), array(64))]
    image = make_image(overlaps, 0)
    assert (image.offsets.tolist(), image.lengths.tolist(), image.image_bytes) == ([0], [64], 64)
    found = [[(run.dst_page, run.src_byte, run.dst_byte) for run in runs] for runs in image.runs]
    assert found == [[(0, 0, 0)], [(1, 0, 96)], [(0, 32, 64)]]
    assert [[run.num_repeats for run in runs] for runs in image.runs] == [[1], [1], [1]]


def test_runs_that_repeat_are_one_run_with_loops() -> None:
    src = (np.arange(4)[:, None] * 256 + np.arange(3) * 64).reshape(-1)
    image = make_image([pattern(src, src // 2, 16)], 48)
    ((run,),) = image.runs
    # Boxes of 144 bytes, one for every 256, lie side by side in the slot.
    assert (run.length, run.loops) == (16, (Loop(3, 64, 32), Loop(4, 144, 128)))


def test_pages_of_a_span_have_runs_of_their_own() -> None:
    two = pattern(array(0, 0), array(0, 32))
    two = Pattern(two.bases, (), two.src_offsets, two.dst_offsets, two.lengths, array(0, 1), array(0, 0))
    image = make_image([two], 0)
    assert image.image_bytes == 32
    assert [(run.src_page, run.dst_page, run.dst_byte) for run in image.runs[0]] == [(0, 0, 0), (1, 0, 32)]
