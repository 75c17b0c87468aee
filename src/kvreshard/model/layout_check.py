"""Does an engine's layout hold together by itself?

1. Names are unique and every reference (field, group, region, pool) resolves.
2. Each shard has exactly its field's axes, holds coordinates inside the extents, and pages as long as its group's.
3. A rank's regions share no byte. Slabs lie inside their regions for every page of their pool; slabs of different pools do
   not touch.
4. Each shard's cells lie inside slabs of its group's pool, no two cells share a byte, neither within a shard nor
   between shards of one group.

Steps 2 and 4 are done once per distinct geometry, not per layer, and their work is bounded: a layout may come from anybody.
Raises LayoutError with both values and the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Axis, Field
from kvreshard.model.fields import Fields
from kvreshard.model.loops import are_within, row_kinds
from kvreshard.model.outline import Outline
from kvreshard.model.ownership import Cyclic
from kvreshard.model.page_runs import MAX_RUNS_PER_PAGE, page_loops, page_runs
from kvreshard.model.plain_places import PlainSlabs

if TYPE_CHECKING:
    from kvreshard.model.layout import EngineLayout, Geometry, Group, Rank, Shard
    from kvreshard.model.outline import Slab

Int64s = NDArray[np.int64]
# Over all distinct geometries. 512 ranks of a hundred kinds of layer have some millions; these take seconds.
MAX_RUNS_PER_LAYOUT = 1 << 24
# Over all pairs of shards that lie in one another: looking at a pair, sorting its runs. Over all shards in several slabs: their runs.
MAX_PAIR_WORK = 1 << 28
LOOK_COST, SORT_COST, RUN_COST, PLACE_COST = 16, 1024, 4, 8
# So many runs of shards are looked at together, which takes some 50 MB.
RUNS_AT_ONCE = 1 << 20


def check_layout(layout: EngineLayout) -> None:
    """Raises LayoutError unless the layout holds together."""
    if not layout.fields.names.are_unique:
        _unique(f"engine '{layout.engine}': field", layout.fields.names)
    _unique(f"engine '{layout.engine}': group", (group.name for group in layout.groups))
    _unique(f"engine '{layout.engine}': rank", (str(rank.rank) for rank in layout.ranks))
    if not layout.ranks:
        raise LayoutError(f"engine '{layout.engine}': has no ranks")
    pages_of_pool: dict[str, int] = {}
    for group in layout.groups:
        if pages_of_pool.setdefault(group.pool, group.num_pages) != group.num_pages:
            raise LayoutError(
                f"group '{group.name}': {group.num_pages} pages, but another group of pool '{group.pool}' has "
                f"{pages_of_pool[group.pool]}; groups of one pool share its pages"
            )
    pages = _Pages(layout)
    pairs = _Pairs(layout.engine)
    kinds_of: dict[int, _Kinds] = {}
    placed: set[tuple[int, ...]] = set()
    for rank in layout.ranks:
        # Most ranks differ only in what they hold of an axis and where their memory lies: what an outline says is looked at once.
        outline = rank.outline
        kinds = kinds_of.get(id(outline))
        if kinds is None:
            _check_rank_names(layout, rank)
            slabs = PlainSlabs.of(outline, pages_of_pool)
            if slabs is None:
                _check_slabs(rank, pages_of_pool)
            kinds = kinds_of[id(outline)] = _Kinds.of(outline, layout.fields, slabs)
        _check_regions_apart(rank)
        geometries = [rank.geometries[number] for number, _ in kinds.fields]
        runs = [pages.runs(rank, field, one) for (_, field), one in zip(kinds.fields, geometries, strict=True)]
        form = (id(outline), *map(id, runs), *(pages.form(geometry) for geometry in rank.geometries))
        if form not in placed:
            placed.add(form)
            pools = [layout.group_by_name[geometry.group].pool for geometry in geometries]
            strides = [geometry.page_stride_bytes for geometry in geometries]
            if kinds.slabs is None or not kinds.slabs.hold(outline, kinds.which, runs, strides, pools):
                members = [(shard, runs[kind]) for shard, kind in zip(rank.shards, kinds.which.tolist(), strict=True)]
                _check_places(layout, rank, members, pairs)


class _Kinds(msgspec.Struct, frozen=True, eq=False):
    """The shards of an outline by geometry and shape: the number of each kind's geometry and one of its fields, the kind of each shard,
    shape (shards,), and its slabs where they are plain.
    """

    fields: list[tuple[int, str]]
    which: Int64s
    slabs: PlainSlabs | None

    @staticmethod
    def of(outline: Outline, fields: Fields, slabs: PlainSlabs | None) -> _Kinds:
        """In the order of their first shards."""
        which, firsts = row_kinds((outline.geometry_of.array, fields.kinds_of(outline.fields.all)))
        return _Kinds([(outline.geometry_of[first], outline.fields[first]) for first in firsts], which, slabs)


class _Pages:
    """The pages of each distinct geometry, checked once (step 2), and the bytes that they have."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout, self._num_runs = layout, 0
        self._checked: dict[tuple[int, int], Int64s] = {}
        self._of_loops: dict[object, Int64s] = {}
        self._of_bytes: dict[bytes, Int64s] = {}
        self._spans: dict[tuple[int, int, int], int | None] = {}
        self._forms: dict[tuple[str, int], int] = {}

    def form(self, geometry: Geometry) -> int:
        """A number that geometries of one group and page stride share."""
        return self._forms.setdefault((geometry.group, geometry.page_stride_bytes), len(self._forms))

    def runs(self, rank: Rank, name: str, geometry: Geometry) -> Int64s:
        """`page_runs` of a field; those with equal runs share one array. Raises LayoutError."""
        layout = self._layout
        kind = layout.fields.kind_of(name), layout.geometry_numbers[id(geometry)]
        known = self._checked.get(kind)
        if known is not None:
            return known
        field = layout.fields.like(name)
        where = f"rank {rank.rank}, field '{name}'"
        group = layout.group_by_name.get(geometry.group)
        if group is None:
            raise LayoutError(f"{where}: group '{geometry.group}' is not listed")
        self._check_geometry(where, field, kind[0], geometry, group)
        run_bytes, loops = page_loops(field.element_bytes, geometry)
        self._num_runs += prod([count for _, count in loops])
        if self._num_runs > MAX_RUNS_PER_LAYOUT:
            raise LayoutError(
                f"{where}: the pages of engine '{layout.engine}' have more than {MAX_RUNS_PER_LAYOUT} separate "
                "pieces over all its kinds of shards; more are refused"
            )
        key = run_bytes, loops
        if key not in self._of_loops:
            runs = page_runs(where, geometry, run_bytes, loops)
            self._of_loops[key] = self._of_bytes.setdefault(runs.tobytes(), runs)
        runs = self._of_loops[key]
        self._checked[kind] = runs
        return runs

    def _check_geometry(self, where: str, field: Field, kind: int, geometry: Geometry, group: Group) -> None:
        """Geometries mostly share all of their maps but one, and each map is looked at once per kind of field."""
        got, wanted = [axis.axis for axis in geometry.axes], [axis.name for axis in field.axes]
        if got != wanted:
            raise LayoutError(f"{where}: its shard maps axes {got}, the field has {wanted}")
        spanned = None
        for number, mapped in enumerate(geometry.axes):
            key, axis = (kind, number, id(mapped)), field.axes[number]
            if key not in self._spans:
                self._spans[key] = _check_map(where, axis, mapped)
            if axis.extent is None:
                spanned = self._spans[key]
        if spanned != group.tokens_per_page:
            raise LayoutError(
                f"{where}: its pages span {spanned} tokens, but group '{group.name}' says {group.tokens_per_page}"
            )


