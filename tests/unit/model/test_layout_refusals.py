"""Which layouts contradict themselves, and does the error name the fact, both values and the remedy?"""

import re
from typing import Any

import pytest

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
    LayoutError,
    Rank,
    Region,
    Shard,
    Slab,
    split_evenly,
)
from kvreshard.model.changed import replace

TOKEN, HEAD = Axis("token", None), Axis("head", 4)
FIELD = Field("k", (TOKEN, HEAD), 2, "bf16")
TOKENS = AxisMap("token", Interval(0, None), (Digit(8, 0, 8), Digit(None, 1, 0)))
HEADS = AxisMap("head", Interval(0, 4), (Digit(4, 0, 2),))
GROUP = Group("g", "pool", 10, 8)
SLAB = Slab("pool", "kv", 0, 64, 64)
REGION = Region("kv", 4096, 640)


def layout(**parts: Any) -> EngineLayout:
    """A good engine of one rank, with some parts replaced."""
    geometry = parts.get("geometry", Geometry("g", 64, (TOKENS, HEADS)))
    shards = parts.get("shards", (Shard("k", "kv", parts.get("offset", 0), geometry),))
    rank = Rank.of(0, (), parts.get("regions", (REGION,)), parts.get("slabs", (SLAB,)), shards)
    return EngineLayout(
        "prefill", tuple(parts.get("fields", (FIELD,))), parts.get("groups", (GROUP,)), parts.get("ranks", (rank,))
    )


def refused(facts: str, **parts: Any) -> None:
    """The layout is refused in words that have all `facts`, which are separated by '|'."""
    with pytest.raises(LayoutError) as caught:
        layout(**parts)
    for fact in facts.split("|"):
        assert fact in str(caught.value)


def test_the_good_one_is_good() -> None:
    assert layout().rank_by_number[0].base_address(layout().ranks[0].shards[0]) == 4096


def test_names_are_unique_and_resolve() -> None:
    refused("field 'k'|given twice", fields=(FIELD, FIELD))
    refused("group 'g'|given twice", groups=(GROUP, GROUP))
    refused("region 'kv'|given twice", regions=(REGION, REGION))
    refused("has no ranks", ranks=())
    refused("rank '0'|given twice", ranks=(layout().ranks[0],) * 2)
    refused("rank 0|'k'|does not list", fields=())
    refused("rank 0|field 'k'|'g'|not listed", groups=(replace(GROUP, name="other"),))
    refused("slab of pool 'elsewhere'|unknown", slabs=(replace(SLAB, pool="elsewhere"),))
    refused("region 'vram'|unknown", slabs=(replace(SLAB, region="vram"),))


def test_groups_of_one_pool_have_its_pages() -> None:
    other = replace(GROUP, name="h", num_pages=12)
    refused("group 'h'|12 pages|pool 'pool'|10", groups=(GROUP, other))


@pytest.mark.parametrize(
    ("parts", "facts"),
    [
        ({"regions": (replace(REGION, size_bytes=639),)}, "rank 0|region 'kv'|639 bytes|end at 640|larger region"),
        ({"slabs": (replace(SLAB, page_stride_bytes=63),)}, "pages of 64 bytes every 63|overlap"),
        ({"slabs": (replace(SLAB, offset_bytes=-1),)}, "from -1|below the region"),
        ({"slabs": (replace(SLAB, page_bytes=63),)}, "field 'k'|bytes [0, 64)|outside the slabs|page stride 64"),
        ({"offset": 1}, "field 'k'|bytes [1, 65)|outside the slabs of pool 'pool'"),
        ({"offset": -1}, "field 'k'|starts at byte -1|640"),
        ({"offset": 640}, "field 'k'|starts at byte 640|640"),
        ({"slabs": ()}, "field 'k'|outside the slabs"),
        ({"slabs": (SLAB, SLAB)}, "two slabs of page stride 64 that lie among one another"),
        (
            {"slabs": (SLAB, Slab("pool", "kv", 600, 2, 2))},
            "different page strides overlap at byte 600|one pool and one stride",
        ),
    ],
)
def test_pages_lie_in_slabs_and_slabs_in_regions(parts: dict[str, Any], facts: str) -> None:
    refused(facts, **parts)


@pytest.mark.parametrize("behind", [0, 639, -639])
def test_regions_of_a_rank_share_no_byte(behind: int) -> None:
    """Bytes that two regions have would be two fields' at once, and the check of slabs looks inside of one region."""
    other = Region("spare", 4096 + behind, 640)
    first, second = ("kv", "spare") if behind >= 0 else ("spare", "kv")
    facts = f"rank 0|'{first}' and '{second}' share bytes at address {4096 + max(0, behind)}|as one region"
    refused(facts, regions=(REGION, other))
    refused(facts, regions=(other, Region("apart", 2**40, 1), REGION))
    refused(facts, regions=(REGION, replace(other, device="cuda:0")))


