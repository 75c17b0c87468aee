"""The byte runs of a shard in one page, which `layout_check` compares with slabs and other shards.

A page repeats a run of bytes by loops, one per digit of its axis maps. Refused, as LayoutError: pages of more than `MAX_RUNS_PER_PAGE`
pieces, pages that reach too far, two cells that share a byte.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import digits_text
from kvreshard.model.errors import LayoutError
from kvreshard.model.rank import Geometry

Int64s = NDArray[np.int64]
# A page of 4096 tokens x 128 heads: beyond it the page would not fit any engine's memory either.
MAX_RUNS_PER_PAGE = 1 << 20
# Regions end below 2**63, so offsets below half of it add up without wrapping around.
MAX_OFFSET_BYTES = 1 << 62


Loops = tuple[tuple[int, int], ...]
"""Step in bytes and count of each, ascending."""


def page_loops(element_bytes: int, geometry: Geometry) -> tuple[int, Loops]:
    """Bytes of one run, and the loops that repeat it in a page."""
    run_bytes = element_bytes
    loops = sorted([loop for mapped in geometry.axes for loop in mapped.page_loops])
    num_joined = 0
    for step, count in loops:
        if step != run_bytes:
            break
        run_bytes *= count
        num_joined += 1
    return run_bytes, tuple(loops[num_joined:])


def page_runs(where: str, geometry: Geometry, run_bytes: int, loops: Loops) -> Int64s:
    """The contiguous byte runs of one full page of a shard, relative to its first cell: shape (n, 2), start and stop.

    Sorted and merged. `run_bytes` and `loops` as `page_loops` has them. Raises LayoutError if two cells share a byte.
    """
    num_runs = prod(count for _, count in loops)
    if num_runs > MAX_RUNS_PER_PAGE:
        raise LayoutError(f"{where}: a page of {num_runs} separate pieces; more than {MAX_RUNS_PER_PAGE} are refused")
    reach = run_bytes + sum(step * (count - 1) for step, count in loops)
    if reach > MAX_OFFSET_BYTES:
        raise LayoutError(f"{where}: a page that reaches to byte {reach}; more than {MAX_OFFSET_BYTES} are refused")
    if not loops:
        return np.array([[0, run_bytes]], dtype=np.int64)
    starts = np.zeros(1, dtype=np.int64)
    for step, count in loops:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    starts.sort()
    if len(starts) > 1 and int(np.diff(starts).min()) < run_bytes:
        strides = "; ".join(f"axis '{mapped.axis}' has {digits_text(mapped.digits)}" for mapped in geometry.axes)
        raise LayoutError(f"{where}: two cells of one page share bytes; check the steps: {strides}")
    breaks = np.flatnonzero(np.diff(starts) != run_bytes)
    first = np.concatenate([[0], breaks + 1])
    last = np.concatenate([breaks, [len(starts) - 1]])
    return np.stack([starts[first], starts[last] + run_bytes], axis=1)
