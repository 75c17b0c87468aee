"""How is a rank's memory divided among its shards, apart from where it lies and what of each axis it holds?

An engine's ranks mostly differ in their addresses and in which heads they hold; their regions, slabs and the places of their
shards are the same. An `Outline` says those once for all such ranks, as columns: shard i is the part of field `fields[i]` that
begins `offsets_bytes[i]` into region number `region_of[i]`, and lies in its pages as geometry number `geometry_of[i]` of the rank.

Refused, as LayoutError: columns of different length, and numbers of regions that are not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.column import Column
from kvreshard.model.errors import LayoutError
from kvreshard.model.loops import bounds
from kvreshard.model.names import Names

if TYPE_CHECKING:
    from kvreshard.model.layout import Geometry, Region, Shard

Int64s = NDArray[np.int64]


class Slab(msgspec.Struct, frozen=True):
    """Page p of `pool` owns `page_bytes` bytes of `region` from `offset_bytes + p * page_stride_bytes`."""

    pool: str
    region: str
    offset_bytes: int
    page_stride_bytes: int
    page_bytes: int


@dataclass(frozen=True)
class Slabs:
    """Slabs as columns, see `Slab`: slab i is one of pool `pools[pool_of[i]]` in region number `region_of[i]`.

    Pools are in the order of their first slabs.
    """

    pools: tuple[str, ...]
    pool_of: Column
    region_of: Column
    offsets_bytes: Column
    strides_bytes: Column
    pages_bytes: Column

    @staticmethod
    def of(whose: str, slabs: Iterable[Slab], regions: Names) -> Slabs:
        """These slabs, in regions of these names. Raises LayoutError for a slab in another."""
        listed = tuple(slabs)
        for slab in listed:
            if slab.region not in regions:
                raise LayoutError(f"{whose}: slab of pool '{slab.pool}' in region '{slab.region}': unknown name")
        pools: dict[str, int] = {}
        return Slabs(
            pool_of=Column.of(pools.setdefault(slab.pool, len(pools)) for slab in listed),
            pools=tuple(pools),
            region_of=Column.of(regions.number_of[slab.region] for slab in listed),
            offsets_bytes=Column.of(slab.offset_bytes for slab in listed),
            strides_bytes=Column.of(slab.page_stride_bytes for slab in listed),
            pages_bytes=Column.of(slab.page_bytes for slab in listed),
        )

    def __post_init__(self) -> None:
        columns = self.pool_of, self.region_of, self.offsets_bytes, self.strides_bytes, self.pages_bytes
        if len(set(map(len, columns))) > 1:
            raise LayoutError(
                f"slabs with {len(self.pool_of)} pools, {len(self.region_of)} regions, {len(self.offsets_bytes)} offsets, "
                f"{len(self.strides_bytes)} strides and {len(self.pages_bytes)} sizes; each has one of each"
            )

    def __len__(self) -> int:
        return len(self.pool_of)

    def listed(self, regions: Names) -> Iterator[Slab]:
        """One by one; `regions` has the names of their regions."""
        columns = self.pool_of, self.region_of, self.offsets_bytes, self.strides_bytes, self.pages_bytes
        for pool, region, offset_bytes, stride_bytes, page_bytes in zip(*columns, strict=True):
            yield Slab(self.pools[pool], regions[region], offset_bytes, stride_bytes, page_bytes)


@dataclass(frozen=True)
class Outline:
    """Names and sizes of regions, slabs, and one column per fact about the shards; see the top of this file."""

    region_names: Names
    region_bytes: Column
    slabs: Slabs
    fields: Names
    region_of: Column
    offsets_bytes: Column
    geometry_of: Column

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.fields, self.region_of, self.offsets_bytes, self.geometry_of)}
        if len(lengths) > 1 or len(self.region_names) != len(self.region_bytes):
            raise LayoutError(
                f"an outline of {len(self.region_names)} regions with {len(self.region_bytes)} sizes, and of {len(self.fields)} "
                f"fields with {len(self.region_of)} regions, {len(self.offsets_bytes)} offsets and {len(self.geometry_of)} "
                "geometries; each has one of each"
            )
        slabs = self.slabs
        if len(slabs) and not (
            _are_below(slabs.region_of, len(self.region_names)) and _are_below(slabs.pool_of, len(slabs.pools))
        ):
            raise LayoutError(
                f"an outline of {len(self.region_names)} regions whose slabs lie in others, or are of none of {len(slabs.pools)} pools"
            )
        if not len(self.fields):
            return
        (low, high), least = bounds(self.region_of.array), bounds(self.geometry_of.array)[0]
        if min(low, least) < 0 or high >= len(self.region_names):
            raise LayoutError(
                f"an outline whose shards lie in regions {low} to {high} of {len(self.region_names)}, in geometries from {least} "
                "on; numbers begin at 0"
            )

    @cached_property
    def num_geometries(self) -> int:
        """How many geometries a rank needs for this outline."""
        return bounds(self.geometry_of.array)[1] + 1 if len(self.fields) else 0


def _are_below(numbers: Column, limit: int) -> bool:
    low, high = bounds(numbers.array)
    return low >= 0 and high < limit


def outline_of(
    whose: str,
    regions: tuple[Region, ...],
    slabs: tuple[Slab, ...],
    shards: tuple[Shard, ...],
    numbers: dict[Geometry, int],
) -> Outline:
    """The outline of these regions, slabs and shards; `numbers` gets the geometries in the order of their numbers.

    Raises LayoutError for a slab or a shard in a region that is not listed.
    """
    names = Names(tuple(region.name for region in regions))
    seen: dict[int, int] = {}
    for shard in shards:
        if shard.region not in names:
            raise LayoutError(f"{whose}, field '{shard.field}': region '{shard.region}' is not listed")
        # Hashing a geometry costs some 15 us, and layers mostly share the object.
        if id(shard.geometry) not in seen:
            seen[id(shard.geometry)] = numbers.setdefault(shard.geometry, len(numbers))
    return Outline(
        names,
        Column.of(region.size_bytes for region in regions),
        Slabs.of(whose, slabs, names),
        Names(tuple(shard.field for shard in shards)),
        Column.of(names.number_of[shard.region] for shard in shards),
        Column.of(shard.offset_bytes for shard in shards),
        Column.of(seen[id(shard.geometry)] for shard in shards),
    )
