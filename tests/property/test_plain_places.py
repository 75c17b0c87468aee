"""Does the look at all slabs and shards at once ever accept what the look at each of them refuses?

Random layouts as they are, and with a number of an outline changed: what is said of them must not depend on the quick look, and it must
spare most good layouts of one kind of slab the other.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.pairs.random_pairs import make_pair

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import (
    Axis,
    AxisMap,
    Digit,
    EngineLayout,
    Field,
    Geometry,
    Group,
    Interval,
    LayoutError,
    Region,
    Shard,
    Slab,
)
from kvreshard.model.changed import replace as changed
from kvreshard.model.column import Column
from kvreshard.model.fields import Fields
from kvreshard.model.layout import Rank
from kvreshard.model.outline import Outline, Slabs
from kvreshard.model.plain_places import PlainSlabs

NUM_LAYOUTS, NUM_CHANGES = 60, 12
STEPS = (-(2**40), -4096, -64, -1, 1, 2, 64, 4096, 2**40, 2**62)


def change(rng: np.random.Generator, rank: Rank) -> Rank:
    """The same rank with one or two numbers of its outline changed, sometimes to one that another place has."""
    outline = rank.outline
    for _ in range(rng.integers(1, 3)):
        step = int(rng.choice(STEPS))
        what = rng.integers(5)
        if what == 0 and len(outline.offsets_bytes):
            outline = replace(outline, offsets_bytes=_one(rng, outline.offsets_bytes, step))
        elif what == 1 and len(outline.region_bytes):
            outline = replace(outline, region_bytes=_one(rng, outline.region_bytes, step))
        elif what == 2 and len(outline.region_of):
            others = (int(rng.integers(len(outline.region_names))), *outline.region_of[1:])
            outline = replace(outline, region_of=Column.of(others))
        elif len(outline.slabs):
            slabs = list(outline.slabs.listed(outline.region_names))
            place, name = int(rng.integers(len(slabs))), str(rng.choice(_NUMBERS))
            other = getattr(slabs[int(rng.integers(len(slabs)))], name)
            value = other if name == "pool" or rng.random() < 0.5 else getattr(slabs[place], name) + step
            slabs[place] = changed(slabs[place], **{name: value})
            outline = replace(outline, slabs=Slabs.of("rank", slabs, outline.region_names))
    return replace(rank, outline=outline)


_NUMBERS = ("offset_bytes", "page_stride_bytes", "page_bytes", "pool")


def _one(rng: np.random.Generator, numbers: Column, step: int) -> Column:
    place = int(rng.integers(len(numbers)))
    other = numbers[int(rng.integers(len(numbers)))]
    value = other if rng.random() < 0.5 else numbers[place] + step
    return Column.of((*numbers[:place], value, *numbers[place + 1 :]))


def said(layout: EngineLayout, ranks: tuple[Rank, ...]) -> str:
    """What a layout of these ranks is refused with, if it is."""
    try:
        EngineLayout(layout.engine, layout.fields, layout.groups, ranks)
    except LayoutError as error:
        return str(error)
    return ""


def test_what_is_said_of_a_layout_does_not_depend_on_the_quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    of, hold = PlainSlabs.of, PlainSlabs.hold
    num_plain, num_held, num_refused = 0, 0, 0

    def counted_of(outline: Outline, pages: Any) -> PlainSlabs | None:
        nonlocal num_plain
        found = of(outline, pages)
        num_plain += found is not None
        return found

    def counted_hold(self: PlainSlabs, *args: Any) -> bool:
        nonlocal num_held
        found = hold(self, *args)
        num_held += found
        return found

    seed = random.getrandbits(32)
    for number in range(NUM_LAYOUTS):
        pair = make_pair("kinds" if number % 2 else "raw", (seed + number) % 2**32)
        for layout in (pair.src, pair.dst):
            rng = np.random.default_rng(seed + number)
            for at in range(NUM_CHANGES):
                place = int(rng.integers(len(layout.ranks)))
                try:
                    other = change(rng, layout.ranks[place]) if at else layout.ranks[place]
                except LayoutError:
                    continue  # it is no rank, whatever a layout says of it
                ranks = (*layout.ranks[:place], other, *layout.ranks[place + 1 :])
                monkeypatch.setattr(PlainSlabs, "of", staticmethod(counted_of))
                monkeypatch.setattr(PlainSlabs, "hold", counted_hold)
                quick = said(layout, ranks)
                monkeypatch.setattr(PlainSlabs, "of", staticmethod(lambda outline, pages: None))
                assert said(layout, ranks) == quick, f"seed {seed}, pair {number}, change {at}"
                num_refused += bool(quick)
    assert num_plain > 100
    assert num_held > 50
    assert num_refused > 100


@pytest.mark.parametrize(
    ("model", "engine"), [("llama-3.1-70b", "tp=4,order=HND,interior=separate"), ("deepseek-v3", "tp=8")]
)
def test_layouts_of_engines_are_seen_to_be_right_at_once(
    model: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("looked at each")

    hold, found = PlainSlabs.hold, []

    def noted(self: PlainSlabs, *args: Any) -> bool:
        found.append(hold(self, *args))
        return found[-1]

    monkeypatch.setattr("kvreshard.model.layout_check._check_slabs", fail)
    monkeypatch.setattr(PlainSlabs, "hold", noted)
    describe(load(model), parse_engine(engine), "prefill", 100)
    assert found
    assert all(found)


def two_pools(first_bytes: int, second_bytes: int, stride_bytes: int = 64) -> EngineLayout:
    """Two states in pools of their own, 10 pages of 64 bytes each, one behind the other; where each begins in their region, and of both
    the distance of pages.
    """
    names = ("first", "second")
    fields = tuple(Field(name, (Axis("channel", 32),), 2, "bf16") for name in names)
    groups = tuple(Group(name, name, 10, None) for name in names)
    slabs = tuple(Slab(name, "memory", at, 64, 64) for name, at in zip(names, (0, 640), strict=True))
    held = (AxisMap("channel", Interval(0, 32), (Digit(32, 0, 2),)),)
    shards = tuple(
        Shard(name, "memory", at, Geometry(name, stride_bytes, held))
        for name, at in zip(names, (first_bytes, second_bytes), strict=True)
    )
    return EngineLayout("e", Fields.of(fields), groups, (Rank.of(0, (), (Region("memory", 0, 1280),), slabs, shards),))


def test_a_shard_in_a_slab_of_another_pool_is_refused() -> None:
    assert len(two_pools(0, 640).ranks) == 1
    with pytest.raises(LayoutError, match=r"'first': bytes .* outside the slabs of pool 'first'"):
        two_pools(640, 0)


@pytest.mark.parametrize("stride_bytes", [63, 65, 128])
def test_a_shard_whose_pages_are_apart_otherwise_than_its_slabs_is_refused(stride_bytes: int) -> None:
    with pytest.raises(LayoutError, match=rf"'first': bytes .* page stride {stride_bytes} lie outside the slabs"):
        two_pools(0, 640, stride_bytes)
