"""What does one engine hold, on which rank, in which memory?

An `EngineLayout` is complete: a peer can compute every address from it and from a block table.

    address of a cell = region.address + shard.offset_bytes + page_id * shard.page_stride_bytes + byte of its axis maps
    page_id           = block table of the shard's group [page index of its axis maps]

- `Region`: registered memory of one rank.
- `Group`: fields that share a block table. Groups of one `pool` draw page ids from the same numbers and may overlay the
  same bytes; a page id belongs to one of them at a time.
- `Slab`: the bytes that page p of a pool occupies at one place, padding included.
- `Shard`: one rank's part of one field.
- `Outline`: how a rank's memory is divided among its shards. Ranks that differ only in addresses, and in what they hold of an axis,
  share one (`model.outline`), so that what is done for each shard is done once for all of them.

Everything is checked once, here, by `layout_check`. Raises LayoutError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from kvreshard.model.address import AxisMap
from kvreshard.model.column import Column
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Field
from kvreshard.model.fields import Fields
from kvreshard.model.loops import extent_of
from kvreshard.model.outline import Int64s, Outline, Slab, outline_of

MAX_ADDRESS = 2**63


class Region(msgspec.Struct, frozen=True):
    """Registered memory: `size_bytes` bytes from `address` on `device` ('cpu', 'cuda:0', ...)."""

    name: str
    address: int
    size_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size_bytes <= 0 or self.address < 0 or self.address + self.size_bytes > MAX_ADDRESS:
            raise LayoutError(
                f"region '{self.name}': {self.size_bytes} bytes at address {self.address}; "
                "needs a positive size below address 2**63"
            )


class Group(msgspec.Struct, frozen=True):
    """Fields that share a block table.

    `tokens_per_page`: tokens that one page of the table spans over all ranks, None for states. `null_page`: a page id
    that stands for "no page". `window_tokens`: tokens that the group keeps, None for all.
    """

    name: str
    pool: str
    num_pages: int
    tokens_per_page: int | None
    null_page: int | None = None
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for label, size in (
            ("pages", self.num_pages),
            ("tokens per page", self.tokens_per_page),
            ("window tokens", self.window_tokens),
        ):
            if size is not None and size <= 0:
                raise LayoutError(f"group '{self.name}': {size} {label}; a size must be positive")
        if self.null_page is not None and not 0 <= self.null_page < self.num_pages:
            raise LayoutError(
                f"group '{self.name}': null page {self.null_page} is not one of its pages [0, {self.num_pages}); leave it out, or name one "
                "of them"
            )


class Geometry(msgspec.Struct, frozen=True):
    """How a shard lies in its pages, without where: equal for all layers of a kind on a rank."""

    group: str
    page_stride_bytes: int
    axes: tuple[AxisMap, ...]

    def axis(self, name: str) -> AxisMap:
        return next(axis for axis in self.axes if axis.axis == name)


class Shard(msgspec.Struct, frozen=True):
    """One rank's part of one field: cell (0, ..., 0) of page 0 lies at `offset_bytes` of `region`."""

    field: str
    region: str
    offset_bytes: int
    geometry: Geometry


