"""How does an engine's layout travel, and how does a person read it?

One form, two encodings: msgpack on the wire, JSON for people and tools (`docs/wire.md` describes every key, with test
vectors). The form carries its name and version first:

1. `decode` reads only that header; a later version is refused with both numbers, before anything else is looked at, and an
   earlier one is brought up to this one (`form`).
2. The body is decoded strictly by type and within the bounds below, then becomes an `EngineLayout`, which checks itself.

Geometries that several shards share are written once, under a key. Between engines a layout travels packed (`packed`). Refused:
messages above `MAX_MESSAGE_BYTES`, longer lists and texts than the bounds (`parts`), unknown forms, wrong types, keys that do not resolve. Raises WireError, or LayoutError when a
well-formed layout is wrong.
"""

from __future__ import annotations

from sys import intern
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.expect import did_you_mean, expect
from kvreshard.model.field import Field
from kvreshard.model.fields import Fields
from kvreshard.model.form import Form
from kvreshard.model.layout import EngineLayout, Geometry, Rank, Region, Shard, share_outlines
from kvreshard.model.outline import Slab
from kvreshard.model.parts import (
    MAX_AXES,
    MAX_FIELDS,
    MAX_GEOMETRIES,
    MAX_GROUPS,
    MAX_MESSAGE_BYTES,
    MAX_PER_RANK,
    MAX_RANKS,
    AxisForm,
    AxisMapForm,
    GroupForm,
    HeaderForm,
    Whole,
    axes_of,
    axis_form,
    axis_map_form,
    axis_map_of,
    check_sizes,
    group_form,
    group_of,
)
from kvreshard.model.text import Name, ShortText, check_names, plain

FORM = "kvreshard.layout"
LAYOUT = Form(FORM)
VERSION = LAYOUT.version
Encoding = Literal["msgpack", "json"]
Read = TypeVar("Read", covariant=True)


class _Geometry(msgspec.Struct, forbid_unknown_fields=True):
    group: Name
    page_stride_bytes: Whole
    axes: Annotated[list[AxisMapForm], msgspec.Meta(max_length=MAX_AXES)]


