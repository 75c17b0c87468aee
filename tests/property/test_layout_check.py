"""Is every layout that is accepted right, byte by byte?

Random layouts as they are, and with a number of one rank changed. What `layout_check` accepts is held to its promise from nothing but the
definition: every byte of a region belongs to at most one page of one pool, and every cell lies in its own page and shares no byte with another
cell of its group. (It may refuse more than that: a run of bytes over two slabs, for example.)
"""

import random
from dataclasses import replace
from itertools import product

import numpy as np
from tests.pairs.random_pairs import make_pair

from kvreshard.model import AxisMap, EngineLayout, LayoutError, Rank, Shard
from kvreshard.model.changed import replace as changed

NUM_LAYOUTS, NUM_CHANGES = 40, 12
STEPS = (-(2**40), -4096, -64, -1, 1, 2, 64, 4096, 2**40, 2**62)
MAX_BYTES = 1 << 21
NOBODY = -1


def change(rng: np.random.Generator, rank: Rank) -> Rank:
    """The same rank with one or two numbers changed, sometimes to one that another place has."""
    for _ in range(rng.integers(1, 3)):
        part = ("regions", "slabs", "shards")[rng.integers(3)]
        listed = list(getattr(rank, part))
        if not listed:
            continue
        names = {
            "regions": ("size_bytes", "address"),
            "slabs": ("offset_bytes", "page_stride_bytes", "page_bytes", "pool", "region"),
            "shards": ("offset_bytes", "region", "geometry"),
        }[part]
        place, name = int(rng.integers(len(listed))), names[rng.integers(len(names))]
        other = getattr(listed[int(rng.integers(len(listed)))], name)
        is_number = isinstance(other, int) and rng.random() < 0.5
        value = getattr(listed[place], name) + int(rng.choice(STEPS)) if is_number else other
        listed[place] = changed(listed[place], **{name: value})
        parts = {"regions": rank.regions, "slabs": rank.slabs, "shards": rank.shards, part: tuple(listed)}
        rank = Rank.of(rank.rank, rank.place, **parts)
    return rank


def held_in_a_page(mapped: AxisMap) -> np.ndarray:
    """Byte offsets of what one page has of an axis."""
    count = mapped.indices_per_page if mapped.num_held is None else mapped.num_held
    return mapped.locate(np.arange(count, dtype=np.int64))[1]


def cells_of(shard: Shard) -> np.ndarray:
    """Byte offsets of all cells of one page."""
    offsets = np.zeros(1, dtype=np.int64)
    for mapped in shard.geometry.axes:
        offsets = (offsets[:, None] + held_in_a_page(mapped)).reshape(-1)
    return offsets


def hold_to_promise(layout: EngineLayout, rank: Rank) -> None:
    """Fails the test unless bytes are where they should be."""
    pools = {group.pool: (number, group.num_pages) for number, group in enumerate(layout.groups)}
    owners = {region.name: np.full(region.size_bytes, NOBODY, dtype=np.int64) for region in rank.regions}
    for slab in rank.slabs:
        number, num_pages = pools[slab.pool]
        for page in range(num_pages):
            first = slab.offset_bytes + page * slab.page_stride_bytes
            taken = owners[slab.region][first : first + slab.page_bytes]
            assert len(taken) == slab.page_bytes, "a slab leaves its region"
            assert (taken == NOBODY).all(), "two pages own one byte"
            taken[:] = page * len(layout.groups) + number
    written = {
        (group.name, region.name): np.zeros(region.size_bytes, dtype=bool)
        for group, region in product(layout.groups, rank.regions)
    }
    for shard in rank.shards:
        geometry = shard.geometry
        group = layout.group_by_name[geometry.group]
        number, _ = pools[group.pool]
        element = np.arange(layout.field_by_name[shard.field].element_bytes, dtype=np.int64)
        inside = (cells_of(shard)[:, None] + element).reshape(-1)
        for page in range(group.num_pages):
            at = shard.offset_bytes + page * geometry.page_stride_bytes + inside
            assert at.min() >= 0
            assert at.max() < len(owners[shard.region]), "a cell leaves its region"
            assert (owners[shard.region][at] == page * len(layout.groups) + number).all(), (
                "a cell lies in no page of its own"
            )
            mine = written[geometry.group, shard.region]
            assert len(np.unique(at)) == len(at), "two cells of a shard share a byte"
            assert not mine[at].any(), "two cells of a group share a byte"
            mine[at] = True


def test_what_is_accepted_is_right_byte_by_byte() -> None:
    seed = random.getrandbits(32)
    num_accepted, num_refused = 0, 0
    for number in range(NUM_LAYOUTS):
        pair = make_pair("kinds" if number % 2 else "raw", (seed + number) % 2**32)
        for layout, rng in product((pair.src, pair.dst), (np.random.default_rng(seed + number),)):
            for at in range(NUM_CHANGES):
                place = int(rng.integers(len(layout.ranks)))
                try:
                    rank = change(rng, layout.ranks[place]) if at else layout.ranks[place]
                    ranks = (*layout.ranks[:place], rank, *layout.ranks[place + 1 :])
                    accepted = replace(layout, ranks=ranks)
                except LayoutError:
                    num_refused += 1
                    continue
                if sum(region.size_bytes for region in rank.regions) <= MAX_BYTES:
                    hold_to_promise(accepted, rank)
                    num_accepted += 1
    assert num_accepted > 100, seed
    assert num_refused > 100, seed