def _check_places(layout: EngineLayout, rank: Rank, shards: list[tuple[Shard, Int64s]], pairs: _Pairs) -> None:
    """Step 4 for one rank."""
    by_group: defaultdict[str, list[tuple[Shard, Int64s]]] = defaultdict(list)
    for shard, runs in shards:
        by_group[shard.geometry.group].append((shard, runs))
    for name, members in by_group.items():
        _check_inside_slabs(rank, layout.group_by_name[name].pool, members, pairs)
        _check_disjoint(rank, members, pairs)


def _unique(what: str, names: Iterable[str]) -> None:
    names, seen = list(names), set[str]()
    if len(set(names)) == len(names):
        return
    for name in names:
        if name in seen:
            raise LayoutError(f"{what} '{name}' is given twice; names must be unique")
        seen.add(name)


def _check_rank_names(layout: EngineLayout, rank: Rank) -> None:
    outline, names = rank.outline, layout.fields.names
    for what, listed in (("region", outline.region_names), ("field", outline.fields)):
        if not listed.are_unique:
            _unique(f"rank {rank.rank}: {what}", listed)
    pools = {group.pool for group in layout.groups}
    if not pools.issuperset(outline.slabs.pools):
        slab = next(slab for slab in rank.slabs if slab.pool not in pools)
        raise LayoutError(f"rank {rank.rank}: slab of pool '{slab.pool}' in region '{slab.region}': unknown name")
    places = outline.offsets_bytes.array, outline.region_of.array, outline.region_bytes.array
    if are_within(*places) and names.have_all(outline.fields.all):
        return
    for field, offset, region in zip(outline.fields, outline.offsets_bytes, outline.region_of, strict=True):
        if field not in names:
            raise LayoutError(f"rank {rank.rank}: shard of field '{field}', which the engine does not list")
        if not 0 <= offset < outline.region_bytes[region]:
            raise LayoutError(
                f"rank {rank.rank}, field '{field}': starts at byte {offset} of region '{outline.region_names[region]}', "
                f"which has {outline.region_bytes[region]}; check its offset"
            )


