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

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Axis, Field
from kvreshard.model.ownership import Cyclic
from kvreshard.model.page_runs import MAX_RUNS_PER_PAGE, page_loops, page_runs

if TYPE_CHECKING:
    from kvreshard.model.layout import EngineLayout, Geometry, Group, Rank, Shard, Slab

Int64s = NDArray[np.int64]
# Over all distinct geometries. 512 ranks of a hundred kinds of layer have some millions; these take seconds.
MAX_RUNS_PER_LAYOUT = 1 << 24
# Over all pairs of shards that lie in one another: looking at a pair, sorting its runs. Over all shards in several slabs: their runs.
MAX_PAIR_WORK = 1 << 28
LOOK_COST, SORT_COST, RUN_COST, PLACE_COST = 16, 1024, 4, 8


class Page(NamedTuple):
    """One page of a shard: its byte runs, shape (n, 2), relative to its first cell, and from where to where they reach.

    `number`: equal for equal runs. `form`: equal where group and page stride are equal too.
    """

    number: int
    form: int
    runs: Int64s
    start: int
    stop: int


def check_layout(layout: EngineLayout) -> None:
    """Raises LayoutError unless the layout holds together."""
    _unique(f"engine '{layout.engine}': field", [field.name for field in layout.fields])
    _unique(f"engine '{layout.engine}': group", [group.name for group in layout.groups])
    _unique(f"engine '{layout.engine}': rank", [str(rank.rank) for rank in layout.ranks])
    if not layout.ranks:
        raise LayoutError(f"engine '{layout.engine}': has no ranks")
    pages_of_pool: dict[str, int] = {}
    for group in layout.groups:
        if pages_of_pool.setdefault(group.pool, group.num_pages) != group.num_pages:
            raise LayoutError(
                f"group '{group.name}': {group.num_pages} pages, but another group of pool '{group.pool}' has "
                f"{pages_of_pool[group.pool]}; groups of one pool share its pages"
            )
    pages, kind_of = _Pages(layout), layout.kind_of
    known = pages.known
    pairs = _Pairs(layout.engine)
    # Most ranks differ only in their addresses and in what they hold of an axis: what they have in common is looked at once.
    checked: set[object] = set()
    for rank in layout.ranks:
        places = tuple([(shard.field, shard.region, shard.offset_bytes) for shard in rank.shards])
        memory = tuple([(region.name, region.size_bytes) for region in rank.regions]), rank.slabs
        common = places, memory
        if common not in checked:
            _check_references(layout, rank)
            _check_slabs(rank, pages_of_pool)
            checked.add(common)
        _check_regions_apart(rank)
        found = [known.get((kind_of[s.field], s.geometry)) or pages.check(rank, s) for s in rank.shards]
        placed = common, tuple([page.form for page in found])
        if placed not in checked:
            _check_places(layout, rank, found, pairs)
            checked.add(placed)


