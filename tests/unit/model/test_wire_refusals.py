"""What of a peer's message is refused, and is anything ever raised but WireError and LayoutError?

A decoded message is also compiled and bound against a good layout: a valid layout with mad sizes must be refused in words
by the planner too, and must not take its memory.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.pairs.apply import compile_all
from tests.pairs.random_pairs import Pair, make_pair
from tests.pairs.small import engine

from kvreshard.model import BindError, EngineLayout, LayoutError, LayoutMismatch, Rank, WireError, wire
from kvreshard.model.changed import replace
from kvreshard.model.tables import Request
from kvreshard.plan import bind, find_unwritten

ENCODINGS: tuple[wire.Encoding, ...] = ("msgpack", "json")
HOSTILE = [0, -1, 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), None, "x", "", 1.5, True, [], {}]
HOSTILE_JSON = [*HOSTILE, 2**70, 10**400, float("nan"), float("inf")]


def decode(message: bytes, encoding: wire.Encoding) -> EngineLayout | None:
    """The layout, or None where it was refused as it should be; any other exception fails the test."""
    try:
        return wire.decode(message, encoding)
    except (WireError, LayoutError):
        return None


def plan(src: EngineLayout, dst: EngineLayout, request: Request) -> None:
    try:
        for route in compile_all(src, dst):
            find_unwritten(dst, route.dst_rank, request, list(bind(route, request)))
    except (LayoutMismatch, BindError):
        return


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a decoded message that is no container."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
        return
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def tree_of(layout: EngineLayout, encoding: wire.Encoding) -> Any:
    """The message of a layout, as plain values."""
    message = wire.encode(layout, encoding)
    return json.loads(message) if encoding == "json" else msgspec.msgpack.decode(message)


def body() -> Any:
    return tree_of(engine("prefill", tp=2), "json")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_truncation_is_refused(encoding: wire.Encoding) -> None:
    message = wire.encode(engine("prefill", tp=2, dcp=2), encoding)
    for length in range(len(message)):
        assert decode(message[:length], encoding) is None
    assert decode(message, encoding) is not None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_trailing_bytes_are_refused(encoding: wire.Encoding) -> None:
    with pytest.raises(WireError, match="not a layout"):
        wire.decode(wire.encode(engine("prefill"), encoding) + b"\x01", encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_random_mutations_raise_nothing_else(encoding: wire.Encoding, run_seed: int) -> None:
    rng = np.random.default_rng(run_seed)
    messages = [
        wire.encode(layout, encoding)
        for layout in (engine("prefill", tp=2, dcp=2), engine("decode", stages=(0, 1)), make_pair("raw", 3).src)
    ]
    for _ in range(2000):
        message = bytearray(messages[int(rng.integers(len(messages)))])
        for _ in range(int(rng.choice([1, 1, 1, 2, 5]))):
            message[int(rng.integers(len(message)))] = int(rng.integers(256))
        decode(bytes(message), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hostile_values_raise_nothing_else(encoding: wire.Encoding, run_seed: int) -> None:
    """Every kind of value in every kind of place, decoded, compiled and bound."""
    rng = np.random.default_rng(run_seed)
    pairs: list[Pair] = [make_pair("raw", 3), make_pair("kinds", 2), make_pair("raw", 52)]
    for pair in pairs:
        value = tree_of(pair.src, encoding)
        for path in (list(leaves(value))[i] for i in rng.permutation(len(list(leaves(value))))[:40].tolist()):
            for hostile in HOSTILE if encoding == "msgpack" else HOSTILE_JSON:
                layout = decode(replaced(value, path, hostile, encoding), encoding)
                if layout is not None:
                    plan(layout, pair.dst, pair.request)


def replaced(value: Any, path: tuple[Any, ...], new: object, encoding: wire.Encoding) -> bytes:
    """The message with one value replaced; `value` itself is as before."""
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    old, inner[path[-1]] = inner[path[-1]], new
    message = json.dumps(value).encode() if encoding == "json" else msgspec.msgpack.encode(value)
    inner[path[-1]] = old
    return message


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("json", b"[" * 200_000),
        ("json", b'{"form":"kvreshard.layout","version":1,"engine":' + b"[" * 200_000),
        ("json", b'{"form":"kvreshard.layout","version":1e400}'),
        ("json", b'{"form":"kvreshard.layout","version":NaN}'),
        ("json", b'{"form":"kvreshard.layout","version":1' + b"0" * 5000 + b"}"),
        ("json", b"\xff\xfe"),
        ("json", b""),
        ("msgpack", b"\x91" * 200_000),
        ("msgpack", b"\xdd\xff\xff\xff\xff"),
        ("msgpack", b"\xdf\xff\xff\xff\xff"),
        ("msgpack", b"\xc6\xff\xff\xff\xff"),
        ("msgpack", b"\xa1\xff"),
        ("msgpack", b""),
    ],
)
def test_bombs_are_refused(encoding: wire.Encoding, message: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(message, encoding)


@pytest.mark.parametrize("version", [0, 2, 7])
def test_another_version_is_refused_with_both_numbers_and_the_remedy(version: int) -> None:
    value = {**body(), "version": version, "what_we_do_not_know": [1]}
    with pytest.raises(WireError, match=rf"version {version}; this side reads version 1: run the same release"):
        wire.decode(json.dumps(value).encode(), "json")


def test_another_form_is_refused_by_its_name() -> None:
    with pytest.raises(WireError, match=r"'kvreshard\.lease', not a 'kvreshard\.layout'"):
        wire.decode(json.dumps({**body(), "form": "kvreshard.lease"}).encode(), "json")


def test_an_oversized_message_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match="more than 100 are not accepted"):
        wire.decode(b"x" * 101)


def test_a_geometry_that_is_not_in_the_message_is_named() -> None:
    value = body()
    value["ranks"][1]["shards"][0]["geometry"] = "g77"
    with pytest.raises(WireError, match=r"rank 1, field 'layers\.0\.k': geometry 'g77' is not in the message"):
        wire.decode(json.dumps(value).encode(), "json")


def test_an_unknown_key_is_refused_by_its_name() -> None:
    value = body()
    value["groups"][0]["tokens_per_pag"] = 3
    with pytest.raises(WireError, match="tokens_per_pag"):
        wire.decode(json.dumps(value).encode(), "json")


def test_an_ownership_is_one_of_the_two_forms() -> None:
    value = body()
    next(iter(value["geometries"].values()))["axes"][0]["owned"] = {"start": 0, "stop": 3, "run": 1, "step": 2}
    with pytest.raises(LayoutError, match="axis 'token': give either start and stop, or start, run and step"):
        wire.decode(json.dumps(value).encode(), "json")


TEXTS: tuple[tuple[wire.Encoding, tuple[Any, ...]], ...] = (
    ("json", ("ranks", 0, "shards", 0, "field")),
    ("json", ("ranks", 0, "shards", 0, "region")),
    ("json", ("ranks", 0, "shards", 0, "geometry")),
    ("json", ("ranks", 0, "slabs", 0, "pool")),
    ("json", ("ranks", 0, "slabs", 0, "region")),
    ("json", ("ranks", 0, "regions", 0, "name")),
    ("json", ("ranks", 0, "regions", 0, "device")),
    ("msgpack", ("templates", 0, "shards", 0, "field")),
    ("msgpack", ("templates", 0, "shards", 0, "region")),
    ("msgpack", ("templates", 0, "slabs", 0, "pool")),
    ("msgpack", ("templates", 0, "slabs", 0, "region")),
    ("msgpack", ("templates", 0, "regions", 0)),
    ("msgpack", ("ranks", 0, "devices", 0)),
    ("msgpack", ("ranks", 0, "geometries", 0)),
    ("msgpack", ("fields", 0, "name")),
    ("msgpack", ("field_forms", 0, "encoding")),
    ("msgpack", ("field_forms", 0, "axes", 0, "name")),
)


@pytest.mark.parametrize(("encoding", "path"), TEXTS)
def test_a_text_that_breaks_the_line_is_not_shown(encoding: wire.Encoding, path: tuple[Any, ...]) -> None:
    """Texts that come in thousands are not held to the pattern of names one by one; they are looked at before anything is looked up."""
    tree = tree_of(replace(engine("prefill"), ranks=(on_a_device(engine("prefill").ranks[0]),)), encoding)
    message = replaced(tree, path, "k\n2026-01-01 ERROR all is lost", encoding)
    with pytest.raises(WireError, match=r"'k\?2026-01-01 ERROR all is lost' is no name") as caught:
        wire.decode(message, encoding)
    assert "\n" not in str(caught.value)


def on_a_device(rank: Rank) -> Rank:
    """JSON leaves out a device that is the default."""
    return replace(rank, devices=("cuda:0",) * len(rank.devices))


@pytest.mark.parametrize(
    ("encoding", "path"),
    [one for one in TEXTS if one[1][-1] in ("field", "geometry", "pool") or one[1][-2] == "geometries"],
)
def test_a_reference_to_nothing_is_refused(encoding: wire.Encoding, path: tuple[Any, ...]) -> None:
    with pytest.raises((WireError, LayoutError), match="'nothing'"):
        wire.decode(replaced(tree_of(engine("prefill"), encoding), path, "nothing", encoding), encoding)


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("geometries", "g1", "group"), "nobody's", "rank 1, field 'layers.0.k': group 'nobody's' is not listed"),
        (("geometries", "g1", "page_stride_bytes"), 2048, "rank 1"),
        (("ranks", 1, "addresses", 0), -8, "region 'kv': .* bytes at address -8"),
        (("ranks", 1, "addresses", 0), 2**63 - 8, "below address 2"),
        (("ranks", 1, "addresses"), [], "rank 1: 0 addresses on 0 devices for 1 regions"),
        (("ranks", 1, "devices"), ["cpu", "cpu"], "rank 1: 1 addresses on 2 devices for 1 regions"),
        (("ranks", 1, "geometries"), [], "rank 1, field 'layers.0.k': geometry number 0, but the rank has 0"),
        (("fields", 1, "form"), 7, "field 'layers.0.v': form 7 is not in the message, which has 1"),
        (("ranks", 1, "template"), 7, "rank 1: template 7 is not in the message, which has 1"),
        (("templates", 0, "region_bytes"), [], "0 sizes for 1 regions"),
        (("templates", 0, "region_bytes", 0), 0, "starts at byte 0 of region 'kv', which has 0"),
        (("templates", 0, "shards", 1, "offset_bytes"), 10**6, "'layers.0.v': starts at byte 1000000 of region 'kv'"),
        (("templates", 0, "slabs", 0, "page_bytes"), 10**6, "slab in region 'kv'"),
    ],
)
def test_what_does_not_hold_together_is_named(path: tuple[Any, ...], new: object, told: str) -> None:
    """Also what only one of the ranks of a template has wrong."""
    tree = tree_of(engine("prefill", tp=2), "msgpack")
    assert len(tree["templates"]) == 1
    with pytest.raises((WireError, LayoutError), match=told):
        wire.decode(replaced(tree, path, new, "msgpack"))


def test_ranks_that_differ_in_their_heads_only_have_one_template() -> None:
    many = engine("prefill", tp=128, stages=(0,) * 61)
    one, all_of_them = (len(wire.encode(layout)) for layout in (engine("prefill", stages=(0,) * 61), many))
    assert all_of_them < one + 128 * 150
    staged = wire.decode(wire.encode(engine("prefill", stages=(0, 1), tp=2)))
    assert len({rank.template for rank in staged.ranks}) == 2


def test_devices_are_said_once_where_they_are_the_same() -> None:
    pair = next(pair for pair in (make_pair("raw", seed) for seed in range(99)) if len(pair.src.ranks[0].addresses) > 1)
    rank = pair.src.ranks[0]
    for devices in (("cuda:3",) * len(rank.devices), tuple(f"cuda:{number}" for number in range(len(rank.devices)))):
        layout = replace(pair.src, ranks=(replace(rank, devices=devices), *pair.src.ranks[1:]))
        assert wire.decode(wire.encode(layout)) == layout
        assert wire.decode(wire.encode(layout, "json"), "json") == layout


def broken_maps() -> Iterator[tuple[str, str, Any]]:
    """A layout with one thing wrong in one axis map: the geometry's key, the axis, the layout."""
    numbers = (-1, 0, 3, 1 << 50)
    for key, geometry in body()["geometries"].items():
        for index, mapped in enumerate(geometry["axes"]):
            digits = mapped["digits"]
            wrong: list[tuple[str, Any]] = [("digits", []), ("digits", digits * 2)]
            wrong += [("owned", {"start": -1}), ("owned", {"start": 5}), ("owned", {"start": 3, "stop": 2})]
            wrong += [("owned", {"start": 0, "stop": 1 << 60}), ("owned", {"start": 0, "run": 2, "step": 1})]
            wrong += [("owned", {"start": 0, "stop": 2, "run": 1, "step": 2})]
            for place, digit in enumerate(digits):
                others = (
                    {**digit, name: number}
                    for name in digit
                    for number in (*numbers, None)
                    if name == "extent" or number
                )
                wrong += [
                    ("digits", [*digits[:place], other, *digits[place + 1 :]])
                    for other in others
                    if None not in (other["page_step"], other["byte_step"])
                ]
            for name, value in wrong:
                layout = body()
                layout["geometries"][key]["axes"][index][name] = value
                yield key, mapped["axis"], layout


def test_a_map_that_is_wrong_is_told_with_its_place() -> None:
    """Its geometry or its field, and a rank that has it; in words, not in the names of our classes."""
    told = []
    for key, axis, layout in broken_maps():
        try:
            wire.decode(json.dumps(layout).encode(), "json")
        except LayoutError as error:
            told.append(str(error))
            if f"geometry '{key}'" in told[-1]:
                assert f"axis '{axis}'" in told[-1]
            assert re.search(r"rank [01], field 'layers\.0", told[-1])
            assert "Digit(" not in told[-1]
    assert len(told) > 50
    assert sum("geometry 'g0' (rank 0, field 'layers.0.k'), axis 'head': " in text for text in told) > 5