def _check_regions_apart(rank: Rank) -> None:
    """As the transport refuses them when they are registered, devices or not: an address says which memory it is.

    Addresses are a rank's own, so every rank is looked at: mostly its regions follow one another.
    """
    *_, are_in_order = rank.extent
    if are_in_order:
        return
    in_order = sorted(rank.regions, key=lambda region: (region.address, region.name))
    for before, after in pairwise(in_order):
        if before.address + before.size_bytes > after.address:
            raise LayoutError(
                f"rank {rank.rank}: regions '{before.name}' and '{after.name}' share bytes at address {after.address}; "
                "describe memory that fields share as one region"
            )


def _check_slabs(rank: Rank, pages_of_pool: dict[str, int]) -> None:
    by_region: defaultdict[str, list[Slab]] = defaultdict(list)
    for slab in rank.slabs:
        if slab.offset_bytes < 0 or slab.page_bytes <= 0 or slab.page_stride_bytes < slab.page_bytes:
            raise LayoutError(
                f"rank {rank.rank}: slab in region '{slab.region}' has pages of {slab.page_bytes} bytes every "
                f"{slab.page_stride_bytes} from {slab.offset_bytes}; pages would overlap or lie below the region"
            )
        end = slab.offset_bytes + (pages_of_pool[slab.pool] - 1) * slab.page_stride_bytes + slab.page_bytes
        size = rank.region_by_name[slab.region].size_bytes
        if end > size:
            raise LayoutError(
                f"rank {rank.rank}: region '{slab.region}' has {size} bytes, but {pages_of_pool[slab.pool]} pages of "
                f"{slab.page_stride_bytes} bytes end at {end}; register a larger region or fewer pages"
            )
        by_region[slab.region].append(slab)
    for region, slabs in by_region.items():
        _check_slabs_apart(rank, region, slabs, pages_of_pool)


def _check_slabs_apart(rank: Rank, region: str, slabs: list[Slab], pages_of_pool: dict[str, int]) -> None:
    """Slabs of one stride interleave (their phases must not meet); of different strides they must lie one after another."""
    by_stride: defaultdict[int, list[Slab]] = defaultdict(list)
    for slab in slabs:
        by_stride[slab.page_stride_bytes].append(slab)
    extents = []
    for stride, members in by_stride.items():
        members.sort(key=lambda slab: slab.offset_bytes)
        ends = [s.offset_bytes + (pages_of_pool[s.pool] - 1) * stride + s.page_bytes for s in members]
        if len(by_stride) == 1 and all(end <= slab.offset_bytes for end, slab in zip(ends, members[1:], strict=False)):
            return
        cluster: list[Slab] = []
        cluster_end = 0
        for slab, end in zip(members, ends, strict=True):
            if cluster and slab.offset_bytes < cluster_end:
                cluster.append(slab)
                cluster_end = max(cluster_end, end)
            else:
                if cluster:
                    _check_phases(rank, region, stride, cluster)
                    extents.append((cluster[0].offset_bytes, cluster_end))
                cluster, cluster_end = [slab], end
        _check_phases(rank, region, stride, cluster)
        extents.append((cluster[0].offset_bytes, cluster_end))
    extents.sort()
    for (_, end), (start, _) in pairwise(extents):
        if start < end:
            raise LayoutError(
                f"rank {rank.rank}, region '{region}': slabs of different page strides overlap at byte {start}; "
                "overlaid groups must share one pool and one stride"
            )


def _check_phases(rank: Rank, region: str, stride: int, cluster: list[Slab]) -> None:
    spans = sorted((slab.offset_bytes % stride, slab.page_bytes) for slab in cluster)
    wrapped = [*spans, (spans[0][0] + stride, spans[0][1])]
    for (start, size), (following, _) in pairwise(wrapped):
        if len(cluster) > 1 and start + size > following:
            raise LayoutError(
                f"rank {rank.rank}, region '{region}': two slabs of page stride {stride} share bytes at {following}; "
                "each byte of a page belongs to one slab"
            )


def _check_map(where: str, axis: Axis, mapped: AxisMap) -> int | None:
    """Whether a map fits its axis; tokens that a page of it spans, None where it has an end."""
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


