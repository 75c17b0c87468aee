"""Random requests for a pair of engines: fragmented tables, windows, prefixes, rings, states, new pages.

The tables are built from what the layouts need: which logical pages do the drawn token intervals touch on any rank? They
then get more than that, as engines give: lookahead pages at the end, real or null pages at the front, or a front that is
dropped. Page ids are unique in a pool and free to repeat between pools.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvreshard.model.field import Axis
from kvreshard.model.layout import EngineLayout
from kvreshard.model.rank import Group
from kvreshard.model.tables import PageTable, Request, Tokens

Rng = np.random.Generator


@dataclass
class _Side:
    """One engine's side of a request that is being drawn."""

    layout: EngineLayout
    tokens: dict[str, int] = field(default_factory=dict)
    needed: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    rings: set[str] = field(default_factory=set)
    tables: dict[str, PageTable] = field(default_factory=dict)


def make_request(rng: Rng, src: EngineLayout, dst: EngineLayout, max_tokens: int, features: set[str]) -> Request:
    """A request that both layouts can hold, of at most `max_tokens` tokens; says what it has in `features`."""
    num_tokens = max_tokens
    while True:
        drawn: set[str] = set()
        request = _draw(rng, src, dst, num_tokens, drawn)
        if request is not None:
            features |= drawn
            return request
        num_tokens //= 2


def _draw(rng: Rng, src: EngineLayout, dst: EngineLayout, num_tokens: int, features: set[str]) -> Request | None:
    sides = (_Side(src), _Side(dst))
    for side in sides:
        for group in side.layout.groups:
            extra = int(rng.integers(0, 4)) if group.tokens_per_page is not None and rng.random() < 0.3 else 0
            side.tokens[group.name] = num_tokens + extra
    groups_of = [_groups_of_fields(side.layout) for side in sides]
    intervals: dict[str, list[Tokens]] = {}
    for group in dst.groups:
        lowest = _first_live_token(sides, groups_of, group)
        intervals[group.name] = _intervals(rng, lowest, num_tokens, features)
    for side in sides:
        _collect_needs(side, groups_of[1], intervals, features)
    for side, name in zip(sides, ("source", "destination"), strict=True):
        if not _fill_tables(rng, side, name, features):
            return None
    new_pages = {group.name: _new_pages(rng, group, sides[1].tables[group.name]) for group in dst.groups}
    _note(sides, intervals, num_tokens, features)
    return Request(sides[0].tables, sides[1].tables, intervals, new_pages)


def _groups_of_fields(layout: EngineLayout) -> dict[str, str]:
    return {shard.field: shard.geometry.group for rank in layout.ranks for shard in rank.shards}


def _first_live_token(sides: Sequence[_Side], groups_of: Sequence[Mapping[str, str]], dst_group: Group) -> int:
    """The first token that every ring that feeds or holds the group still has."""
    lowest = 0
    wanted = {name for name, group in groups_of[1].items() if group == dst_group.name}
    for side in sides:
        for rank in side.layout.ranks:
            for shard in rank.shards:
                sequence = side.layout.field_by_name[shard.field].sequence
                if shard.field not in wanted or sequence is None:
                    continue
                mapped = shard.geometry.axis(sequence.name)
                if mapped.ring_pages is None:
                    continue
                entries = mapped.ring_pages * mapped.indices_per_page // mapped.owned.run * mapped.owned.period
                absorbed = sequence.indices_of(0, side.tokens[shard.geometry.group])[1]
                lowest = max(lowest, (absorbed - entries) * sequence.tokens_per_index)
    return lowest


def _intervals(rng: Rng, lowest: int, num_tokens: int, features: set[str]) -> list[Tokens]:
    style = rng.random()
    if lowest >= num_tokens or style < 0.08:
        features.add("request: empty intervals")
        return []
    if style < 0.3:
        return [(lowest, num_tokens)]
    if style < 0.65:
        start = int(rng.integers(lowest, num_tokens))
        return [(start, int(rng.integers(start, num_tokens)) + 1)]
    points = sorted(set(rng.integers(lowest, num_tokens + 1, int(rng.integers(2, 7))).tolist()))
    if rng.random() < 0.3:
        found = list(pairwise(points))
    else:
        found = list(zip(points[::2], points[1::2], strict=False))
    if len(found) > 1:
        features.add("request: several intervals")
    return found