def test_regions_may_touch_and_lie_in_any_order() -> None:
    touching = [Region("below", 4096 - 8, 8), Region("above", 4096 + 640, 8)]
    layout(regions=(REGION, *touching))
    layout(regions=(touching[1], REGION, touching[0]))


@pytest.mark.parametrize(
    ("axes", "facts"),
    [
        ((HEADS, TOKENS), "field 'k'|maps axes ['head', 'token']|has ['token', 'head']"),
        ((TOKENS, replace(HEADS, owned=Interval(1, 5))), "field 'k', axis 'head'|[1, 5)|extent is 4"),
        ((AxisMap("token", Interval(0, 8), (Digit(8, 0, 8),)), HEADS), "axis 'token'|[0, 8)|no end"),
        ((TOKENS, AxisMap("head", Interval(0, None), (Digit(4, 0, 2), Digit(None, 1, 0)))), "axis 'head'|with an end"),
        ((replace(TOKENS, digits=(Digit(7, 0, 8), Digit(None, 1, 0))), HEADS), "pages span 7 tokens|group 'g' says 8"),
        ((replace(TOKENS, owned=Cyclic(0, 3, 7)), HEADS), "axis 'token'|3 of every 7|whole number of tokens"),
        ((TOKENS, replace(HEADS, digits=(Digit(4, 0, 1),))), "two cells of one page share bytes"),
        ((TOKENS, replace(HEADS, digits=(Digit(2, 0, 2), Digit(2, 0, 2)))), "share bytes"),
        ((TOKENS, replace(HEADS, digits=(Digit(4, 0, 0),))), "share bytes"),
        ((replace(TOKENS, digits=(Digit(8, 0, 2**47), Digit(None, 1, 0))), HEADS), "field 'k'|outside the slabs"),
    ],
)
def test_a_shard_is_what_its_field_and_group_say(axes: tuple[AxisMap, ...], facts: str) -> None:
    refused(facts, geometry=Geometry("g", 64, axes))


def test_two_fields_of_one_group_do_not_share_bytes() -> None:
    half = Geometry("g", 64, (replace(TOKENS, digits=(Digit(8, 0, 4), Digit(None, 1, 0))), split_heads()))
    fields = (FIELD, replace(FIELD, name="v"))
    layout(fields=fields, shards=(Shard("k", "kv", 0, half), Shard("v", "kv", 32, half)))
    refused(
        "fields 'k' and 'v' of one group share bytes",
        fields=fields,
        shards=(Shard("k", "kv", 0, half), Shard("v", "kv", 30, half)),
    )


def split_heads() -> AxisMap:
    return AxisMap("head", Interval(0, 2), (Digit(2, 0, 2),))


