from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.plain_loops import affordable as affordable
from kvreshard.model.plain_loops import are_apart as are_apart
from kvreshard.model.plain_loops import are_pieces as are_pieces
from kvreshard.model.plain_loops import are_within as are_within
from kvreshard.model.plain_loops import bounds as bounds
from kvreshard.model.plain_loops import extent_of as extent_of
from kvreshard.model.plain_loops import frame_copies as frame_copies
from kvreshard.model.plain_loops import frame_indices as frame_indices
from kvreshard.model.plain_loops import frame_rows as frame_rows
from kvreshard.model.plain_loops import int64s as int64s
from kvreshard.model.plain_loops import lane_entries as lane_entries
from kvreshard.model.plain_loops import ordered as ordered
from kvreshard.model.plain_loops import page_ids as page_ids
from kvreshard.model.plain_loops import piece_rows as piece_rows
from kvreshard.model.plain_loops import pieces_extent as pieces_extent
from kvreshard.model.plain_loops import reach as reach
from kvreshard.model.plain_loops import row_kinds as row_kinds
from kvreshard.model.plain_loops import run_bounds as run_bounds
from kvreshard.model.plain_loops import runs as runs
from kvreshard.model.plain_loops import shard_places as shard_places
from kvreshard.model.plain_loops import shifted as shifted
from kvreshard.model.plain_loops import slab_places as slab_places
from kvreshard.model.plain_loops import slot_reads as slot_reads
from kvreshard.model.plain_loops import strided_rows as strided_rows
from kvreshard.model.tables import Request

Int64s = NDArray[np.int64]
Part = tuple[tuple[int, int, int], int, int]

class Pages:
    def __init__(self, name: str, num_pages: int, null_page: int | None, pool: int, group: int) -> None: ...

class Stream:
    def __init__(self, src: Pages, dst: Pages, size: int, tokens_per_index: int, partial: int) -> None: ...

class Streams:
    def __init__(self, streams: Sequence[Stream], groups: dict[str, Pages], num_pools: int) -> None: ...
    def cut(self, request: Request) -> list[tuple[list[Int64s], list[Int64s], list[Part]] | None] | None: ...
