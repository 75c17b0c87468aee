"""What is asked of every page of a request, of every field of a layout? Small loops, compiled where a compiler was there when this was installed.

`_loops.pyx` has them compiled, `plain_loops` the same in NumPy. `_loops.Streams`, which looks at a whole request, is there
compiled only: elsewhere `plan.request_check` and `plan.whole` say the same, stream by stream.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from kvreshard.model import plain_loops

__all__ = [
    "affordable",
    "are_apart",
    "are_pieces",
    "are_within",
    "bounds",
    "compiled",
    "extent_of",
    "frame_copies",
    "frame_indices",
    "frame_rows",
    "int64s",
    "lane_entries",
    "ordered",
    "page_ids",
    "piece_rows",
    "pieces_extent",
    "reach",
    "row_kinds",
    "run_bounds",
    "runs",
    "shard_places",
    "shifted",
    "slab_places",
    "slot_reads",
    "strided_rows",
]

compiled: ModuleType | None
if TYPE_CHECKING:
    from kvreshard.model import _loops as compiled
    from kvreshard.model.plain_loops import (
        affordable,
        are_apart,
        are_pieces,
        are_within,
        bounds,
        extent_of,
        frame_copies,
        frame_indices,
        frame_rows,
        int64s,
        lane_entries,
        ordered,
        page_ids,
        piece_rows,
        pieces_extent,
        reach,
        row_kinds,
        run_bounds,
        runs,
        shard_places,
        shifted,
        slab_places,
        slot_reads,
        strided_rows,
    )
else:
    try:
        from kvreshard.model import _loops as compiled
    except ImportError:  # no compiler, or a tree that nobody installed
        compiled = None
    _found = plain_loops if compiled is None else compiled
    globals().update({name: getattr(_found, name) for name in __all__ if name != "compiled"})
