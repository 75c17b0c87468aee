"""How is a rank's memory divided among its shards, apart from where it lies and what of each axis it holds?

An engine's ranks mostly differ in their addresses and in which heads they hold; their regions, slabs and the places of their
shards are the same. An `Outline` says those once for all such ranks, as columns: shard i is the part of field `fields[i]` that
begins `offsets_bytes[i]` into region number `region_of[i]`, and lies in its pages as geometry number `geometry_of[i]` of the rank.

Refused, as LayoutError: columns of different length, and numbers of regions that are not listed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutError
from kvreshard.model.loops import int64s

if TYPE_CHECKING:
    from kvreshard.model.layout import Geometry, Region, Shard

Int64s = NDArray[np.int64]
K = TypeVar("K")
V = TypeVar("V")
# Families of fields; a route has a few.
MAX_KEPT = 64


class Slab(msgspec.Struct, frozen=True):
    """Page p of `pool` owns `page_bytes` bytes of `region` from `offset_bytes + p * page_stride_bytes`."""

    pool: str
    region: str
    offset_bytes: int
    page_stride_bytes: int
    page_bytes: int


@dataclass(frozen=True)
class Outline:
    """Names and sizes of regions, slabs, and one column per fact about the shards; see the top of this file."""

    region_names: tuple[str, ...]
    region_bytes: tuple[int, ...]
    slabs: tuple[Slab, ...]
    fields: tuple[str, ...]
    region_of: tuple[int, ...]
    offsets_bytes: tuple[int, ...]
    geometry_of: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.fields, self.region_of, self.offsets_bytes, self.geometry_of)}
        if len(lengths) > 1 or len(self.region_names) != len(self.region_bytes):
            raise LayoutError(
                f"an outline of {len(self.region_names)} regions with {len(self.region_bytes)} sizes, and of {len(self.fields)} "
                f"fields with {len(self.region_of)} regions, {len(self.offsets_bytes)} offsets and {len(self.geometry_of)} "
                "geometries; each has one of each"
            )
        numbers = (*self.region_of, *self.geometry_of)
        if numbers and (min(numbers) < 0 or max(self.region_of) >= len(self.region_names)):
            raise LayoutError(
                f"an outline whose shards lie in regions {min(self.region_of)} to {max(self.region_of)} of "
                f"{len(self.region_names)}, in geometries from {min(self.geometry_of)} on; numbers begin at 0"
            )

    @cached_property
    def num_geometries(self) -> int:
        """How many geometries a rank needs for this outline."""
        return max(self.geometry_of, default=-1) + 1

    @cached_property
    def number_of_field(self) -> Mapping[str, int]:
        """Field -> number of its shard."""
        return dict(zip(self.fields, range(len(self.fields)), strict=True))

    def numbers(self, fields: tuple[str, ...]) -> Int64s:
        """The numbers of these fields' shards, shape (fields,). Raises KeyError for a field without one."""
        found = self._numbers.get(fields)
        if found is None:
            found = int64s(list(map(self.number_of_field.__getitem__, fields)))
            found.flags.writeable = False
            if len(self._numbers) >= MAX_KEPT:
                self._numbers.clear()
            self._numbers[fields] = found
        return found

    @cached_property
    def _numbers(self) -> dict[tuple[str, ...], Int64s]:
        """What `numbers` has found: every lane of a family asks for the same fields, on both sides, and so does the proof."""
        return {}

    @cached_property
    def geometry_numbers(self) -> Int64s:
        """`geometry_of`, shape (shards,)."""
        return int64s(self.geometry_of)

    @cached_property
    def sizes(self) -> Int64s:
        """Bytes of each region, shape (regions,)."""
        return int64s(self.region_bytes)

    @cached_property
    def offsets(self) -> Int64s:
        """`offsets_bytes`, shape (shards,)."""
        return int64s(self.offsets_bytes)

    @cached_property
    def region_numbers(self) -> Int64s:
        """`region_of`, shape (shards,)."""
        return int64s(self.region_of)


def outline_of(
    whose: str,
    regions: tuple[Region, ...],
    slabs: tuple[Slab, ...],
    shards: tuple[Shard, ...],
    numbers: dict[Geometry, int],
) -> Outline:
    """The outline of these regions, slabs and shards; `numbers` gets the geometries in the order of their numbers.

    Raises LayoutError for a shard in a region that is not listed.
    """
    region_numbers = {region.name: number for number, region in enumerate(regions)}
    seen: dict[int, int] = {}
    for shard in shards:
        if shard.region not in region_numbers:
            raise LayoutError(f"{whose}, field '{shard.field}': region '{shard.region}' is not listed")
        # Hashing a geometry costs some 15 us, and layers mostly share the object.
        if id(shard.geometry) not in seen:
            seen[id(shard.geometry)] = numbers.setdefault(shard.geometry, len(numbers))
    return Outline(
        tuple(region.name for region in regions),
        tuple(region.size_bytes for region in regions),
        slabs,
        tuple(shard.field for shard in shards),
        tuple(region_numbers[shard.region] for shard in shards),
        tuple(shard.offset_bytes for shard in shards),
        tuple(seen[id(shard.geometry)] for shard in shards),
    )


def firsts(kinds: Iterable[K], things: Iterable[V]) -> dict[K, V]:
    """Every kind, in the order of their first things, with that."""
    found: dict[K, V] = {}
    deque(starmap(found.setdefault, zip(kinds, things, strict=True)), maxlen=0)
    return found
