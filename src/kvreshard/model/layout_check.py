"""Checks that an engine's layout is consistent by itself.

1. Names are unique and every reference (field, group, region, pool) resolves.
2. Each shard has exactly its field's axes, holds coordinates inside the extents, and pages as long as its group's.
3. A rank's regions share no byte. Slabs lie inside their regions for every page of their pool; slabs of different pools do
   not touch.
4. Each shard's cells lie inside slabs of its group's pool, no two cells share a byte, neither within a shard nor
   between shards of one group.

Steps 2 and 4 run once per distinct geometry, not per layer, and their work is bounded: a layout may come from anybody.
Raises LayoutError with both values and the remedy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Axis, Field
from kvreshard.model.ownership import Cyclic
from kvreshard.model.page_runs import MAX_RUNS_PER_PAGE, Loops, page_loops, page_runs
from kvreshard.model.rank import MAX_ADDRESS, Geometry, Group, Rank, RankTemplate, ShardPlace
from kvreshard.model.slab_check import check_slabs

Int64s = NDArray[np.int64]
# Over all distinct pages, of which an engine has a few. They take half a second and 64 MiB.
MAX_RUNS_PER_LAYOUT = 1 << 22
# Over all pairs of shards whose extents overlap: looking a pair up (0.27 us), comparing it, sorting its runs. Over all shards in several
# slabs: their runs. All of it takes some 1.2 s.
MAX_PAIR_WORK = 1 << 28
LOOK_COST, SORT_COST, RUN_COST, PLACE_COST = 64, 1024, 4, 8


class Page(NamedTuple):
    """One page of a shard: its byte runs, shape (n, 2), relative to its first cell, and their first and last byte.

    `number`: equal for pages with equal runs and loops. `paging`: group and page stride.
    """

    number: int
    paging: tuple[str, int]
    runs: Int64s
    start: int
    stop: int


def check_layout(
    engine: str, fields: Sequence[Field], groups: Sequence[Group], ranks: Sequence[Rank], kind_of: Mapping[str, int]
) -> None:
    """Raises LayoutError unless the layout is consistent. `kind_of`: field -> a number that fields of equal form share."""
    _unique(f"engine '{engine}': field", [field.name for field in fields])
    _unique(f"engine '{engine}': group", [group.name for group in groups])
    _unique(f"engine '{engine}': rank", [str(rank.rank) for rank in ranks])
    if not ranks:
        raise LayoutError(f"engine '{engine}': has no ranks")
    pages_of_pool: dict[str, int] = {}
    for group in groups:
        if pages_of_pool.setdefault(group.pool, group.num_pages) != group.num_pages:
            raise LayoutError(
                f"group '{group.name}': {group.num_pages} pages, but another group of pool '{group.pool}' has "
                f"{pages_of_pool[group.pool]}; groups of one pool share its pages"
            )
    group_by_name = {group.name: group for group in groups}
    pages, pairs = _Pages(engine, fields, group_by_name, kind_of), _Pairs(engine)
    # Most ranks share one template, which is checked once.
    kinds_of: dict[RankTemplate, _Kinds] = {}
    checked: set[object] = set()
    for rank in ranks:
        kinds = kinds_of.get(rank.template)
        if kinds is None:
            _check_references(groups, kind_of, rank)
            check_slabs(rank, pages_of_pool)
            kinds = kinds_of[rank.template] = _Kinds.of(rank.template, kind_of)
        _check_regions(rank)
        _check_numbers(rank, kinds)
        found = [pages.of(rank, field, rank.geometries[number]) for field, number in kinds.fields]
        placed = rank.template, *((page.number, page.paging) for page in found)
        if placed not in checked:
            _check_places(group_by_name, rank, [found[kind] for kind in kinds.which], pairs)
            checked.add(placed)


class _Kinds(NamedTuple):
    """The shards of a template by kind, which is the shape of the field and the number of the geometry.

    `fields`: a field and the number of each kind, in the order of their first shards; `which`: the kind of each shard.
    """

    fields: list[tuple[str, int]]
    which: list[int]

    @staticmethod
    def of(template: RankTemplate, kind_of: Mapping[str, int]) -> _Kinds:
        numbers: dict[tuple[int, int], int] = {}
        fields, which = [], []
        for shard in template.shards:
            kind = kind_of[shard.field], shard.geometry
            if kind not in numbers:
                numbers[kind] = len(numbers)
                fields.append((shard.field, shard.geometry))
            which.append(numbers[kind])
        return _Kinds(fields, which)


class _Pages:
    """The page of each distinct geometry, checked once (step 2)."""

    def __init__(
        self, engine: str, fields: Sequence[Field], groups: Mapping[str, Group], kind_of: Mapping[str, int]
    ) -> None:
        self._engine, self._groups, self._kind_of, self._num_runs = engine, groups, kind_of, 0
        self._fields = {field.name: field for field in fields}
        self._known: dict[tuple[int, Geometry], Page] = {}
        self._runs: dict[tuple[int, Loops], tuple[int, Int64s]] = {}
        self._spans: dict[tuple[int, int, AxisMap], int | None] = {}

    def of(self, rank: Rank, name: str, geometry: Geometry) -> Page:
        """A page of a field. Raises LayoutError."""
        kind = self._kind_of[name]
        known = self._known.get((kind, geometry))
        if known is None:
            known = self._known[kind, geometry] = self._check(rank, name, geometry, kind)
        return known

    def _check(self, rank: Rank, name: str, geometry: Geometry, kind: int) -> Page:
        field = self._fields[name]
        where = f"rank {rank.rank}, field '{field.name}'"
        group = self._groups.get(geometry.group)
        if group is None:
            raise LayoutError(f"{where}: group '{geometry.group}' is not listed")
        self._check_geometry(where, field, kind, geometry, group)
        shape = page_loops(field.element_bytes, geometry)
        if shape not in self._runs:
            self._num_runs += prod([count for _, count in shape[1]])
            if self._num_runs > MAX_RUNS_PER_LAYOUT:
                raise LayoutError(
                    f"{where}: the pages of engine '{self._engine}' have more than {MAX_RUNS_PER_LAYOUT} separate "
                    "pieces over all its kinds of shards; more are refused"
                )
            self._runs[shape] = len(self._runs), page_runs(where, geometry, *shape)
        number, runs = self._runs[shape]
        return Page(number, (geometry.group, geometry.page_stride_bytes), runs, int(runs[0, 0]), int(runs[-1, 1]))

    def _check_geometry(self, where: str, field: Field, kind: int, geometry: Geometry, group: Group) -> None:
        """Geometries mostly share all of their maps but one, so each map is checked once per kind of field."""
        got, wanted = [axis.axis for axis in geometry.axes], [axis.name for axis in field.axes]
        if got != wanted:
            raise LayoutError(f"{where}: its shard maps axes {got}, the field has {wanted}")
        spanned = None
        for number, mapped in enumerate(geometry.axes):
            key, axis = (kind, number, mapped), field.axes[number]
            if key not in self._spans:
                self._spans[key] = _check_map(where, axis, mapped)
            if axis.extent is None:
                spanned = self._spans[key]
        if spanned != group.tokens_per_page:
            raise LayoutError(
                f"{where}: its pages span {spanned} tokens, but group '{group.name}' says {group.tokens_per_page}"
            )


def _check_places(groups: Mapping[str, Group], rank: Rank, pages: list[Page], pairs: _Pairs) -> None:
    """Step 4 for one rank; `pages` of its shards."""
    by_group: defaultdict[str, list[tuple[ShardPlace, Page]]] = defaultdict(list)
    group_of = [geometry.group for geometry in rank.geometries]
    for shard, page in zip(rank.template.shards, pages, strict=True):
        by_group[group_of[shard.geometry]].append((shard, page))
    by_place: defaultdict[tuple[str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for slab in rank.slabs:
        stop = slab.offset_bytes + slab.page_bytes
        by_place[slab.pool, slab.region, slab.page_stride_bytes].append((slab.offset_bytes, stop))
    for slabs in by_place.values():
        slabs.sort()
    starts_of = {place: [start for start, _ in slabs] for place, slabs in by_place.items()}
    for name, members in by_group.items():
        _check_inside_slabs(rank, groups[name].pool, members, by_place, starts_of, pairs)
        _check_disjoint(rank, members, pairs)


def _unique(what: str, names: list[str]) -> None:
    if len(set(names)) == len(names):
        return
    known = set[str]()
    for name in names:
        if name in known:
            raise LayoutError(f"{what} '{name}' is given twice; names must be unique")
        known.add(name)


def _check_references(groups: Sequence[Group], kind_of: Mapping[str, int], rank: Rank) -> None:
    """Step 1 for one template: names, and where shards begin."""
    template = rank.template
    if len(template.regions) != len(template.region_bytes):
        raise LayoutError(f"rank {rank.rank}: {len(template.region_bytes)} sizes for {len(template.regions)} regions")
    _unique(f"rank {rank.rank}: region", list(template.regions))
    _unique(f"rank {rank.rank}: field", [shard.field for shard in template.shards])
    pools = {group.pool for group in groups}
    sizes = dict(zip(template.regions, template.region_bytes, strict=True))
    for slab in template.slabs:
        if slab.pool not in pools or slab.region not in sizes:
            raise LayoutError(f"rank {rank.rank}: slab of pool '{slab.pool}' in region '{slab.region}': unknown name")
    for shard in template.shards:
        if shard.field not in kind_of:
            raise LayoutError(f"rank {rank.rank}: shard of field '{shard.field}', which the engine does not list")
        size = sizes.get(shard.region)
        if size is None:
            raise LayoutError(f"rank {rank.rank}, field '{shard.field}': region '{shard.region}' is not listed")
        if not 0 <= shard.offset_bytes < size:
            raise LayoutError(
                f"rank {rank.rank}, field '{shard.field}': starts at byte {shard.offset_bytes} of region '{shard.region}', "
                f"which has {size}; check its offset"
            )


def _check_regions(rank: Rank) -> None:
    """Memory that exists, and no byte of it twice, as the transport refuses it when it is registered."""
    sizes = rank.template.region_bytes
    if not len(rank.addresses) == len(rank.devices) == len(sizes):
        raise LayoutError(
            f"rank {rank.rank}: {len(rank.addresses)} addresses on {len(rank.devices)} devices for {len(sizes)} regions; "
            "each region has one of each"
        )
    end, are_in_order = 0, True
    for address, size in zip(rank.addresses, sizes, strict=True):
        if address < 0 or size <= 0 or address + size > MAX_ADDRESS:
            _ = rank.regions  # raises, with the name of the region
        are_in_order = are_in_order and address >= end
        end = address + size
    if are_in_order:
        return
    in_order = sorted(zip(rank.addresses, rank.template.regions, sizes, strict=True))
    for (address, name, size), (following, other, _) in pairwise(in_order):
        if address + size > following:
            raise LayoutError(
                f"rank {rank.rank}: regions '{name}' and '{other}' share bytes at address {following}; "
                "describe memory that fields share as one region"
            )


def _check_numbers(rank: Rank, kinds: _Kinds) -> None:
    for field, number in kinds.fields:
        if not 0 <= number < len(rank.geometries):
            raise LayoutError(
                f"rank {rank.rank}, field '{field}': geometry number {number}, but the rank has {len(rank.geometries)}"
            )


def _check_map(where: str, axis: Axis, mapped: AxisMap) -> int | None:
    """Tokens that a page of the sequence spans, None for another axis. Raises LayoutError where the map does not fit its axis."""
    where = f"{where}, axis '{axis.name}'"
    owned, num_indices = mapped.owned, mapped.indices_per_page
    if axis.extent is not None:
        if isinstance(owned, Cyclic) or mapped.num_held is None:
            raise LayoutError(f"{where}: holds {owned}; needs an interval with an end")
        if owned.stop is not None and owned.stop > axis.extent:
            raise LayoutError(f"{where}: holds {owned}, but its extent is {axis.extent}")
        return None
    if mapped.num_held is not None:
        raise LayoutError(f"{where}: holds {owned}, but a sequence has no end")
    if num_indices > MAX_RUNS_PER_PAGE * owned.run and owned.period > 1:
        raise LayoutError(
            f"{where}: {owned} cuts pages of {num_indices} indices into more than {MAX_RUNS_PER_PAGE} pieces; use a larger interleave"
        )
    tokens, rest = divmod(num_indices * owned.period * axis.tokens_per_index, owned.run)
    if rest:
        raise LayoutError(f"{where}: pages of {num_indices} indices and {owned} do not span a whole number of tokens")
    return tokens


def _check_inside_slabs(
    rank: Rank,
    pool: str,
    members: list[tuple[ShardPlace, Page]],
    by_place: Mapping[tuple[str, str, int], list[tuple[int, int]]],
    starts_of: Mapping[tuple[str, str, int], list[int]],
    pairs: _Pairs,
) -> None:
    """`by_place`, `starts_of`: by pool, region and stride, the first byte and the end of each slab, sorted, and the first bytes alone."""
    for shard, page in members:
        stride, offset = rank.geometries[shard.geometry].page_stride_bytes, shard.offset_bytes
        place = pool, shard.region, stride
        slabs = by_place.get(place, [])
        # Most pages lie in one slab from their first byte to their last, so their runs need not be compared.
        last = bisect_right(starts_of.get(place, []), offset + page.start) - 1
        if last >= 0 and offset + page.stop <= slabs[last][1]:
            continue
        pairs.place(len(page.runs))
        is_beyond = not slabs or offset + page.stop > slabs[-1][1]  # so that no sum below wraps around
        if is_beyond or _is_outside(np.array(slabs, dtype=np.int64), page.runs + offset):
            raise LayoutError(
                f"rank {rank.rank}, field '{shard.field}': bytes [{offset + page.start}, {offset + page.stop}) of page 0 in "
                f"region '{shard.region}' with page stride {stride} lie outside the slabs of "
                f"pool '{pool}'; check its offset, strides and page size"
            )


def _is_outside(slabs: Int64s, runs: Int64s) -> bool:
    """Whether one of the runs is not inside a slab; both have shape (n, 2), start and stop."""
    place = np.searchsorted(slabs[:, 0], runs[:, 0], side="right") - 1
    return bool(((place < 0) | (runs[:, 1] > slabs[np.maximum(place, 0), 1])).any())


class _Pairs:
    """Pairs of shards that were compared, and the work that is left for comparing them and finding their slabs."""

    def __init__(self, engine: str) -> None:
        self._engine, self._left = engine, MAX_PAIR_WORK
        self._compared: set[tuple[object, ...]] = set()

    def is_new(self, key: tuple[object, ...], num_runs: int) -> bool:
        """Whether the pair has not been compared yet. Raises LayoutError when there are too many."""
        is_new = key not in self._compared
        self._spend(SORT_COST + RUN_COST * num_runs if is_new else LOOK_COST, "one another to compare")
        self._compared.add(key)
        return is_new

    def place(self, num_runs: int) -> None:
        """Count `num_runs` runs to find in slabs. Raises LayoutError when there are too many."""
        self._spend(SORT_COST + PLACE_COST * num_runs, "pieces in several slabs to find")

    def _spend(self, cost: int, what: str) -> None:
        self._left -= cost
        if self._left < 0:
            raise LayoutError(
                f"engine '{self._engine}': too many shards lie in {what} them all; give layers pages of their own, or fewer ranks"
            )


def _check_disjoint(rank: Rank, members: list[tuple[ShardPlace, Page]], pairs: _Pairs) -> None:
    placed = sorted(members, key=lambda member: (member[0].region, member[0].offset_bytes))
    for index, (shard, page) in enumerate(placed):
        end = shard.offset_bytes + page.stop
        for place in range(index + 1, len(placed)):
            other, its = placed[place]
            if other.region != shard.region or other.offset_bytes >= end:
                break
            delta = other.offset_bytes - shard.offset_bytes
            if not pairs.is_new((page.number, its.number, delta), len(page.runs) + len(its.runs)):
                continue
            both = np.concatenate([page.runs, its.runs + delta])
            both = both[np.argsort(both[:, 0], kind="stable")]
            if (both[:-1, 1] > both[1:, 0]).any():
                raise LayoutError(
                    f"rank {rank.rank}: fields '{shard.field}' and '{other.field}' of one group share bytes in region "
                    f"'{shard.region}'; each byte of a page belongs to one field"
                )