def test_a_page_of_too_many_pieces_is_refused() -> None:
    tokens = AxisMap("token", Interval(0, None), (Digit(2**21, 0, 9), Digit(None, 1, 0)))
    refused(
        f"field 'k'|{2**21} separate pieces",
        geometry=Geometry("g", 2**30, (tokens, HEADS)),
        groups=(replace(GROUP, tokens_per_page=2**21),),
    )


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: Region("kv", 0, 0), "region 'kv'|0 bytes|positive"),
        (lambda: Region("kv", -8, 8), "region 'kv'|address -8"),
        (lambda: Region("kv", 2**63 - 4, 8), "region 'kv'|below address 2**63"),
        (lambda: Group("g", "p", 0, 4), "group 'g'|0 pages"),
        (lambda: Group("g", "p", 4, 0), "group 'g'|0 tokens per page"),
        (lambda: Group("g", "p", 4, 4, window_tokens=-1), "group 'g'|-1 window tokens"),
        (lambda: Axis("head", 0), "axis 'head'|extent 0|positive"),
        (lambda: Axis("head", 2**60 + 1), "axis 'head'|extent 1152921504606846977|not above"),
        (lambda: Axis("", 3), "no name"),
        (lambda: Axis("token", None, 0), "axis 'token'|0 tokens per index"),
        (lambda: Axis("head", 4, 2), "axis 'head'|only the sequence axis"),
        (lambda: Field("", (HEAD,), 2, "x"), "no name"),
        (lambda: Field("k", (HEAD,), 0, "x"), "field 'k'|element of 0 bytes"),
        (lambda: Field("k", (), 2, "x"), "field 'k'|at least one"),
        (lambda: Field("k", (HEAD, HEAD), 2, "x"), "field 'k'|name of its own"),
        (lambda: Field("k", (TOKEN, Axis("page", None)), 2, "x"), "field 'k'|more than one sequence axis"),
        (lambda: Interval(-1, 3), "below zero"),
        (lambda: Interval(3, 3), "holds nothing"),
        (lambda: Interval(3, 2), "stop 2|start 3"),
        (lambda: Interval(0, 2**62), "above"),
        (lambda: Cyclic(0, 0, 4), "run=0"),
        (lambda: Cyclic(3, 2, 4), "start=3 run=2 step=4|start + run <= step"),
        (lambda: Cyclic(-1, 2, 4), "start=-1"),
        (lambda: Cyclic(0, 1, 2**62), "above"),
        (lambda: Digit(0, 0, 4), "digit of extent 0"),
        (lambda: Digit(2, -1, 4), "-1 pages"),
        (lambda: Digit(2, 0, -4), "-4 bytes"),
        (lambda: Digit(2, 0, 2**60), "above"),
        (lambda: AxisMap("head", Interval(0, 4), ()), "axis 'head'|no digits"),
        (lambda: AxisMap("head", Interval(0, 4), (Digit(3, 0, 2),)), "axis 'head'|4 coordinates|only 3 values"),
        (lambda: AxisMap("head", Interval(0, 4), (Digit(None, 0, 2),)), "axis 'head'|must have an end"),
        (lambda: AxisMap("head", Interval(0, 4), (Digit(4, 1, 2),)), "axis 'head'|only an axis without end"),
        (lambda: AxisMap("token", Interval(0, None), (Digit(4, 0, 2),)), "axis 'token'|must have none"),
        (lambda: AxisMap("token", Interval(3, None), (Digit(None, 1, 0),)), "axis 'token'|starts at 0"),
        (lambda: AxisMap("token", Interval(0, None), (Digit(None, 2, 0),)), "axis 'token'|one page"),
        (lambda: AxisMap("token", Interval(0, None), (Digit(None, 1, 5),)), "axis 'token'|one page"),
        (
            lambda: AxisMap("token", Interval(0, None), (Digit(2, 1, 0), Digit(3, 0, 5), Digit(None, 0, 0))),
            "inside a page",
        ),
        (lambda: AxisMap("token", Interval(0, None), (Digit(2, 0, 4), Digit(None, 0, 8))), "axis 'token'|lap"),
        (lambda: AxisMap("token", Interval(0, None), (Digit(None, 0, 8), Digit(2, 1, 0))), "only the last digit"),
        (lambda: AxisMap("t", Interval(0, 1), (Digit(2**40, 0, 1), Digit(2**40, 0, 1))), "axis 't'|more than"),
        (lambda: split_evenly(0, 2, 0), "part 0 of 2 of an axis of 0"),
        (lambda: split_evenly(4, 2, 2), "part 2 of 2"),
    ],
)
def test_sizes_are_positive_and_maps_make_sense(make: Any, facts: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    for fact in facts.split("|"):
        assert re.search(re.escape(fact), str(caught.value)), str(caught.value)


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
    return EngineLayout("e", fields, groups, (Rank.of(0, (), (Region("memory", 0, 1280),), slabs, shards),))


def test_a_shard_in_a_slab_of_another_pool_is_refused() -> None:
    assert len(two_pools(0, 640).ranks) == 1
    with pytest.raises(LayoutError, match=r"'first': bytes .* outside the slabs of pool 'first'"):
        two_pools(640, 0)


@pytest.mark.parametrize("stride_bytes", [63, 65, 128])
def test_a_shard_whose_pages_are_apart_otherwise_than_its_slabs_is_refused(stride_bytes: int) -> None:
    with pytest.raises(LayoutError, match=rf"'first': bytes .* page stride {stride_bytes} lie outside the slabs"):
        two_pools(0, 640, stride_bytes)


def test_a_shard_that_would_end_beyond_all_numbers_is_refused() -> None:
    """Sums of its offset and its page do not wrap around."""
    pages = Group("state", "state", 1, None)
    wide = Geometry("state", 1, (AxisMap("channel", Interval(0, 2), (Digit(2, 0, 1 << 48),)),))
    region, slab = Region("memory", 0, 2**63 - 1), Slab("state", "memory", 0, 2**62, 2**62)
    shard = Shard("s", "memory", 2**63 - 2, wide)
    with pytest.raises(LayoutError, match="outside the slabs of pool 'state'"):
        EngineLayout(
            "e",
            (Field("s", (Axis("channel", 2),), 1, "bytes"),),
            (pages,),
            (Rank.of(0, (), (region,), (slab,), (shard,)),),
        )
