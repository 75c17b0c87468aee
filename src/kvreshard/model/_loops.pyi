from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvreshard.model.tables import Request

Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]
Part = tuple[tuple[int, int, int], int, int]

def page_ids(pages: ArrayLike) -> NDArray[np.generic]: ...
def bounds(values: Int64s) -> tuple[int, int]: ...
def neighbours(src: Int64s, dst: Int64s) -> tuple[bool, int, int]: ...
def runs(src: Int64s, dst: Int64s, most_pages: int) -> tuple[Int64s, Int64s, Int64s]: ...
def frame_rows(
    entries: tuple[Uint64s, Uint64s, Uint64s],
    stride_bytes: tuple[int, int],
    devices: tuple[int, int],
    pages: tuple[Int64s, Int64s, Int64s],
    cost_bytes: int,
) -> tuple[Uint64s, Uint64s, Uint64s]: ...
def frame_indices(
    local_page: Int64s, remote_page: Int64s, counts: tuple[int, int], first: int, stop: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def piece_rows(
    pieces: tuple[Uint64s, Uint64s, Uint64s], devices: tuple[int, int], cost_bytes: int
) -> tuple[Uint64s, Uint64s, Uint64s]: ...
def reach(address: Uint64s, length_bytes: Uint64s) -> tuple[int, int]: ...
def slot_reads(
    src_page: Int64s,
    boxes: tuple[Int64s, Int64s, Int64s],
    sizes_bytes: tuple[int, int],
    bases: Int64s,
    fields_each: int,
) -> tuple[Int64s, Int64s, Int64s, int]: ...

class Pages:
    def __init__(self, name: str, num_pages: int, null_page: int | None, pool: int, group: int) -> None: ...

class Stream:
    def __init__(self, src: Pages, dst: Pages, size: int, tokens_per_index: int, partial: int) -> None: ...

class Streams:
    def __init__(self, streams: Sequence[Stream], groups: dict[str, Pages], num_pools: int) -> None: ...
    def cut(self, request: Request) -> list[tuple[list[Int64s], list[Int64s], list[Part]] | None] | None: ...
