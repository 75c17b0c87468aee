"""Moves for tests of memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvreshard.plan.refine import Loop
from kvreshard.plan.stage import Move


def slots_move(
    slot_bytes: int,
    dst_bases: ArrayLike,
    dst_at: ArrayLike,
    length: int,
    loops: Sequence[tuple[int, int, int]] = (),
    src_offset: int = 0,
    dst_offset: int = 0,
) -> Move:
    """One slot after another, field by field, to as many pages; `loops`: count, step in the slot, step in the page."""
    bases, at = np.asarray(dst_bases, dtype=np.int64), np.asarray(dst_at, dtype=np.int64)
    fields, pieces = np.arange(len(bases)), np.arange(len(at))
    return Move(
        length,
        tuple(Loop(*loop) for loop in loops),
        fields * (len(at) * slot_bytes),
        pieces * slot_bytes + src_offset,
        bases,
        at + dst_offset,
    )
