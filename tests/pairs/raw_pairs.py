"""Random pairs of engines built from the nouns alone: no cache kind has a say in what they look like.

A mistake that a kind and the planner share would not show between engines that both come from kinds. Here every rank's
part, every digit and every stride is drawn freely, as long as the ranks together hold everything:

1. A model: bundles of congruent fields, with or without a sequence axis at any position.
2. Per engine: bundles split and grouped anew, held by any set of ranks; axes cut unevenly, overlapping, cyclically with odd
   runs; pages of any size that the cuts allow, rings of one or several pages.
3. Per rank: axes written in 1 to 3 digits; digits of all axes, and the field's number itself, nested in any order with gaps.
4. Pools of pages with several slabs in several regions: interleaved or one after another, with padding; regions at
   odd addresses, which ranks share since each is a process of its own.

Draws that a layout legitimately refuses are drawn again; `redraws` collects the reasons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvreshard.model import (
    Axis,
    AxisMap,
    Cyclic,
    Digit,
    EngineLayout,
    Field,
    Geometry,
    Group,
    Interval,
    Ownership,
    Rank,
    Region,
    Shard,
    Slab,
)
from kvreshard.model.changed import replace

Rng = np.random.Generator
MAX_TOKENS_PER_PAGE = 64


@dataclass(frozen=True)
class Bundle:
    """Congruent fields: equal axes, element size and encoding, in one group of an engine."""

    fields: tuple[Field, ...]

    @property
    def shape(self) -> Field:
        return self.fields[0]


@dataclass(frozen=True)
class _Part:
    """A bundle of a group of one engine: what each rank that has some of it owns, one ownership per axis."""

    bundle: Bundle
    owned: dict[int, tuple[Ownership, ...]]


@dataclass(frozen=True)
class _Paging:
    """A group with its parts; `ring_pages` is None without a ring."""

    group: Group
    parts: tuple[_Part, ...]
    ring_pages: int | None


def draw_model(rng: Rng) -> list[Bundle]:
    """1 to 3 bundles of 1 to 3 fields."""
    bundles = []
    for number in range(int(rng.integers(1, 4))):
        axes = [Axis(name, int(rng.integers(1, 13))) for name in ("head", "channel")[: int(rng.integers(1, 3))]]
        if rng.random() < 0.75:
            per_index = int(rng.choice([1, 1, 1, 2, 3, 4]))
            token = Axis("token", None, per_index, keep_partial=bool(rng.random() < 0.2))
            axes.insert(int(rng.integers(0, len(axes) + 1)), token)
        element = int(rng.choice([1, 2, 3, 4, 8]))
        optional = bool(rng.random() < 0.15)
        bundles.append(
            Bundle(
                tuple(
                    Field(f"b{number}.f{i}", tuple(axes), element, f"tag{number}", optional)
                    for i in range(int(rng.integers(1, 4)))
                )
            )
        )
    return bundles


def draw_engine(rng: Rng, name: str, model: Sequence[Bundle], num_tokens: int, features: set[str]) -> EngineLayout:
    """One engine that holds every bundle. Raises LayoutError where the draw is refused."""
    numbers = sorted(rng.choice(12, int(rng.integers(1, 7)), replace=False).tolist())
    pagings = _draw_pagings(rng, numbers, model, num_tokens, features)
    digits = {
        (part.bundle.fields[0].name, rank): _draw_bundle(rng, paging, part, rank, features)
        for paging in pagings
        for part in paging.parts
        for rank in part.owned
    }
    first_address = int(rng.integers(1, 1 << 40))
    ranks = tuple(_draw_rank(rng, number, pagings, digits, first_address, features) for number in numbers)
    fields = [field for bundle in model for field in bundle.fields]
    order = rng.permutation(len(fields)).tolist()
    return EngineLayout(name, tuple(fields[i] for i in order), tuple(p.group for p in pagings), ranks)


def _draw_pagings(
    rng: Rng, numbers: Sequence[int], model: Sequence[Bundle], num_tokens: int, features: set[str]
) -> list[_Paging]:
    split: list[Bundle] = []
    for bundle in model:
        cut = int(rng.integers(1, len(bundle.fields))) if len(bundle.fields) > 1 and rng.random() < 0.3 else 0
        split += [Bundle(bundle.fields[:cut]), Bundle(bundle.fields[cut:])] if cut else [bundle]
    grouped: list[list[_Part]] = []
    for bundle in split:
        part = _Part(bundle, _draw_owned(rng, numbers, bundle.shape, features))
        fits = [
            parts
            for parts in grouped
            if (parts[0].bundle.shape.sequence is None) == (bundle.shape.sequence is None)
            and math.lcm(*(_token_unit(p) for p in (*parts, part))) <= MAX_TOKENS_PER_PAGE
        ]
        if fits and rng.random() < 0.5:
            fits[int(rng.integers(len(fits)))].append(part)
        else:
            grouped.append([part])
    num_pools = int(rng.integers(1, len(grouped) + 1))
    pools = [f"pool{int(rng.integers(num_pools))}" for _ in grouped]
    tokens: list[int | None] = []
    rings: list[int | None] = []
    for parts in grouped:
        unit = math.lcm(*(_token_unit(part) for part in parts))
        stateless = parts[0].bundle.shape.sequence is not None
        tokens.append(unit * int(rng.integers(1, MAX_TOKENS_PER_PAGE // unit + 1)) if stateless else None)
        rings.append(int(rng.integers(1, 4)) if stateless and rng.random() < 0.15 else None)
    demand: defaultdict[str, int] = defaultdict(int)
    for pool, per_page, ring in zip(pools, tokens, rings, strict=True):
        demand[pool] += 6 + (0 if per_page is None else (ring or 0) + 2 * -(-num_tokens // per_page))
    null = {pool: int(rng.integers(count)) if rng.random() < 0.5 else None for pool, count in sorted(demand.items())}
    if len(set(pools)) > 1:
        features.add("raw: several pools")
    if len(set(pools)) < len(pools):
        features.add("raw: overlaid groups")
    return [
        _Paging(Group(f"g{index}", pool, demand[pool], per_page, null[pool]), tuple(parts), ring)
        for index, (parts, pool, per_page, ring) in enumerate(zip(grouped, pools, tokens, rings, strict=True))
    ]


def _token_unit(part: _Part) -> int:
    """The least number of tokens of a page such that every rank's page holds a whole number of indices."""
    sequence = part.bundle.shape.sequence
    if sequence is None:
        return 1
    number = part.bundle.shape.axes.index(sequence)
    owners = [owned[number] for owned in part.owned.values()]
    return sequence.tokens_per_index * math.lcm(*(o.period // math.gcd(o.period, o.run) for o in owners))


def _draw_owned(rng: Rng, numbers: Sequence[int], shape: Field, features: set[str]) -> dict[int, tuple[Ownership, ...]]:
    """Which rank has what: a grid of uneven cuts over some of the ranks, replicas where there are more ranks than cells."""
    holders = sorted(rng.choice(numbers, int(rng.integers(1, len(numbers) + 1)), replace=False).tolist())
    counts = [1] * len(shape.axes)
    for _ in range(4):
        axis = int(rng.integers(len(counts)))
        wider = [count + (index == axis) for index, count in enumerate(counts)]
        extent = shape.axes[axis].extent
        if math.prod(wider) <= len(holders) and (extent is None or extent > counts[axis]) and rng.random() < 0.8:
            counts = wider
    cuts = [_cut(rng, axis, count, features) for axis, count in zip(shape.axes, counts, strict=True)]
    if len(holders) > math.prod(counts):
        features.add("raw: replicas")
    if len(holders) < len(numbers):
        features.add("raw: field on some ranks only")
    owned = {}
    for place, rank in enumerate(holders):
        cell = []
        for parts in cuts:
            place, index = divmod(place, len(parts))
            cell.append(_widen(rng, parts, index, features))
        owned[rank] = tuple(cell)
    return owned


def _cut(rng: Rng, axis: Axis, count: int, features: set[str]) -> list[Ownership]:
    if axis.extent is None and count == 1 and rng.random() < 0.85:
        return [Interval(0, None)]
    if axis.extent is None:
        step = int(rng.integers(count, 9))
        edges = [0, *sorted((rng.choice(step - 1, count - 1, replace=False) + 1).tolist()), step]
        if count > 1:
            features.add("raw: cyclic tokens")
        return [Cyclic(low, high - low, step) for low, high in pairwise(edges)]
    edges = [0, *sorted((rng.choice(axis.extent - 1, count - 1, replace=False) + 1).tolist()), axis.extent]
    if len({high - low for low, high in pairwise(edges)}) > 1:
        features.add("raw: uneven parts")
    return [Interval(low, high) for low, high in pairwise(edges)]


def _widen(rng: Rng, parts: Sequence[Ownership], index: int, features: set[str]) -> Ownership:
    """Sometimes a part reaches into its neighbours."""
    part = parts[index]
    if len(parts) < 2 or rng.random() < 0.75:
        return part
    features.add("raw: overlapping parts")
    if isinstance(part, Cyclic):
        start = part.start - int(rng.integers(0, min(part.start, 2) + 1))
        stop = part.start + part.run + int(rng.integers(0, min(part.step - part.start - part.run, 2) + 1))
        return Cyclic(start, stop - start, part.step)
    last = parts[-1]
    assert isinstance(last, Interval)
    assert last.stop is not None
    assert part.stop is not None
    low = part.start - int(rng.integers(0, min(part.start, 2) + 1))
    return Interval(low, part.stop + int(rng.integers(0, min(last.stop - part.stop, 2) + 1)))


@dataclass(frozen=True)
class _Drawn:
    """A bundle's maps on one rank, the bytes between its fields, and the bytes of all of it."""

    maps: tuple[AxisMap, ...]
    field_step: int
    page_bytes: int


def _draw_bundle(rng: Rng, paging: _Paging, part: _Part, rank: int, features: set[str]) -> _Drawn:
    shape, owned = part.bundle.shape, part.owned[rank]
    extents = [_extents(rng, paging, axis, held, features) for axis, held in zip(shape.axes, owned, strict=True)]
    loops = [(axis, digit) for axis, found in enumerate(extents) for digit in range(len(found))]
    loops.append((-1, 0))
    order = rng.permutation(len(loops)).tolist()
    if rng.random() < 0.5:  # the field's number outermost or innermost: fields that continue one another
        order.remove(len(loops) - 1)
        order.insert(0 if rng.random() < 0.5 else len(order), len(loops) - 1)
    steps, step = {}, shape.element_bytes
    gaps = rng.random() < 0.25
    for index in order:
        axis, digit = loops[index]
        steps[axis, digit] = step
        step *= len(part.bundle.fields) if axis < 0 else extents[axis][digit]
        if gaps and rng.random() < 0.3:
            step += int(rng.integers(1, 6))
            features.add("raw: gaps between cells")
    maps = []
    for number, (axis, held) in enumerate(zip(shape.axes, owned, strict=True)):
        digits = [Digit(extent, 0, steps[number, i]) for i, extent in enumerate(extents[number])]
        if axis.extent is None:
            if paging.ring_pages is None:
                digits.append(Digit(None, 1, 0))
            else:
                features.add("raw: ring")
                if paging.ring_pages > 1 or rng.random() < 0.3:
                    digits.append(Digit(paging.ring_pages, 1, 0))
                    features.add("raw: ring of several pages")
                digits.append(Digit(None, 0, 0))
        maps.append(AxisMap(axis.name, held, tuple(digits)))
        if len(extents[number]) > 1:
            features.add("raw: axis of several digits")
    return _Drawn(tuple(maps), steps[-1, 0], step)


def _extents(rng: Rng, paging: _Paging, axis: Axis, held: Ownership, features: set[str]) -> list[int]:
    """Digits of one axis on one rank: a random factoring, on a bounded axis sometimes with more values than are held."""
    if axis.extent is None:
        tokens = paging.group.tokens_per_page
        assert tokens is not None
        size = tokens // axis.tokens_per_index * held.run // held.period
    else:
        assert isinstance(held, Interval)
        assert held.stop is not None
        size = held.stop - held.start
        if size > 2 and rng.random() < 0.2:
            inner = int(rng.integers(2, size))
            features.add("raw: more digit values than held")
            return [inner, -(-size // inner)]
    found = []
    for _ in range(int(rng.integers(0, 3))):
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        if not divisors:
            break
        found.append(int(rng.choice(divisors)))
        size //= found[-1]
    return [*found, size]


def _draw_rank(
    rng: Rng,
    number: int,
    pagings: Sequence[_Paging],
    drawn: dict[tuple[str, int], _Drawn],
    first_address: int,
    features: set[str],
) -> Rank:
    pools = {paging.group.pool: paging.group.num_pages for paging in pagings}
    num_slabs = {pool: int(rng.integers(1, 4)) for pool in sorted(pools)}
    sizes: dict[tuple[str, int], int] = {(pool, i): 1 for pool, count in num_slabs.items() for i in range(count)}
    placed: list[tuple[Bundle, _Drawn, str, tuple[str, int], int]] = []
    for paging in pagings:
        filled: defaultdict[tuple[str, int], int] = defaultdict(int)
        for part in paging.parts:
            if number in part.owned:
                slab = (paging.group.pool, int(rng.integers(num_slabs[paging.group.pool])))
                own = drawn[part.bundle.fields[0].name, number]
                filled[slab] += int(rng.integers(1, 9)) if rng.random() < 0.3 else 0
                placed.append((part.bundle, own, paging.group.name, slab, filled[slab]))
                filled[slab] += own.page_bytes
        for slab, size in filled.items():
            sizes[slab] = max(sizes[slab], size)
    slabs, regions = _draw_slabs(rng, sizes, pools, first_address, features)
    shards = []
    for bundle, own, group, key, offset in placed:
        slab_of = slabs[key]
        geometry = Geometry(group, slab_of.page_stride_bytes, own.maps)
        for index, field in enumerate(bundle.fields):
            start = slab_of.offset_bytes + offset + index * own.field_step
            shards.append(Shard(field.name, slab_of.region, start, geometry))
    order = rng.permutation(len(shards)).tolist()
    return Rank.of(number, (("rank", number),), regions, tuple(slabs.values()), tuple(shards[i] for i in order))


def _draw_slabs(
    rng: Rng, sizes: dict[tuple[str, int], int], pools: dict[str, int], first_address: int, features: set[str]
) -> tuple[dict[tuple[str, int], Slab], tuple[Region, ...]]:
    names = [f"r{i}" for i in range(int(rng.integers(1, 4)))]
    of_region: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    for key in sizes:
        of_region[names[int(rng.integers(len(names)))]].append(key)
    slabs: dict[tuple[str, int], Slab] = {}
    regions, address = [], first_address
    close = rng.random() < 0.2  # no byte between the pages of two regions
    for name, keys in of_region.items():
        offset = 0 if close else int(rng.integers(0, 20))
        padding = [int(rng.integers(1, 30)) if rng.random() < 0.3 else 0 for _ in keys]
        if any(padding):
            features.add("raw: padding")
        size = offset + 1
        if rng.random() < 0.4 and keys:
            stride = sum(sizes[key] for key in keys) + sum(padding)
            if len(keys) > 1:
                features.add("raw: interleaved slabs")
            for key, pad in zip(keys, padding, strict=True):
                slabs[key] = Slab(key[0], name, offset, stride, sizes[key])
                size = max(size, offset + (pools[key[0]] - 1) * stride + sizes[key])
                offset += sizes[key] + pad
        else:
            for key, pad in zip(keys, padding, strict=True):
                slabs[key] = Slab(key[0], name, offset, sizes[key] + pad, sizes[key])
                offset += (pools[key[0]] - 1) * (sizes[key] + pad) + sizes[key]
                size = max(size, offset)
                offset += int(rng.integers(0, 9))
        size += 0 if close else int(rng.integers(0, 9))
        regions.append(Region(name, address, size))
        address += size + (0 if close else int(rng.integers(0, 3)) * int(rng.integers(1, 1000)))
    if len(regions) > 1:
        features.add("raw: several regions")
        if close:
            features.add("raw: regions without a gap")
    return slabs, tuple(regions)


def without(layout: EngineLayout, names: set[str]) -> EngineLayout:
    """The layout without some fields: what an engine looks like that lacks a draft."""
    return replace(
        layout,
        fields=tuple(field for field in layout.fields if field.name not in names),
        ranks=tuple(
            rank.with_shards(tuple(shard for shard in rank.shards if shard.field not in names)) for rank in layout.ranks
        ),
    )