@dataclass(frozen=True)
class Rank:
    """One rank: its number, its place in the engine's grid (for people), and what it adds to its outline.

    `addresses` and `devices`: per region of the outline. `geometries`: those that the outline's shards refer to.
    """

    rank: int
    place: tuple[tuple[str, int], ...]
    outline: Outline
    addresses: Column
    devices: tuple[str, ...]
    geometries: tuple[Geometry, ...]

    @staticmethod
    def of(
        rank: int,
        place: tuple[tuple[str, int], ...],
        regions: tuple[Region, ...],
        slabs: tuple[Slab, ...],
        shards: tuple[Shard, ...],
    ) -> Rank:
        """The rank of these regions, slabs and shards. Raises LayoutError for a shard in a region that is not listed."""
        numbers: dict[Geometry, int] = {}
        outline = outline_of(f"rank {rank}", regions, slabs, shards, numbers)
        return Rank(
            rank,
            place,
            outline,
            Column.of(region.address for region in regions),
            tuple(region.device for region in regions),
            tuple(numbers),
        )

    def __post_init__(self) -> None:
        outline = self.outline
        if not len(self.addresses) == len(self.devices) == len(outline.region_names):
            raise LayoutError(
                f"rank {self.rank}: {len(self.addresses)} addresses on {len(self.devices)} devices for "
                f"{len(outline.region_names)} regions; each region has one of each"
            )
        if outline.num_geometries > len(self.geometries):
            raise LayoutError(
                f"rank {self.rank}: {len(self.geometries)} geometries, but a shard has number {outline.num_geometries - 1}"
            )
        low, least_bytes, end, _ = self.extent
        if low < 0 or least_bytes <= 0 or end > MAX_ADDRESS:
            _ = self.regions  # says of which one

    @cached_property
    def extent(self) -> tuple[int, int, int, bool]:
        """Of the regions: the least address, the least size in bytes, where the last one ends, and whether each begins where the one
        before ends, or after.
        """
        if not len(self.addresses):
            return 0, 1, 0, True
        return extent_of(self.addresses.array, self.outline.region_bytes.array)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        outline = self.outline
        return tuple(map(Region, outline.region_names, self.addresses, outline.region_bytes, self.devices))

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        return tuple(self.outline.slabs.listed(self.outline.region_names))

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        outline = self.outline
        return tuple(
            Shard(field, outline.region_names[region], offset, self.geometries[geometry])
            for field, region, offset, geometry in zip(
                outline.fields, outline.region_of, outline.offsets_bytes, outline.geometry_of, strict=True
            )
        )

    @cached_property
    def region_by_name(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.regions}

    @cached_property
    def shard_by_field(self) -> Mapping[str, Shard]:
        return {shard.field: shard for shard in self.shards}

    @cached_property
    def bases(self) -> Int64s:
        """Address of each shard's first cell in page 0, shape (shards,), in the outline's order."""
        return self.addresses.array[self.outline.region_of.array] + self.outline.offsets_bytes.array

    def with_shards(self, shards: tuple[Shard, ...]) -> Rank:
        """The same rank and memory with other shards. Raises LayoutError as `of` does."""
        return Rank.of(self.rank, self.place, self.regions, self.slabs, shards)

    def base_address(self, shard: Shard) -> int:
        """Address of the shard's first cell in page 0."""
        return self.region_by_name[shard.region].address + shard.offset_bytes


def share_outlines(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """The same ranks; those with equal outlines share one object, so that what is kept for it is kept once."""
    known: dict[Outline, Outline] = {}
    return tuple(replace(rank, outline=known.setdefault(rank.outline, rank.outline)) for rank in ranks)


@dataclass(frozen=True)
class EngineLayout:
    """A whole engine. `engine` names it in messages; ranks are ordered by their number."""

    engine: str
    fields: Fields
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]

    def __post_init__(self) -> None:
        from kvreshard.model.layout_check import check_layout

        check_layout(self)

    @cached_property
    def geometry_numbers(self) -> Mapping[int, int]:
        """`id(shard.geometry)` -> a number that equal geometries share, whichever object says them.

        Hashing a geometry costs some 15 us, and a plan asks several times per field and rank.
        """
        numbers: dict[Geometry, int] = {}
        found: dict[int, int] = {}
        for rank in self.ranks:
            for geometry in rank.geometries:
                if id(geometry) not in found:
                    found[id(geometry)] = numbers.setdefault(geometry, len(numbers))
        return found

    @cached_property
    def outlines(self) -> tuple[Outline, ...]:
        """The distinct outlines of the ranks, as objects."""
        return tuple({id(rank.outline): rank.outline for rank in self.ranks}.values())

    @cached_property
    def holding_of(self) -> Mapping[str, int]:
        """Field -> a number that fields of equal geometry on every rank share, for every field that some rank holds a part of, in the order of
        `fields`.
        """
        places: dict[str, list[tuple[int, int]]] = {name: [] for name in self.fields.names}
        for rank in self.ranks:
            for field, geometry in zip(rank.outline.fields, rank.outline.geometry_of, strict=True):
                places[field].append((rank.rank, geometry))
        numbers: dict[object, int] = {}
        return {field: numbers.setdefault(tuple(found), len(numbers)) for field, found in places.items() if found}

    def holders(self, field: str) -> Mapping[int, Geometry]:
        """Rank -> how it holds its part of a field, for every rank that does."""
        found = ((rank, rank.outline.fields.number_of.get(field)) for rank in self.ranks)
        return {
            rank.rank: rank.geometries[rank.outline.geometry_of[number]] for rank, number in found if number is not None
        }

    @cached_property
    def field_by_name(self) -> Mapping[str, Field]:
        """All of them, made at once; `fields.called` makes one."""
        return {field.name: field for field in self.fields}

    @cached_property
    def group_by_name(self) -> Mapping[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def rank_by_number(self) -> Mapping[int, Rank]:
        return {rank.rank: rank for rank in self.ranks}
