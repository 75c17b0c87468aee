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

class Pages:
    def __init__(self, name: str, num_pages: int, null_page: int | None, pool: int, group: int) -> None: ...

class Stream:
    def __init__(self, src: Pages, dst: Pages, size: int, tokens_per_index: int, partial: int) -> None: ...

class Streams:
    def __init__(self, streams: Sequence[Stream], groups: dict[str, Pages], num_pools: int) -> None: ...
    def cut(self, request: Request) -> list[tuple[list[Int64s], list[Int64s], list[Part]] | None] | None: ...
