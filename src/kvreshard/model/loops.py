"""What is asked of every page of a request, of every field of a layout? Small loops, compiled where a compiler was there when this was installed.

`_loops.pyx` has them compiled, `plain_loops` the same in NumPy. `_loops.Streams`, which looks at a whole request, is there
compiled only: elsewhere `plan.request_check` and `plan.whole` say the same, stream by stream.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from kvreshard.model import plain_loops

compiled: ModuleType | None
if TYPE_CHECKING:
    from kvreshard.model import _loops as compiled
    from kvreshard.model.plain_loops import (
        affordable,
        are_pieces,
        bounds,
        extent_of,
        frame_copies,
        frame_indices,
        frame_rows,
        int64s,
        ordered,
        page_ids,
        piece_rows,
        reach,
        row_kinds,
        run_bounds,
        runs,
        shifted,
        slot_reads,
    )
else:
    try:
        from kvreshard.model import _loops as compiled
    except ImportError:  # no compiler, or a tree that nobody installed
        compiled = None
    _found = plain_loops if compiled is None else compiled
    bounds, extent_of, int64s, row_kinds = _found.bounds, _found.extent_of, _found.int64s, _found.row_kinds
    ordered, page_ids, run_bounds, runs = _found.ordered, _found.page_ids, _found.run_bounds, _found.runs
    frame_copies, frame_indices, frame_rows = _found.frame_copies, _found.frame_indices, _found.frame_rows
    affordable, are_pieces, piece_rows, reach, shifted, slot_reads = (
        _found.affordable, _found.are_pieces, _found.piece_rows, _found.reach, _found.shifted, _found.slot_reads
    )  # fmt: skip

__all__ = [
    "affordable",
    "are_pieces",
    "bounds",
    "compiled",
    "extent_of",
    "frame_copies",
    "frame_indices",
    "frame_rows",
    "int64s",
    "ordered",
    "page_ids",
    "piece_rows",
    "reach",
    "row_kinds",
    "run_bounds",
    "runs",
    "shifted",
    "slot_reads",
]
