"""The wire form of an engine's layout: msgpack between engines, JSON for people and tools.

`docs/wire.md` describes every key, with test vectors.

1. `decode` reads name and version first (`form`); another version is refused with both numbers.
2. The body is decoded strictly by type and within the bounds below, then becomes an `EngineLayout`, which checks itself.

Geometries that several shards share are written once, under a key. Refused: messages above `MAX_MESSAGE_BYTES`, longer lists and texts than the
bounds, unknown forms and keys, wrong types, references that do not resolve. Raises WireError, or LayoutError when a well-formed layout is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import intern
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec

from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Axis, Field
from kvreshard.model.form import Head, Whole
from kvreshard.model.layout import EngineLayout, Geometry, Group, Rank, Region, Shard, Slab
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.text import Name, ShortText, check_names, plain

FORM = "kvreshard.layout"
VERSION = 1
# 64 ranks with 160 regions each take 1.6 MB; a fortyfold is generous, and bounds what a peer can make us hold.
MAX_MESSAGE_BYTES = 64 << 20
# What a peer can make us compute grows with these. The largest engine that is planned for has 512 ranks; a model has some
# hundred layers of a few fields each.
MAX_RANKS = 1024
MAX_FIELDS = MAX_PER_RANK = 1 << 14
MAX_GROUPS = 256
MAX_GEOMETRIES = 1 << 16
MAX_SHARDS = 1 << 18
MAX_AXES = 16

Encoding = Literal["msgpack", "json"]
Read = TypeVar("Read", covariant=True)


class _Owned(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An interval (`start`, `stop`; without `stop`: all from `start` on) or a cyclic set (`start`, `run`, `step`)."""

    start: Whole
    stop: Whole | None = None
    run: Whole | None = None
    step: Whole | None = None


class _Digit(msgspec.Struct, forbid_unknown_fields=True):
    extent: Whole | None
    page_step: Whole
    byte_step: Whole


class _AxisMap(msgspec.Struct, forbid_unknown_fields=True):
    axis: Name
    owned: _Owned
    digits: Annotated[list[_Digit], msgspec.Meta(max_length=MAX_AXES)]


class _Geometry(msgspec.Struct, forbid_unknown_fields=True):
    group: Name
    page_stride_bytes: Whole
    axes: Annotated[list[_AxisMap], msgspec.Meta(max_length=MAX_AXES)]


