"""Which bytes of newly allocated destination pages does no copy write?

They must be zeroed before the load is reported complete: an engine does not zero pages that a connector loads, and stale
bytes in overlaid pages are poison. The answer for one rank: the slabs of its new pages, less everything that the copies
to this rank write; never two regions at once, which may follow each other without a gap and be two allocations all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import ByteRanges, CopyList, cut, merged, subtract


def find_unwritten(dst: EngineLayout, dst_rank: int, request: Request, copies: Iterable[CopyList]) -> ByteRanges:
    """Address ranges on `dst_rank` to zero, sorted, each in one region. `copies`: all copies to that rank for the request."""
    rank = dst.rank_by_number[dst_rank]
    starts, stops = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for group in dst.groups:
        pages = np.asarray(request.dst_new_pages.get(group.name, ()), dtype=np.int64)
        for slab in rank.slabs:
            if slab.pool == group.pool and len(pages):
                first = rank.region_by_name[slab.region].address + slab.offset_bytes + pages * slab.page_stride_bytes
                starts.append(first)
                stops.append(first + slab.page_bytes)
    new = merged(np.concatenate(starts), np.concatenate(stops))
    written = [copy for copy in copies if copy.dst_rank == dst_rank]
    if written:
        dst_address = np.concatenate([copy.dst_address for copy in written])
        new = subtract(new, merged(dst_address, dst_address + np.concatenate([copy.length for copy in written])))
    return cut(new, np.array(rank.addresses, dtype=np.int64))
