"""What one rank holds, and where in its memory.

    address of a cell = region.address + shard.offset_bytes + page_id * geometry.page_stride_bytes + byte of its axis maps
    page_id           = block table of the shard's group [page index of its axis maps]

- `Region`: registered memory of one rank.
- `Group`: fields that share a block table. Groups of one `pool` draw page ids from the same numbers and may overlay the
  same bytes; a page id belongs to one of them at a time.
- `Slab`: the bytes that page p of a pool occupies at one place, padding included.
- `Geometry`: how a shard lies in its pages, without where.
- `Shard`: one rank's part of one field.
- `RankTemplate`: what most ranks of an engine have in common.

Raises LayoutError for sizes that are not positive; `layout_check` checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.form import Number, Whole
from kvreshard.model.text import Name, ShortText, plain

Int64s = NDArray[np.int64]
MAX_ADDRESS = 2**63
# Of regions, slabs and shards on one rank: a model has some hundred layers of a few fields each. The wire form refuses more.
MAX_PER_RANK = 1 << 14
PerRank = msgspec.Meta(max_length=MAX_PER_RANK)
# A layout has thousands of regions, slabs and shards. They refer to nothing that refers to them, so the garbage collector need not
# follow them (`gc=False`). Types with bounds and without unknown fields are decoded as they are (`wire`).


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


class Group(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields that share a block table.

    `tokens_per_page`: tokens that one page of the table spans over all ranks, None for states. `null_page`: a page id
    that stands for "no page". `window_tokens`: tokens that the group keeps, None for all.
    """

    name: Name
    pool: Name
    num_pages: Whole
    tokens_per_page: Whole | None
    null_page: Whole | None = None
    window_tokens: Whole | None = None

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


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one field: cell (0, ..., 0) of page 0 lies at `offset_bytes` of `region`."""

    field: str
    region: str
    offset_bytes: int
    geometry: Geometry


class ShardPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A shard as a template has it: `geometry` is a number among the geometries of the rank."""

    field: ShortText
    region: ShortText
    offset_bytes: Whole
    geometry: Number


class RankTemplate(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """What the ranks of one tensor-parallel group share: how their memory is divided, but not where it lies, nor what they hold of each axis.

    `region_bytes`: the size of each region.
    """

    regions: Annotated[tuple[ShortText, ...], PerRank]
    region_bytes: Annotated[tuple[Whole, ...], PerRank]
    slabs: Annotated[tuple[Slab, ...], PerRank]
    shards: Annotated[tuple[ShardPlace, ...], PerRank]


@dataclass(frozen=True)
class Rank:
    """One rank: its number, its place in the engine's grid (for people), and what it adds to its template.

    `addresses`, `devices`: of each region of the template. `geometries`: those that the template's shards refer to. Regions and shards are
    made at first use: an engine meets hundreds of ranks and reads from a few.
    """

    rank: int
    place: tuple[tuple[str, int], ...]
    template: RankTemplate
    addresses: tuple[int, ...]
    devices: tuple[str, ...]
    geometries: tuple[Geometry, ...]

    @staticmethod
    def of(
        rank: int,
        place: tuple[tuple[str, int], ...],
        regions: Sequence[Region],
        slabs: Sequence[Slab],
        shards: Sequence[Shard],
    ) -> Rank:
        """The rank of these regions, slabs and shards."""
        numbers: dict[Geometry, int] = {}
        template = RankTemplate(
            tuple(region.name for region in regions),
            tuple(region.size_bytes for region in regions),
            tuple(slabs),
            tuple(
                ShardPlace(s.field, s.region, s.offset_bytes, numbers.setdefault(s.geometry, len(numbers)))
                for s in shards
            ),
        )
        addresses, devices = [region.address for region in regions], [region.device for region in regions]
        return Rank(rank, place, template, tuple(addresses), tuple(devices), tuple(numbers))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        template = self.template
        return tuple(map(Region, template.regions, self.addresses, template.region_bytes, self.devices))

    @property
    def slabs(self) -> tuple[Slab, ...]:
        return self.template.slabs

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(
            [Shard(p.field, p.region, p.offset_bytes, self.geometries[p.geometry]) for p in self.template.shards]
        )

    @cached_property
    def region_by_name(self) -> Mapping[str, Region]:
        return {region.name: region for region in self.regions}

    @cached_property
    def shard_by_field(self) -> Mapping[str, Shard]:
        return {shard.field: shard for shard in self.shards}

    def with_shards(self, shards: Sequence[Shard]) -> Rank:
        """The same rank and memory with other shards."""
        return Rank.of(self.rank, self.place, self.regions, self.slabs, shards)

    @cached_property
    def shard_number(self) -> Mapping[str, int]:
        """Field -> which of the template's shards is the rank's part of it."""
        return {shard.field: number for number, shard in enumerate(self.template.shards)}

    @cached_property
    def shard_regions(self) -> Int64s:
        """The number of the region in which each of the template's shards lies, shape (num_shards,)."""
        numbers = {name: number for number, name in enumerate(self.template.regions)}
        return np.array([numbers[shard.region] for shard in self.template.shards], dtype=np.int64)

    @cached_property
    def region_starts(self) -> Int64s:
        """First address of each region, shape (num_regions,)."""
        return np.array(self.addresses, dtype=np.int64)

    @cached_property
    def region_sizes(self) -> Int64s:
        """Bytes of each region, shape (num_regions,)."""
        return np.array(self.template.region_bytes, dtype=np.int64)

    @cached_property
    def shard_addresses(self) -> Int64s:
        """Address of the first cell in page 0 of each of the template's shards, shape (num_shards,)."""
        offsets = np.array([shard.offset_bytes for shard in self.template.shards], dtype=np.int64)
        return self.region_starts[self.shard_regions] + offsets

    def base_address(self, shard: Shard) -> int:
        """Address of the shard's first cell in page 0."""
        return self.region_by_name[shard.region].address + shard.offset_bytes