class _Axis(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    name: ShortText
    extent: Whole | None
    tokens_per_index: Whole = 1
    keep_partial: bool = False


class _Field(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: ShortText
    axes: Annotated[tuple[_Axis, ...], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: ShortText
    optional: bool = False


class _Group(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    pool: Name
    num_pages: Whole
    tokens_per_page: Whole | None
    null_page: Whole | None = None
    window_tokens: Whole | None = None


class _Shard(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    field: ShortText
    region: ShortText
    offset_bytes: Whole
    geometry: ShortText


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Annotated[dict[Name, Whole], msgspec.Meta(max_length=MAX_AXES)]
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
    slabs: Annotated[tuple[Slab, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
    shards: Annotated[list[_Shard], msgspec.Meta(max_length=MAX_PER_RANK)]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    fields: Annotated[list[_Field], msgspec.Meta(max_length=MAX_FIELDS)]
    groups: Annotated[list[_Group], msgspec.Meta(max_length=MAX_GROUPS)]
    geometries: Annotated[dict[Name, _Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


class _Reader(Protocol[Read]):
    def decode(self, message: bytes, /) -> Read: ...


# Made at import: engines are met on several threads. msgspec learns a type at its first use, and two threads that make it learn the
# same one end the process (0.22: a segmentation fault in 7 of 10 tries).
_heads: dict[Encoding, _Reader[Head]] = {
    "msgpack": msgspec.msgpack.Decoder(Head),
    "json": msgspec.json.Decoder(Head),
}
_bodies: dict[Encoding, _Reader[_Layout]] = {
    "msgpack": msgspec.msgpack.Decoder(_Layout),
    "json": msgspec.json.Decoder(_Layout),
}


def encode(layout: EngineLayout, encoding: Encoding = "msgpack") -> bytes:
    """The layout as bytes. JSON is indented, for people; both decode to an equal layout."""
    body = _to_wire(layout)
    if encoding == "json":
        return msgspec.json.format(msgspec.json.encode(body), indent=1)
    return msgspec.msgpack.encode(body)


def decode(message: bytes, encoding: Encoding = "msgpack") -> EngineLayout:
    """The layout that `encode` wrote. Raises WireError or LayoutError; never anything else."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"layout message of {len(message)} bytes: more than {MAX_MESSAGE_BYTES} are not accepted")
    try:
        _heads[encoding].decode(message).check(FORM, VERSION)
        body = _bodies[encoding].decode(message)
        _check_names(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {plain(error)}") from None
    _check_sizes(body)
    return _from_wire(body)


def _check_names(body: _Layout) -> None:
    """Raises ValueError for a text that could break a line of a log: those that come in thousands are looked at together."""
    texts = {
        text for field in body.fields for text in (field.name, field.encoding, *(axis.name for axis in field.axes))
    }
    for rank in body.ranks:
        texts.update([region.name for region in rank.regions], [region.device for region in rank.regions])
        texts.update([slab.pool for slab in rank.slabs], [slab.region for slab in rank.slabs])
        texts.update([shard.field for shard in rank.shards], [shard.region for shard in rank.shards])
        texts.update([shard.geometry for shard in rank.shards])
    check_names(texts)


def _check_sizes(body: _Layout) -> None:
    """Raises WireError for more shards or slabs over all ranks than are accepted."""
    for what, count in (
        ("shards", sum(len(rank.shards) for rank in body.ranks)),
        ("slabs", sum(len(rank.slabs) for rank in body.ranks)),
    ):
        if count > MAX_SHARDS:
            raise WireError(
                f"layout of engine '{body.engine}': {count} {what} on {len(body.ranks)} ranks; more than {MAX_SHARDS} are not accepted"
            )


def _to_wire(layout: EngineLayout) -> _Layout:
    keys: dict[Geometry, str] = {}
    ranks = []
    for rank in layout.ranks:
        shards = []
        for shard in rank.shards:
            key = keys.setdefault(shard.geometry, f"g{len(keys)}")
            shards.append(_Shard(shard.field, shard.region, shard.offset_bytes, key))
        # Interned: msgspec leaves out a default only if it is the same object.
        regions = tuple(Region(r.name, r.address, r.size_bytes, intern(r.device)) for r in rank.regions)
        ranks.append(_Rank(rank.rank, dict(rank.place), regions, rank.slabs, shards))
    return _Layout(
        form=FORM,
        version=VERSION,
        engine=layout.engine,
        fields=[_field_form(field) for field in layout.fields],
        groups=[
            _Group(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens) for g in layout.groups
        ],
        geometries={key: _geometry_form(geometry) for geometry, key in keys.items()},
        ranks=ranks,
    )


def _field_form(field: Field) -> _Field:
    axes = tuple(_Axis(axis.name, axis.extent, axis.tokens_per_index, axis.keep_partial) for axis in field.axes)
    return _Field(field.name, axes, field.element_bytes, field.encoding, field.optional)


def _geometry_form(geometry: Geometry) -> _Geometry:
    axes = []
    for mapped in geometry.axes:
        owned = mapped.owned
        if isinstance(owned, Interval):
            held = _Owned(owned.start, owned.stop)
        else:
            held = _Owned(owned.start, run=owned.run, step=owned.step)
        digits = [_Digit(digit.extent, digit.page_step, digit.byte_step) for digit in mapped.digits]
        axes.append(_AxisMap(mapped.axis, held, digits))
    return _Geometry(geometry.group, geometry.page_stride_bytes, axes)


def _from_wire(body: _Layout) -> EngineLayout:
    geometries = {}
    for key, told in body.geometries.items():
        try:
            axes = tuple([_axis_map(axis) for axis in told.axes])
            geometries[key] = Geometry(told.group, told.page_stride_bytes, axes)
        except LayoutError as error:
            raise LayoutError(f"geometry '{key}' ({_user_of(key, body)}), {error}") from None
    return EngineLayout(
        engine=body.engine,
        fields=_fields(body.fields),
        groups=tuple(
            Group(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens) for g in body.groups
        ),
        ranks=tuple([_rank(rank, geometries) for rank in body.ranks]),
    )


def _fields(told: list[_Field]) -> tuple[Field, ...]:
    """Most fields have the axes of the one before."""
    known: dict[tuple[_Axis, ...], tuple[Axis, ...]] = {}
    fields = []
    for field in told:
        axes = known.get(field.axes)
        if axes is None:
            axes = tuple(Axis(a.name, a.extent, a.tokens_per_index, a.keep_partial) for a in field.axes)
            known[field.axes] = axes
        fields.append(Field(field.name, axes, field.element_bytes, field.encoding, field.optional))
    return tuple(fields)


def _axis_map(told: _AxisMap) -> AxisMap:
    try:
        owned = _owned(told.owned)
        digits = tuple([Digit(digit.extent, digit.page_step, digit.byte_step) for digit in told.digits])
    except LayoutError as error:
        raise LayoutError(f"axis '{told.axis}': {error}") from None
    return AxisMap(told.axis, owned, digits)


def _owned(told: _Owned) -> Ownership:
    if (told.run is None) != (told.step is None) or (told.run is not None and told.stop is not None):
        raise LayoutError("give either start and stop, or start, run and step")
    if told.run is not None and told.step is not None:
        return Cyclic(told.start, told.run, told.step)
    return Interval(told.start, told.stop)


def _user_of(key: str, body: _Layout) -> str:
    """The first shard that has a geometry, for a person who looks for it."""
    users = ((rank.rank, shard.field) for rank in body.ranks for shard in rank.shards if shard.geometry == key)
    return next((f"rank {rank}, field '{field}'" for rank, field in users), "of no shard")


def _rank(told: _Rank, geometries: Mapping[str, Geometry]) -> Rank:
    shards = []
    for shard in told.shards:
        geometry = geometries.get(shard.geometry)
        if geometry is None:
            raise WireError(
                f"rank {told.rank}, field '{shard.field}': geometry '{shard.geometry}' is not in the message"
            )
        shards.append(Shard(shard.field, shard.region, shard.offset_bytes, geometry))
    return Rank(told.rank, tuple(told.place.items()), told.regions, told.slabs, tuple(shards))