def _collect_needs(
    side: _Side, dst_groups: Mapping[str, str], intervals: Mapping[str, list[Tokens]], features: set[str]
) -> None:
    """Logical pages that the intervals touch, per group of this side, over all ranks."""
    done: set[object] = set()
    for rank in side.layout.ranks:
        for shard in rank.shards:
            geometry, name = shard.geometry, shard.geometry.group
            sequence = side.layout.field_by_name[shard.field].sequence
            wanted = intervals.get(dst_groups.get(shard.field, ""), [])
            if sequence is None:
                side.needed[name].add(0)
                if wanted:
                    features.add("request: state moved")
                continue
            mapped = geometry.axis(sequence.name)
            key = (name, mapped, sequence, dst_groups.get(shard.field, ""))
            if key in done:
                continue
            done.add(key)
            if mapped.ring_pages is not None:
                side.rings.add(name)
                side.needed[name].update(range(mapped.ring_pages))
                if wanted:
                    features.add("request: ring moved")
                continue
            touched = np.array(sorted(_indices(sequence, wanted)), dtype=np.int64)
            held = touched[mapped.owned.contains(touched)]
            side.needed[name].update((mapped.owned.to_local(held) // mapped.indices_per_page).tolist())


def _indices(sequence: Axis, intervals: Sequence[Tokens]) -> set[int]:
    found: set[int] = set()
    for start, stop in intervals:
        low, high = sequence.indices_of(start, stop)
        found.update(range(low, high))
    return found


def _fill_tables(rng: Rng, side: _Side, name: str, features: set[str]) -> bool:
    """Tables of all groups of one side; False if a pool has too few pages."""
    nulls: defaultdict[str, set[int]] = defaultdict(set)
    for group in side.layout.groups:
        if group.null_page is not None:
            nulls[group.pool].add(group.null_page)
    free: dict[str, list[int]] = {}
    for group in side.layout.groups:
        if group.pool not in free:
            free[group.pool] = _page_order(rng, [p for p in range(group.num_pages) if p not in nulls[group.pool]])
    for group in rng.permutation(np.array([group.name for group in side.layout.groups])).tolist():
        if not _fill_table(rng, side, side.layout.group_by_name[group], name, free, features):
            return False
    return True


def _page_order(rng: Rng, pages: list[int]) -> list[int]:
    """Shuffled, ascending, descending, or ascending with a few strays."""
    style = rng.random()
    if style < 0.5:
        return [int(page) for page in rng.permutation(np.array(pages, dtype=np.int64))]
    if style < 0.6:
        return pages[::-1]
    start = int(rng.integers(0, len(pages) + 1))
    pages = pages[start:] + pages[:start]
    if style < 0.85 and len(pages) > 2:
        one, two = rng.integers(0, len(pages), 2).tolist()
        pages[one], pages[two] = pages[two], pages[one]
    return pages


def _fill_table(
    rng: Rng, side: _Side, group: Group, name: str, free: Mapping[str, list[int]], features: set[str]
) -> bool:
    pool, needed = free[group.pool], side.needed[group.name]
    if group.tokens_per_page is None:
        if not pool:
            return False
        side.tables[group.name] = PageTable([pool.pop()], side.tokens[group.name], int(rng.integers(0, 4)))
        return True
    low, high = (min(needed), max(needed) + 1) if needed else (int(rng.integers(0, 3)),) * 2
    first = 0 if group.name in side.rings else int(rng.integers(0, low + 1))
    lookahead = int(rng.integers(0, 3)) if rng.random() < 0.5 else 0
    null_front = group.null_page is not None and rng.random() < 0.5
    num_real = high - low + lookahead + (0 if null_front else low - first)
    if num_real > len(pool):
        return False
    pages = [group.null_page] * (low - first) if null_front and group.null_page is not None else []
    pages += [pool.pop() for _ in range(num_real)]
    if first:
        features.add(f"request: dropped front, {name}")
    if null_front and low > first:
        features.add(f"request: null pages at the front, {name}")
    if lookahead:
        features.add(f"request: lookahead, {name}")
    if group.name in side.rings:
        first = int(rng.integers(0, 4))  # says nothing: a ring starts at page 0
    side.tables[group.name] = PageTable(np.array(pages, dtype=np.int64), side.tokens[group.name], first)
    return True


def _new_pages(rng: Rng, group: Group, table: PageTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Some of the table's pages: all, those from some page on, any, or none."""
    pages = table.pages[table.pages != group.null_page] if group.null_page is not None else table.pages
    style = rng.random()
    if style < 0.4:
        return pages
    if style < 0.7:
        return pages[int(rng.integers(0, len(pages) + 1)) :]
    return pages[rng.random(len(pages)) < 0.5] if style < 0.9 else pages[:0]


def _note(sides: Sequence[_Side], intervals: Mapping[str, list[Tokens]], num_tokens: int, features: set[str]) -> None:
    if any(found and found[0][0] for found in intervals.values()):
        features.add("request: prefix hit or window clip")
    for group in sides[1].layout.groups:
        found = intervals[group.name]
        if group.tokens_per_page and found and found[-1][1] % group.tokens_per_page:
            features.add("request: partial last page")
    ids = [{group.pool: set(side.tables[group.name].pages.tolist()) for group in side.layout.groups} for side in sides]
    for by_pool in ids:
        pools = list(by_pool.values())
        if any(one & two for index, one in enumerate(pools) for two in pools[index + 1 :]):
            features.add("request: one page id in two pools")