class _Pages:
    """The pages of each distinct geometry, checked once (step 2), and the bytes that they have."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout, self._num_runs = layout, 0
        self.known: dict[tuple[int, Geometry], Page] = {}
        """By the kind of the field, and the geometry."""
        self._of_loops: dict[object, tuple[int, Int64s]] = {}
        self._numbers: dict[bytes, int] = {}
        self._spans: dict[tuple[int, int, AxisMap], int | None] = {}
        self._forms: dict[object, int] = {}

    def check(self, rank: Rank, shard: Shard) -> Page:
        """The page of a shard, which is `known` from then on. Raises LayoutError."""
        layout, geometry = self._layout, shard.geometry
        kind = layout.kind_of[shard.field]
        field = layout.field_by_name[shard.field]
        where = f"rank {rank.rank}, field '{field.name}'"
        group = layout.group_by_name.get(geometry.group)
        if group is None:
            raise LayoutError(f"{where}: group '{geometry.group}' is not listed")
        self._check_geometry(where, field, kind, geometry, group)
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
            self._of_loops[key] = self._numbers.setdefault(runs.tobytes(), len(self._numbers)), runs
        number, runs = self._of_loops[key]
        form = self._forms.setdefault((number, geometry.group, geometry.page_stride_bytes), len(self._forms))
        page = self.known[kind, geometry] = Page(number, form, runs, int(runs[0, 0]), int(runs[-1, 1]))
        return page

    def _check_geometry(self, where: str, field: Field, kind: int, geometry: Geometry, group: Group) -> None:
        """Geometries mostly share all of their maps but one, and each map is looked at once per kind of field."""
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


def _check_places(layout: EngineLayout, rank: Rank, pages: list[Page], pairs: _Pairs) -> None:
    """Step 4 for one rank; `pages` of its shards."""
    by_group: defaultdict[str, list[tuple[Shard, Page]]] = defaultdict(list)
    for shard, page in zip(rank.shards, pages, strict=True):
        by_group[shard.geometry.group].append((shard, page))
    for name, members in by_group.items():
        _check_inside_slabs(rank, layout.group_by_name[name].pool, members, pairs)
        _check_disjoint(rank, members, pairs)


def _unique(what: str, names: list[str]) -> None:
    if len(set(names)) == len(names):
        return
    seen = set[str]()
    for name in names:
        if name in seen:
            raise LayoutError(f"{what} '{name}' is given twice; names must be unique")
        seen.add(name)


def _check_references(layout: EngineLayout, rank: Rank) -> None:
    """Step 1 for one rank: names, and where shards begin."""
    _unique(f"rank {rank.rank}: region", [region.name for region in rank.regions])
    _unique(f"rank {rank.rank}: field", [shard.field for shard in rank.shards])
    pools = {group.pool for group in layout.groups}
    sizes = {region.name: region.size_bytes for region in rank.regions}
    for slab in rank.slabs:
        if slab.pool not in pools or slab.region not in sizes:
            raise LayoutError(f"rank {rank.rank}: slab of pool '{slab.pool}' in region '{slab.region}': unknown name")
    for shard in rank.shards:
        if shard.field not in layout.kind_of:
            raise LayoutError(f"rank {rank.rank}: shard of field '{shard.field}', which the engine does not list")
        size = sizes.get(shard.region)
        if size is None:
            raise LayoutError(f"rank {rank.rank}, field '{shard.field}': region '{shard.region}' is not listed")
        if not 0 <= shard.offset_bytes < size:
            raise LayoutError(
                f"rank {rank.rank}, field '{shard.field}': starts at byte {shard.offset_bytes} of region '{shard.region}', "
                f"which has {size}; check its offset"
            )


def _check_regions_apart(rank: Rank) -> None:
    """As the transport refuses them when they are registered, devices or not: an address says which memory it is."""
    in_order = sorted([(region.address, region.name, region.size_bytes) for region in rank.regions])
    for (address, name, size), (following, other, _) in pairwise(in_order):
        if address + size > following:
            raise LayoutError(
                f"rank {rank.rank}: regions '{name}' and '{other}' share bytes at address {following}; "
                "describe memory that fields share as one region"
            )


def _check_slabs(rank: Rank, pages_of_pool: dict[str, int]) -> None:
    by_region: defaultdict[str, list[Slab]] = defaultdict(list)
    sizes = {region.name: region.size_bytes for region in rank.regions}
    for slab in rank.slabs:
        if slab.offset_bytes < 0 or slab.page_bytes <= 0 or slab.page_stride_bytes < slab.page_bytes:
            raise LayoutError(
                f"rank {rank.rank}: slab in region '{slab.region}' has pages of {slab.page_bytes} bytes every "
                f"{slab.page_stride_bytes} from {slab.offset_bytes}; pages would overlap or lie below the region"
            )
        end = slab.offset_bytes + (pages_of_pool[slab.pool] - 1) * slab.page_stride_bytes + slab.page_bytes
        size = sizes[slab.region]
        if end > size:
            raise LayoutError(
                f"rank {rank.rank}: region '{slab.region}' has {size} bytes, but {pages_of_pool[slab.pool]} pages of "
                f"{slab.page_stride_bytes} bytes end at {end}; register a larger region or fewer pages"
            )
        by_region[slab.region].append(slab)
    for region, slabs in by_region.items():
        if len(slabs) > 1:
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


def _check_inside_slabs(rank: Rank, pool: str, members: list[tuple[Shard, Page]], pairs: _Pairs) -> None:
    by_place: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for slab in rank.slabs:
        if slab.pool == pool:
            stop = slab.offset_bytes + slab.page_bytes
            by_place[slab.region, slab.page_stride_bytes].append((slab.offset_bytes, stop))
    for slabs in by_place.values():
        slabs.sort()
    for shard, page in members:
        stride, offset = shard.geometry.page_stride_bytes, shard.offset_bytes
        slabs = by_place.get((shard.region, stride), [])
        # A page that lies in one slab from its first byte to its last needs no look at what is between.
        last = bisect_right(slabs, offset + page.start, key=_first_byte) - 1
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


def _first_byte(slab: tuple[int, int]) -> int:
    return slab[0]


def _is_outside(slabs: Int64s, runs: Int64s) -> bool:
    """Whether one of the runs lies in no slab, whole; both of shape (n, 2), start and stop."""
    place = np.searchsorted(slabs[:, 0], runs[:, 0], side="right") - 1
    return bool(((place < 0) | (runs[:, 1] > slabs[np.maximum(place, 0), 1])).any())


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
        """So many runs of a shard are to be found in slabs. Raises LayoutError when there are too many."""
        self._spend(SORT_COST + PLACE_COST * num_runs, "pieces in several slabs to find")

    def _spend(self, cost: int, what: str) -> None:
        self._left -= cost
        if self._left < 0:
            raise LayoutError(
                f"engine '{self._engine}': too many shards lie in {what} them all; give layers pages of their own, or fewer ranks"
            )


def _check_disjoint(rank: Rank, members: list[tuple[Shard, Page]], pairs: _Pairs) -> None:
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