def _check_inside_slabs(rank: Rank, pool: str, members: list[tuple[Shard, Int64s]], pairs: _Pairs) -> None:
    slabs = [slab for slab in rank.slabs if slab.pool == pool]
    by_place: defaultdict[tuple[str, int], list[Slab]] = defaultdict(list)
    for slab in slabs:
        by_place[slab.region, slab.page_stride_bytes].append(slab)
    sorted_places = {
        place: np.array(sorted((s.offset_bytes, s.offset_bytes + s.page_bytes) for s in found), dtype=np.int64)
        for place, found in by_place.items()
    }
    alike: defaultdict[tuple[int, str, int], list[tuple[Shard, Int64s]]] = defaultdict(list)
    for shard, runs in members:
        alike[id(runs), shard.region, shard.geometry.page_stride_bytes].append((shard, runs))
    for (_, region, stride), found in alike.items():
        runs = found[0][1]
        offsets = np.array([shard.offset_bytes for shard, _ in found], dtype=np.int64)[:, None]
        places = sorted_places.get((region, stride))
        # A page that lies in one slab from its first byte to its last needs no look at what is between.
        outside = np.flatnonzero(_outside(places, offsets + runs[0, 0], offsets + runs[-1, 1]))
        pairs.place(len(outside) * len(runs))
        each = max(1, RUNS_AT_ONCE // len(runs))
        parts = [outside[first : first + each] for first in range(0, len(outside), each)]
        outside = np.concatenate(
            [p[_outside(places, offsets[p] + runs[:, 0], offsets[p] + runs[:, 1])] for p in parts] or [outside]
        )
        if len(outside):
            shard = found[int(outside[0])][0]
            low, high = shard.offset_bytes + int(runs[:, 0].min()), shard.offset_bytes + int(runs[:, 1].max())
            raise LayoutError(
                f"rank {rank.rank}, field '{shard.field}': bytes [{low}, {high}) of page 0 in "
                f"region '{region}' with page stride {stride} lie outside the slabs of "
                f"pool '{pool}'; check its offset, strides and page size"
            )


def _outside(slabs: Int64s | None, starts: Int64s, stops: Int64s) -> NDArray[np.bool_]:
    """Per shard (row of `starts` and `stops`, shape (n, runs)): whether one of its runs lies in no slab, whole."""
    if slabs is None:
        return np.ones(len(starts), dtype=bool)
    place = np.searchsorted(slabs[:, 0], starts.reshape(-1), side="right").reshape(starts.shape) - 1
    outside: NDArray[np.bool_] = ((place < 0) | (stops > slabs[np.maximum(place, 0), 1])).any(axis=1)
    return outside


class _Pairs:
    """Pairs of shards that were compared, and what that and finding their slabs cost so far."""

    def __init__(self, engine: str) -> None:
        self._engine, self._left = engine, MAX_PAIR_WORK
        self._seen: set[tuple[object, ...]] = set()

    def is_new(self, key: tuple[object, ...], num_runs: int) -> bool:
        """Whether the pair still has to be compared. Raises LayoutError when there are too many."""
        is_new = key not in self._seen
        self._spend(SORT_COST + RUN_COST * num_runs if is_new else LOOK_COST, "one another to compare")
        self._seen.add(key)
        return is_new

    def place(self, num_runs: int) -> None:
        """So many runs are to be found in slabs. Raises LayoutError when there are too many."""
        self._spend(PLACE_COST * num_runs, "pieces in several slabs to find")

    def _spend(self, cost: int, what: str) -> None:
        self._left -= cost
        if self._left < 0:
            raise LayoutError(
                f"engine '{self._engine}': too many shards lie in {what} them all; give layers pages of their own, or fewer ranks"
            )


def _check_disjoint(rank: Rank, members: list[tuple[Shard, Int64s]], pairs: _Pairs) -> None:
    placed = sorted(members, key=lambda member: (member[0].region, member[0].offset_bytes))
    for index, (shard, runs) in enumerate(placed):
        end = shard.offset_bytes + int(runs[-1, 1])
        for other, other_runs in placed[index + 1 :]:
            if other.region != shard.region or other.offset_bytes >= end:
                break
            delta = other.offset_bytes - shard.offset_bytes
            if not pairs.is_new((id(runs), id(other_runs), delta), len(runs) + len(other_runs)):
                continue
            starts = np.concatenate([runs[:, 0], other_runs[:, 0] + delta])
            stops = np.concatenate([runs[:, 1], other_runs[:, 1] + delta])
            order = np.argsort(starts, kind="stable")
            if (stops[order][:-1] > starts[order][1:]).any():
                raise LayoutError(
                    f"rank {rank.rank}: fields '{shard.field}' and '{other.field}' of one group share bytes in region "
                    f"'{shard.region}'; each byte of a page belongs to one field"
                )
