"""What does one engine hold, on which rank, in which memory?

An `EngineLayout` is complete: a peer can compute every address from it and from a block table.

    address of a cell = region.address + shard.offset_bytes + page_id * shard.page_stride_bytes + byte of its axis maps
    page_id           = block table of the shard's group [page index of its axis maps]

- `Region`: registered memory of one rank.
- `Group`: fields that share a block table. Groups of one `pool` draw page ids from the same numbers and may overlay the
  same bytes; a page id belongs to one of them at a time.
- `Slab`: the bytes that page p of a pool occupies at one place, padding included.
- `Shard`: one rank's part of one field.

Everything is checked once, here, by `layout_check`. Raises LayoutError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Field
from kvreshard.model.form import Whole
from kvreshard.model.text import ShortText, plain

Int64s = NDArray[np.int64]
MAX_ADDRESS = 2**63
# A layout has thousands of regions, slabs and shards. They refer to nothing that refers to them, so the garbage collector need not
# follow them (`gc=False`).


class Region(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Registered memory: `size_bytes` bytes from `address` on `device` ('cpu', 'cuda:0', ...)."""

    name: ShortText
    address: Whole
    size_bytes: Whole
    device: ShortText = "cpu"

    def __post_init__(self) -> None:
        if self.size_bytes <= 0 or self.address < 0 or self.address + self.size_bytes > MAX_ADDRESS:
            raise LayoutError(
                f"region '{plain(self.name)}': {self.size_bytes} bytes at address {self.address}; "
                "needs a positive size below address 2**63"
            )


class Slab(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Page p of `pool` owns `page_bytes` bytes of `region` from `offset_bytes + p * page_stride_bytes`."""

    pool: ShortText
    region: ShortText
    offset_bytes: Whole
    page_stride_bytes: Whole
    page_bytes: Whole


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


class Geometry(msgspec.Struct, frozen=True, cache_hash=True):
    """How a shard lies in its pages, without where: equal for all layers of a kind on a rank."""

    group: str
    page_stride_bytes: int
    axes: tuple[AxisMap, ...]

    def axis(self, name: str) -> AxisMap:
        return next(axis for axis in self.axes if axis.axis == name)


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one field: cell (0, ..., 0) of page 0 lies at `offset_bytes` of `region`."""

    field: str
    region: str
    offset_bytes: int
    geometry: Geometry


@dataclass(frozen=True)
class Rank:
    """One rank: its number, its place in the engine's grid (for people), its memory, and what it holds of the fields."""

    rank: int
    place: tuple[tuple[str, int], ...]
    regions: tuple[Region, ...]
    slabs: tuple[Slab, ...]
    shards: tuple[Shard, ...]

    @cached_property
    def region_by_name(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.regions}

    @cached_property
    def shard_by_field(self) -> Mapping[str, Shard]:
        return {shard.field: shard for shard in self.shards}

    @cached_property
    def devices(self) -> frozenset[str]:
        """The devices that its regions lie on."""
        return frozenset(region.device for region in self.regions)

    @cached_property
    def addresses(self) -> Int64s:
        """Address of each region, shape (regions,)."""
        return np.array([region.address for region in self.regions], dtype=np.int64)

    @cached_property
    def region_numbers(self) -> Mapping[str, int]:
        """Name of a region -> its place among the rank's regions."""
        return {region.name: number for number, region in enumerate(self.regions)}

    def with_shards(self, shards: tuple[Shard, ...]) -> Rank:
        """The same rank and memory with other shards."""
        return replace(self, shards=shards)

    def base_address(self, shard: Shard) -> int:
        """Address of the shard's first cell in page 0."""
        return self.region_by_name[shard.region].address + shard.offset_bytes


@dataclass(frozen=True)
class EngineLayout:
    """A whole engine. `engine` names it in messages; ranks are ordered by their number."""

    engine: str
    fields: tuple[Field, ...]
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]

    def __post_init__(self) -> None:
        from kvreshard.model.layout_check import check_layout

        check_layout(self)

    @cached_property
    def kind_of(self) -> Mapping[str, int]:
        """Field -> a number that fields of equal axes, element size and encoding share."""
        numbers: dict[object, int] = {}
        return {
            field.name: numbers.setdefault((field.axes, field.element_bytes, field.encoding), len(numbers))
            for field in self.fields
        }

    @cached_property
    def holders(self) -> Mapping[str, Mapping[int, Geometry]]:
        """Field -> rank -> how that rank holds its part of it, for every field that some rank holds a part of, in the order of `fields`."""
        found: dict[str, dict[int, Geometry]] = {field.name: {} for field in self.fields}
        for rank in self.ranks:
            number = rank.rank
            for shard in rank.shards:
                found[shard.field][number] = shard.geometry
        return {field: held for field, held in found.items() if held}

    @cached_property
    def holding_of(self) -> Mapping[str, int]:
        """Field -> a number that fields of equal geometry on every rank share; fields that some rank holds."""
        numbers: dict[object, int] = {}
        return {field: numbers.setdefault(tuple(held.items()), len(numbers)) for field, held in self.holders.items()}

    @cached_property
    def field_by_name(self) -> Mapping[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def group_by_name(self) -> Mapping[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def rank_by_number(self) -> Mapping[int, Rank]:
        return {rank.rank: rank for rank in self.ranks}
