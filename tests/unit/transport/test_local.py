"""Does a strided move put every byte where its definition says, and nothing else?"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace
from tests.unit.transport.moves import slots_move

from kvreshard.plan.stage import Move
from kvreshard.transport.local import HostMemory


def slow_move(buffer: np.ndarray, memory: np.ndarray, address: int, move: Move) -> None:
    """The definition, step by step. `address`: of the memory's first byte."""
    for src_base, dst_base in zip(move.src_bases.tolist(), move.dst_bases.tolist(), strict=True):
        for src_at, dst_at in zip(move.src_at.tolist(), move.dst_at.tolist(), strict=True):
            for steps in product(*(range(loop.count) for loop in move.loops)):
                src, dst = src_base + src_at, dst_base + dst_at - address
                for step, loop in zip(steps, move.loops, strict=True):
                    src, dst = src + step * loop.src_step, dst + step * loop.dst_step
                memory[dst : dst + move.length] = buffer[src : src + move.length]


@pytest.mark.parametrize("order", ["slots", "evenly", "any", "one slot"])
@pytest.mark.parametrize("seed", range(30))
def test_a_move_is_its_definition(seed: int, order: str) -> None:
    rng = np.random.default_rng(seed)
    unit = int(rng.choice([1, 2, 3, 4, 8, 16]))
    length = unit * int(rng.integers(1, 5))
    loops, src_step, dst_step = [], length, length
    for _ in range(int(rng.integers(0, 3))):
        count = int(rng.integers(2, 5))
        src_step, dst_step = src_step + unit * int(rng.integers(0, 3)), dst_step + unit * int(rng.integers(0, 3))
        loops.append((count, src_step, dst_step))
        src_step, dst_step = src_step * count, dst_step * count
    src_offset, dst_offset = unit * int(rng.integers(0, 3)), unit * int(rng.integers(0, 3))
    slot_bytes, page_bytes = src_step + src_offset + unit, dst_step + dst_offset + unit
    num_fields, num_pieces = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    pages = rng.permutation(9)[:num_pieces] * page_bytes
    buffer = rng.integers(0, 256, num_fields * 12 * slot_bytes, dtype=np.uint8)
    memory = rng.integers(0, 256, num_fields * 9 * page_bytes, dtype=np.uint8)
    bases = np.arange(num_fields) * (9 * page_bytes) + memory.ctypes.data
    move = slots_move(slot_bytes, bases, pages, length, loops, src_offset, dst_offset)
    slots = {
        "slots": np.arange(num_pieces),
        "evenly": 2 * np.arange(num_pieces) + 1,
        "any": rng.permutation(12)[:num_pieces],
        "one slot": np.full(num_pieces, 3),
    }[order]
    move = replace(move, src_at=slots * slot_bytes + src_offset, src_bases=np.arange(num_fields) * 12 * slot_bytes)
    expected = memory.copy()
    slow_move(buffer, expected, memory.ctypes.data, move)
    assert not np.array_equal(memory, expected)
    HostMemory().move(buffer.ctypes.data, move)
    assert np.array_equal(memory, expected)


def test_zeroing_touches_its_ranges_only() -> None:
    memory = np.full(64, 7, dtype=np.uint8)
    start = np.array([3, 20, 63]) + memory.ctypes.data
    HostMemory().zero(start, start + np.array([5, 1, 1]))
    assert np.flatnonzero(memory == 0).tolist() == [3, 4, 5, 6, 7, 20, 63]