class _Field(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    axes: Annotated[list[AxisForm], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: Name
    optional: bool = False


class _Region(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    address: Whole
    size_bytes: Whole
    device: Name = "cpu"


class _Slab(msgspec.Struct, forbid_unknown_fields=True):
    pool: ShortText
    region: ShortText
    offset_bytes: Whole
    page_stride_bytes: Whole
    page_bytes: Whole


class _Shard(msgspec.Struct, forbid_unknown_fields=True):
    field: ShortText
    region: ShortText
    offset_bytes: Whole
    geometry: ShortText


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Annotated[dict[Name, Whole], msgspec.Meta(max_length=MAX_AXES)]
    regions: Annotated[list[_Region], msgspec.Meta(max_length=MAX_PER_RANK)]
    slabs: Annotated[list[_Slab], msgspec.Meta(max_length=MAX_PER_RANK)]
    shards: Annotated[list[_Shard], msgspec.Meta(max_length=MAX_PER_RANK)]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    fields: Annotated[list[_Field], msgspec.Meta(max_length=MAX_FIELDS)]
    groups: Annotated[list[GroupForm], msgspec.Meta(max_length=MAX_GROUPS)]
    geometries: Annotated[dict[Name, _Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


class _Reader(Protocol[Read]):
    def decode(self, message: bytes, /) -> Read: ...


# Made at import: engines are met on several threads. msgspec learns a type at its first use, and two threads that make it learn the
# same one end the process (0.22: a segmentation fault in 7 of 10 tries).
_headers: dict[Encoding, _Reader[HeaderForm]] = {
    "msgpack": msgspec.msgpack.Decoder(HeaderForm),
    "json": msgspec.json.Decoder(HeaderForm),
}
_bodies: dict[Encoding, _Reader[_Layout]] = {
    "msgpack": msgspec.msgpack.Decoder(_Layout),
    "json": msgspec.json.Decoder(_Layout),
}
_trees: dict[Encoding, _Reader[dict[str, Any]]] = {
    "msgpack": msgspec.msgpack.Decoder(dict[str, Any]),
    "json": msgspec.json.Decoder(dict[str, Any]),
}


def encode(layout: EngineLayout, encoding: Encoding = "msgpack", version: int | None = None) -> bytes:
    """The layout as bytes, in the newest version unless an earlier one is asked for.

    JSON is indented, for people; both decode to an equal layout. Raises WireError for a version that there is not.
    """
    body: Any = _to_wire(layout)
    if version not in (None, LAYOUT.version):
        body = LAYOUT.lower(msgspec.to_builtins(body), version)
    if encoding == "json":
        return msgspec.json.format(msgspec.json.encode(body), indent=1)
    return msgspec.msgpack.encode(body)


def decode(message: bytes, encoding: Encoding = "msgpack") -> EngineLayout:
    """The layout that `encode` wrote. Raises WireError or LayoutError; never anything else."""
    expect(message, (bytes, bytearray, memoryview), "a layout message", "what `encode` wrote")
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"layout message of {len(message)} bytes: more than {MAX_MESSAGE_BYTES} are not accepted")
    try:
        header = _headers[encoding].decode(message)
        LAYOUT.check(header.form, header.version)
        if header.version == LAYOUT.version:
            body = _bodies[encoding].decode(message)
        else:
            body = msgspec.convert(LAYOUT.rise(_trees[encoding].decode(message)), _Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"not a layout ({encoding}, {len(message)} bytes): {plain(error)}{did_you_mean(error, _Layout)}"
        ) from None
    check_sizes(
        body.engine,
        len(body.ranks),
        shards=sum(len(rank.shards) for rank in body.ranks),
        slabs=sum(len(rank.slabs) for rank in body.ranks),
    )
    try:
        _check_names(body)
    except ValueError as error:
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {error}") from None
    return _from_wire(body)


def _check_names(body: _Layout) -> None:
    """Raises ValueError for a reference that could break a line of a log; those that are names were looked at as names."""
    names = {*(field.name for field in body.fields), *(group.pool for group in body.groups), *body.geometries}
    for rank in body.ranks:
        here = {
            *(shard.field for shard in rank.shards),
            *(shard.region for shard in rank.shards),
            *(shard.geometry for shard in rank.shards),
            *(slab.pool for slab in rank.slabs),
            *(slab.region for slab in rank.slabs),
        }
        check_names(here - names - {region.name for region in rank.regions})


def _to_wire(layout: EngineLayout) -> _Layout:
    keys: dict[Geometry, str] = {}
    ranks = []
    for rank in layout.ranks:
        shards = []
        for shard in rank.shards:
            key = keys.setdefault(shard.geometry, f"g{len(keys)}")
            shards.append(_Shard(shard.field, shard.region, shard.offset_bytes, key))
        # Interned: msgspec leaves out a default only if it is the same object.
        regions = [_Region(r.name, r.address, r.size_bytes, intern(r.device)) for r in rank.regions]
        slabs = [_Slab(s.pool, s.region, s.offset_bytes, s.page_stride_bytes, s.page_bytes) for s in rank.slabs]
        ranks.append(_Rank(rank.rank, dict(rank.place), regions, slabs, shards))
    return _Layout(
        form=FORM,
        version=LAYOUT.version,
        engine=layout.engine,
        fields=[
            _Field(
                field.name,
                [axis_form(axis) for axis in field.axes],
                field.element_bytes,
                field.encoding,
                field.optional,
            )
            for field in layout.fields
        ],
        groups=[group_form(group) for group in layout.groups],
        geometries={key: _geometry_to_wire(geometry) for geometry, key in keys.items()},
        ranks=ranks,
    )


def _geometry_to_wire(geometry: Geometry) -> _Geometry:
    return _Geometry(geometry.group, geometry.page_stride_bytes, [axis_map_form(mapped) for mapped in geometry.axes])


def _from_wire(body: _Layout) -> EngineLayout:
    geometries = {}
    for key, wire in body.geometries.items():
        try:
            geometries[key] = Geometry(
                wire.group, wire.page_stride_bytes, tuple(axis_map_of(axis) for axis in wire.axes)
            )
        except LayoutError as error:
            raise LayoutError(f"geometry '{key}' ({_user_of(key, body)}), {error}") from None
    return EngineLayout(
        engine=body.engine,
        fields=Fields.of(
            Field(
                field.name,
                axes_of(field.axes),
                field.element_bytes,
                field.encoding,
                field.optional,
            )
            for field in body.fields
        ),
        groups=tuple(group_of(group) for group in body.groups),
        ranks=share_outlines(_rank_from_wire(rank, geometries) for rank in body.ranks),
    )


def _user_of(key: str, body: _Layout) -> str:
    """The first shard that has a geometry, for a person who looks for it."""
    users = ((rank.rank, shard.field) for rank in body.ranks for shard in rank.shards if shard.geometry == key)
    return next((f"rank {rank}, field '{field}'" for rank, field in users), "of no shard")


def _rank_from_wire(rank: _Rank, geometries: dict[str, Geometry]) -> Rank:
    shards = []
    for shard in rank.shards:
        geometry = geometries.get(shard.geometry)
        if geometry is None:
            raise WireError(
                f"rank {rank.rank}, field '{shard.field}': geometry '{shard.geometry}' is not in the message"
            )
        shards.append(Shard(shard.field, shard.region, shard.offset_bytes, geometry))
    return Rank.of(
        rank.rank,
        tuple(rank.place.items()),
        tuple(Region(r.name, r.address, r.size_bytes, r.device) for r in rank.regions),
        tuple(Slab(s.pool, s.region, s.offset_bytes, s.page_stride_bytes, s.page_bytes) for s in rank.slabs),
        tuple(shards),
    )
