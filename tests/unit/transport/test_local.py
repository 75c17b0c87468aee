"""Does a strided move put every byte where its definition says, and nothing else?"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvreshard.transport.local import HostMemory


def slow_move(
    slots: np.ndarray,
    slot_bytes: int,
    pages: np.ndarray,
    dst_bases: list[int],
    dst_pages: list[int],
    length: int,
    loops: list[tuple[int, int, int]],
    slot_offset: int,
    dst_offset: int,
) -> None:
    """The definition, step by step."""
    for field, base in enumerate(dst_bases):
        for piece, page in enumerate(dst_pages):
            for steps in product(*(range(count) for count, _, _ in loops)):
                src = (field * len(dst_pages) + piece) * slot_bytes + slot_offset
                dst = base + page + dst_offset
                for step, (_, src_step, dst_step) in zip(steps, loops, strict=True):
                    src, dst = src + step * src_step, dst + step * dst_step
                pages[dst : dst + length] = slots[src : src + length]


@pytest.mark.parametrize("seed", range(60))
def test_a_move_is_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    unit = int(rng.choice([1, 2, 3, 4, 8, 16]))
    length = unit * int(rng.integers(1, 5))
    loops, src_step, dst_step = [], length, length
    for _ in range(int(rng.integers(0, 3))):
        count = int(rng.integers(2, 5))
        src_step, dst_step = src_step + unit * int(rng.integers(0, 3)), dst_step + unit * int(rng.integers(0, 3))
        loops.append((count, src_step, dst_step))
        src_step, dst_step = src_step * count, dst_step * count
    slot_offset, dst_offset = unit * int(rng.integers(0, 3)), unit * int(rng.integers(0, 3))
    slot_bytes, page_bytes = src_step + slot_offset + unit, dst_step + dst_offset + unit
    num_fields, num_pieces = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    pages = [int(page) * page_bytes for page in rng.permutation(9)[:num_pieces]]
    bases = [field * 9 * page_bytes for field in range(num_fields)]
    slots = rng.integers(0, 256, num_fields * num_pieces * slot_bytes, dtype=np.uint8)
    memory = rng.integers(0, 256, num_fields * 9 * page_bytes, dtype=np.uint8)
    expected = memory.copy()
    slow_move(slots, slot_bytes, expected, bases, pages, length, loops, slot_offset, dst_offset)
    HostMemory().move(
        slots.ctypes.data,
        slot_bytes,
        np.array(bases) + memory.ctypes.data,
        np.array(pages),
        length,
        loops,
        slot_offset,
        dst_offset,
    )
    assert np.array_equal(memory, expected)


def test_zeroing_touches_its_ranges_only() -> None:
    memory = np.full(64, 7, dtype=np.uint8)
    start = np.array([3, 20, 63]) + memory.ctypes.data
    HostMemory().zero(start, start + np.array([5, 1, 1]))
    assert np.flatnonzero(memory == 0).tolist() == [3, 4, 5, 6, 7, 20, 63]
