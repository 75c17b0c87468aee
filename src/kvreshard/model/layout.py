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
from dataclasses import dataclass
from functools import cached_property

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Field


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: `size_bytes` bytes from `address` on `device` ('cpu', 'cuda:0', ...)."""

    name: str
    address: int
    size_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size_bytes <= 0 or self.address < 0 or self.address + self.size_bytes > 2**63:
            raise LayoutError(
                f"region '{self.name}': {self.size_bytes} bytes at address {self.address}; "
                "needs a positive size below address 2**63"
            )


@dataclass(frozen=True, slots=True)
class Group:
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


@dataclass(frozen=True, slots=True)
class Slab:
    """Page p of `pool` owns `page_bytes` bytes of `region` from `offset_bytes + p * page_stride_bytes`."""

    pool: str
    region: str
    offset_bytes: int
    page_stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a shard lies in its pages, without where: equal for all layers of a kind on a rank."""

    group: str
    page_stride_bytes: int
    axes: tuple[AxisMap, ...]

    def axis(self, name: str) -> AxisMap:
        return next(axis for axis in self.axes if axis.axis == name)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one field: cell (0, ..., 0) of page 0 lies at `offset_bytes` of `region`."""

    field: str
    region: str
    offset_bytes: int
    geometry: Geometry


@dataclass(frozen=True)
class Rank:
    """One rank: its number, its place in the engine's grid (for people), its memory and its shards."""

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
        _ = self.geometry_numbers  # at birth, once: a peer's layout must not pay for ours

    @cached_property
    def geometry_numbers(self) -> Mapping[int, int]:
        """`id(shard.geometry)` -> a number that equal geometries share, whichever object says them.

        Hashing a geometry costs some 15 us, and a plan asks several times per field and rank.
        """
        numbers: dict[Geometry, int] = {}
        found: dict[int, int] = {}
        for rank in self.ranks:
            for shard in rank.shards:
                if id(shard.geometry) not in found:
                    found[id(shard.geometry)] = numbers.setdefault(shard.geometry, len(numbers))
        return found

    @cached_property
    def shape_numbers(self) -> Mapping[str, int]:
        """Field -> a number that fields of equal axes, element size and encoding share: axes are dear to compare."""
        numbers: dict[object, int] = {}
        return {
            field.name: numbers.setdefault((field.axes, field.element_bytes, field.encoding), len(numbers))
            for field in self.fields
        }

    @cached_property
    def field_by_name(self) -> Mapping[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def group_by_name(self) -> Mapping[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def rank_by_number(self) -> Mapping[int, Rank]:
        return {rank.rank: rank for rank in self.ranks}
