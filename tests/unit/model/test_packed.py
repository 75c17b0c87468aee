"""Does a layout survive the packed form, is what ranks share said once, and is everything else refused?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.pairs.random_pairs import make_pair
from tests.pairs.small import engine
from tests.unit.model.test_wire_refusals import HOSTILE, leaves, plan, replaced

from kvreshard.kinds import Attention, Latent
from kvreshard.model import EngineLayout, LayoutError, Rank, WireError, packed, wire
from kvreshard.model.changed import replace
from kvreshard.model.column import Column
from kvreshard.model.names import Names
from kvreshard.model.outline import Outline, Slab, Slabs
from kvreshard.plan.route import compile_route


def trip(layout: EngineLayout) -> EngineLayout:
    found = packed.decode(packed.encode(layout))
    assert found == layout
    return found


def tree_of(layout: EngineLayout) -> Any:
    return msgspec.msgpack.decode(packed.encode(layout))


def data(*numbers: int) -> bytes:
    """A column, as it travels."""
    return Column.of(numbers).data


def decode(message: bytes) -> EngineLayout | None:
    """The layout, or None where it was refused as it should be; any other exception fails the test."""
    try:
        return packed.decode(message)
    except (WireError, LayoutError):
        return None


def test_ranks_that_differ_in_their_heads_only_share_an_outline() -> None:
    layout = engine("prefill", tp=4, kind=Attention(8, 2, "bfloat16"))
    found = trip(layout)
    assert len(found.outlines) == 1
    assert len({rank.geometries for rank in found.ranks}) == 4
    assert [rank.regions for rank in found.ranks] == [rank.regions for rank in layout.ranks]
    assert [rank.shards for rank in found.ranks] == [rank.shards for rank in layout.ranks]
    tree = tree_of(layout)
    assert (len(tree["outlines"]), len(tree["shapes"]), len(tree["geometries"])) == (1, 1, 4)


def test_replicas_share_their_geometry_and_stages_do_not_share_an_outline() -> None:
    tree = tree_of(engine("prefill", tp=4, kind=Latent(4, "bfloat16")))
    assert (len(tree["outlines"]), len(tree["geometries"])) == (1, 1)
    staged = trip(engine("prefill", stages=(0, 1), tp=2))
    assert len(staged.outlines) == 2
    assert staged.ranks[0].outline is staged.ranks[1].outline


def test_a_hundred_ranks_take_little_more_room_than_one() -> None:
    one, many = (len(packed.encode(engine("prefill", tp=tp, stages=(0,) * 61))) for tp in (1, 128))
    assert many < one + 128 * 100


def test_the_plain_form_is_read_too() -> None:
    layout = engine("prefill", tp=2, dcp=2)
    assert packed.decode(wire.encode(layout)) == layout


def test_devices_are_said_once_where_they_are_the_same() -> None:
    layout = engine("prefill")
    there = replace(layout, ranks=tuple(replace(r, devices=("cuda:3",) * len(r.addresses)) for r in layout.ranks))
    assert trip(there).ranks[0].regions[0].device == "cuda:3"
    pair = next(pair for pair in (make_pair("raw", seed) for seed in range(99)) if len(pair.src.ranks[0].addresses) > 1)
    rank = pair.src.ranks[0]
    devices = tuple(f"cuda:{number}" for number in range(len(rank.addresses)))
    trip(replace(pair.src, ranks=(replace(rank, devices=devices), *pair.src.ranks[1:])))


def test_a_route_is_the_same_whichever_form_the_layouts_came_in() -> None:
    src, dst = engine("prefill", tp=4), engine("decode", tp=2)
    ways = [
        [compile_route(one, other, rank.rank) for rank in dst.ranks]
        for one, other in ((src, dst), (trip(src), trip(dst)), (wire.decode(wire.encode(src)), dst))
    ]
    for routes in ways[1:]:
        for route, expected in zip(routes, ways[0], strict=True):
            assert route.reporters == expected.reporters
            assert [(lane.src_rank, lane.fields, lane.axes) for lane in route.lanes] == [
                (lane.src_rank, lane.fields, lane.axes) for lane in expected.lanes
            ]
            for lane, other in zip(route.lanes, expected.lanes, strict=True):
                assert lane.bases.src.tolist() == other.bases.src.tolist()
                assert lane.bases.dst.tolist() == other.bases.dst.tolist()


def test_every_truncation_is_refused() -> None:
    message = packed.encode(engine("prefill", tp=2, dcp=2))
    assert [length for length in range(len(message)) if decode(message[:length]) is not None] == []


def test_trailing_bytes_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = packed.encode(engine("prefill"))
    with pytest.raises(WireError, match=r"not a layout \(packed"):
        packed.decode(message + b"\x01")
    monkeypatch.setattr(packed, "MAX_MESSAGE_BYTES", len(message) - 1)
    with pytest.raises(WireError, match=f"more than {len(message) - 1} are not accepted"):
        packed.decode(message)


def test_random_mutations_raise_nothing_else(run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    layouts = (engine("prefill", tp=2, dcp=2), engine("decode", stages=(0, 1)), make_pair("raw", 3).src)
    messages = [packed.encode(layout) for layout in layouts]
    for _ in range(3000):
        message = bytearray(messages[int(rng.integers(len(messages)))])
        for _ in range(int(rng.choice([1, 1, 1, 2, 5]))):
            message[int(rng.integers(len(message)))] = int(rng.integers(256))
        decode(bytes(message))


def test_hostile_values_raise_nothing_else(run_seed: int) -> None:
    """Every kind of value in every kind of place, decoded, compiled and bound."""
    rng = np.random.default_rng(run_seed)
    for pair in (make_pair("raw", 3), make_pair("kinds", 2), make_pair("raw", 52)):
        value = tree_of(pair.src)
        places = list(leaves(value))
        for path in (places[i] for i in rng.permutation(len(places))[:60].tolist()):
            for hostile in HOSTILE:
                layout = decode(replaced(value, path, hostile, "msgpack"))
                if layout is not None:
                    plan(layout, pair.dst, pair.request)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tree: tree["ranks"][0].update(outline=7), "outline number 7 is not in the message, which has 1"),
        (lambda tree: tree["ranks"][0].update(geometries=[9]), "geometry number 9 is not in the message"),
        (lambda tree: tree["ranks"][0].update(geometries=[]), "rank 0: 0 geometries, but a shard has number 0"),
        (lambda tree: tree["ranks"][0].update(addresses=data()), "rank 0: 0 addresses on 0 devices for 1 regions"),
        (lambda tree: tree["ranks"][0].update(devices=["cpu", "cpu"]), "1 addresses on 2 devices for 1 regions"),
        (lambda tree: tree["ranks"][0].update(addresses=data(-8)), "region 'kv': .* bytes at address -8"),
        (lambda tree: tree["ranks"][0].update(addresses=data(2**63 - 1)), "below address 2"),
        (lambda tree: tree["geometries"][0].__setitem__(2, [0, 99]), "map number 99 is not in the message"),
        (lambda tree: tree.update(shape_of=data(5, 0)), "shape number 5 is not in the message, which has 1"),
        (lambda tree: tree.update(shape_of=data(0)), "2 fields and 1 numbers of shapes"),
        (lambda tree: tree["outlines"][0].update(fields=data(0, 8)), "field number 8 is not in the message"),
        (lambda tree: tree["outlines"][0]["slabs"].update(group_of=data(3)), "group number 3 is not in the message"),
        (
            lambda tree: tree["outlines"][0]["slabs"].update(region_of=data(3)),
            "region number 3 is not in the message",
        ),
        (lambda tree: tree["outlines"][0].update(region_of=data(0, 1)), "regions 0 to 1 of 1"),
        (lambda tree: tree["outlines"][0].update(offsets_bytes=data(0)), "2 regions, 1 offsets and 2 geometries"),
        (
            lambda tree: tree["outlines"][0].update(offsets_bytes=data(0, 10**6)),
            "starts at byte 1000000 of region 'kv'",
        ),
        (lambda tree: tree["outlines"][0].update(region_bytes=data(0)), "0 bytes at address"),
        (lambda tree: tree["outlines"][0].update(region_of=data(0, -1)), "regions -1 to 0 of 1"),
        (lambda tree: tree["outlines"][0].update(fields=data(0, -1)), "field number -1 is not in the message"),
        (
            lambda tree: tree["outlines"][0]["slabs"].update(group_of=data(-1)),
            "group number -1 is not in the message",
        ),
        (lambda tree: tree["outlines"][0]["slabs"].update(offsets_bytes=data(0, 0)), "1 regions, 2 offsets, 1 strides"),
        (lambda tree: tree["outlines"][0].update(offsets_bytes=b"1234567"), "a column of 7 bytes; numbers have 8 each"),
        (lambda tree: tree["outlines"][0].update(offsets_bytes=[0, 0]), r"at `\$\.outlines"),
        (lambda tree: tree.update(shape_of=data(0, -1)), "shape number -1 is not in the message"),
        (lambda tree: tree.update(fields=["layers.0.k", ""]), "a field has no name"),
        (lambda tree: tree.update(version=9), "version 9; this side reads versions 1 to 2"),
        (lambda tree: tree.update(form="kvreshard.lease"), "'kvreshard.lease', not a 'kvreshard.layout.packed'"),
        (lambda tree: tree.update(engine="a\nb"), r"at `\$\.engine`"),
        (lambda tree: tree.update(typo=1), "typo"),
        (lambda tree: tree["fields"].__setitem__(1, "k\n2026 ERROR"), r"'k\?2026 ERROR' is no name"),
        (lambda tree: tree["outlines"][0]["regions"].__setitem__(0, "\x1b[31m"), r"'\?\[31m' is no name"),
        (lambda tree: tree["ranks"][0].update(devices=["cpu\u202e"]), r"'cpu\?' is no name"),
        (lambda tree: tree["ranks"][0]["place"].update({"tp\x7f": 0}), r"'tp\?' is no name"),
        (lambda tree: tree["geometries"][0].__setitem__(0, "a\r"), r"'a\?' is no name"),
        (lambda tree: tree["fields"].__setitem__(1, "k" * 257), r"at `\$\.fields"),
    ],
)
def test_what_does_not_hold_together_is_named(change: Callable[[Any], None], told: str) -> None:
    tree = tree_of(engine("prefill"))
    change(tree)
    with pytest.raises((WireError, LayoutError), match=told) as caught:
        packed.decode(msgspec.msgpack.encode(tree))
    assert str(caught.value).isprintable()


def test_a_group_that_only_one_of_the_ranks_names_is_looked_for() -> None:
    """What ranks share is checked once; what each adds is checked for each."""
    layout = engine("prefill", tp=2)
    tree = tree_of(layout)
    assert len(tree["outlines"]) == 1
    tree["geometries"][1][0] = "nobody's"
    with pytest.raises(LayoutError, match=r"rank 1, field 'layers\.0\.k': group 'nobody's' is not listed"):
        packed.decode(msgspec.msgpack.encode(tree))


def test_a_geometry_of_one_rank_that_leaves_its_pages_is_found() -> None:
    layout = engine("prefill", tp=2)
    tree = tree_of(layout)
    tree["geometries"][1][1] *= 2
    with pytest.raises(LayoutError, match="rank 1"):
        packed.decode(msgspec.msgpack.encode(tree))


def test_shards_of_a_rank_are_those_that_it_was_made_of() -> None:
    for seed in range(20):
        for rank in make_pair("raw", seed).src.ranks:
            again = Rank.of(rank.rank, rank.place, rank.regions, rank.slabs, rank.shards)
            assert (again, again.shards, again.regions) == (rank, rank.shards, rank.regions)
            assert again.bases.tolist() == [rank.base_address(shard) for shard in rank.shards]


def test_columns_have_one_length() -> None:
    kv, none, slabs = Names(("kv",)), Column.of(()), Slabs.of("rank 0", (), Names(()))
    with pytest.raises(LayoutError, match="1 regions with 0 sizes"):
        Outline(kv, none, slabs, Names(()), none, none, none)
    with pytest.raises(LayoutError, match=r"numbers begin at 0"):
        Outline(kv, Column.of((8,)), slabs, Names(("k",)), Column.of((0,)), Column.of((0,)), Column.of((-1,)))
    elsewhere = Slabs.of("rank 0", (Slab("pool", "kv", 0, 8, 8),), kv)
    with pytest.raises(LayoutError, match=r"0 regions whose slabs lie in others"):
        Outline(Names(()), none, elsewhere, Names(()), none, none, none)


def test_version_1_is_read_and_written() -> None:
    """It had lists of numbers where version 2 has the bytes of columns."""
    layouts = [engine("prefill", tp=4), engine("prefill", stages=(0, 1), tp=2), make_pair("raw", 3).src]
    for layout in layouts:
        message = packed.encode(layout, 1)
        tree = msgspec.msgpack.decode(message)
        assert tree["version"] == 1
        assert tree["outlines"][0]["offsets_bytes"] == list(layout.ranks[0].outline.offsets_bytes)
        assert [(told[1], *told[2:]) for told in tree["outlines"][0]["slabs"]] == [
            (
                layout.ranks[0].outline.region_names.number_of[s.region],
                s.offset_bytes,
                s.page_stride_bytes,
                s.page_bytes,
            )
            for s in layout.ranks[0].slabs
        ]
        assert tree["ranks"][0]["addresses"] == [region.address for region in layout.ranks[0].regions]
        assert packed.decode(message) == layout
    with pytest.raises(WireError, match="version 3; this side reads versions 1 to 2"):
        packed.encode(layouts[0], 3)


@pytest.mark.parametrize("hostile", [*HOSTILE, [2**63], ["1"], [1.5], [[0]], [None]])
def test_hostile_values_of_version_1_raise_nothing_else(hostile: Any) -> None:
    value = msgspec.msgpack.decode(packed.encode(engine("prefill"), 1))
    for path in leaves(value):
        decode(replaced(value, path, hostile, "msgpack"))
    for key in ("region_bytes", "slabs", "fields", "offsets_bytes"):
        tree = msgspec.msgpack.decode(packed.encode(engine("prefill"), 1))
        tree["outlines"][0][key] = hostile
        decode(msgspec.msgpack.encode(tree))


def test_shapes_that_are_said_twice_are_one() -> None:
    layout = engine("prefill")
    tree = tree_of(layout)
    tree.update(shapes=[*tree["shapes"], *tree["shapes"]], shape_of=data(1, 0))
    assert packed.decode(msgspec.msgpack.encode(tree)) == layout


@pytest.mark.parametrize("address", [-8, 2**63 - 8])
def test_an_address_of_any_rank_lies_in_memory(address: int) -> None:
    tree = tree_of(engine("prefill", tp=2))
    tree["ranks"][1]["addresses"] = data(address)
    with pytest.raises(LayoutError, match=f"region 'kv': .* bytes at address {address}"):
        packed.decode(msgspec.msgpack.encode(tree))


def test_a_map_that_is_wrong_is_told_with_its_place() -> None:
    tree = msgspec.msgpack.decode(packed.encode(engine("prefill", tp=2)))
    tree["maps"][0]["digits"][0]["extent"] = 0
    with pytest.raises(
        LayoutError, match=r"engine 'prefill', map 0 \(geometry 0, rank 0\), axis 'token': digit of extent 0"
    ):
        packed.decode(msgspec.msgpack.encode(tree))
