"""How does a layout travel between engines, so that a thousand ranks are read in the time of a few?

The plain form (`wire`) says each region and shard of each rank. Here what ranks share is said once, and refers to what it needs by
number:

- fields by shape, axis maps and geometries once each, and an outline (`model.outline`) for all ranks that share it, in columns;
- a rank: its number and place, the number of its outline, an address per region, a device (or one per region), its geometries.

msgpack only; a person reads the plain form. `decode` takes both, since an older peer writes the plain one. Refused, as WireError or
LayoutError: what `wire` refuses, and numbers of things that are not in the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from kvreshard.model import wire
from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Field
from kvreshard.model.form import Form
from kvreshard.model.layout import EngineLayout, Geometry, Rank
from kvreshard.model.outline import Outline, Slab, firsts
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
from kvreshard.model.text import Name, plain

FORM = "kvreshard.layout.packed"
PACKED = Form(FORM)

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_GEOMETRIES * MAX_AXES)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
Wholes = Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
T = TypeVar("T")


class _Shape(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    axes: Annotated[list[AxisForm], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: Name
    optional: bool


class _Geometry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    group: Name
    page_stride_bytes: Whole
    axes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_AXES)]


class _Slab(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    group: Number
    region: Number
    offset_bytes: Whole
    page_stride_bytes: Whole
    page_bytes: Whole


class _Outline(msgspec.Struct, forbid_unknown_fields=True):
    regions: Names
    region_bytes: Wholes
    slabs: Annotated[list[_Slab], msgspec.Meta(max_length=MAX_PER_RANK)]
    fields: Numbers
    region_of: Numbers
    offsets_bytes: Wholes
    geometry_of: Numbers


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Annotated[dict[Name, Whole], msgspec.Meta(max_length=MAX_AXES)]
    outline: Number
    addresses: Wholes
    devices: Names
    geometries: Numbers


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    shapes: Annotated[list[_Shape], msgspec.Meta(max_length=MAX_FIELDS)]
    fields: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_FIELDS)]
    shape_of: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_FIELDS)]
    groups: Annotated[list[GroupForm], msgspec.Meta(max_length=MAX_GROUPS)]
    maps: Annotated[list[AxisMapForm], msgspec.Meta(max_length=MAX_GEOMETRIES * MAX_AXES)]
    geometries: Annotated[list[_Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    outlines: Annotated[list[_Outline], msgspec.Meta(max_length=MAX_RANKS)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


# Made at import: msgspec learns a type at its first use, and two threads that make it learn the same one end the process.
_header = msgspec.msgpack.Decoder(HeaderForm)
_body = msgspec.msgpack.Decoder(_Packed)


def encode(layout: EngineLayout) -> bytes:
    """The layout as bytes; `decode` gives an equal one."""
    shapes: dict[object, int] = {}
    maps: dict[AxisMap, int] = {}
    geometries: dict[Geometry, int] = {}
    outlines: dict[Outline, int] = {}
    shape_of = [
        shapes.setdefault((field.axes, field.element_bytes, field.encoding, field.optional), len(shapes))
        for field in layout.fields
    ]
    firsts = [layout.fields[shape_of.index(number)] for number in range(len(shapes))]
    ranks = [
        _Rank(
            rank.rank,
            dict(rank.place),
            outlines.setdefault(rank.outline, len(outlines)),
            rank.addresses,
            rank.devices[:1] if len(set(rank.devices)) == 1 else rank.devices,
            tuple(geometries.setdefault(geometry, len(geometries)) for geometry in rank.geometries),
        )
        for rank in layout.ranks
    ]
    return msgspec.msgpack.encode(
        _Packed(
            FORM,
            PACKED.version,
            layout.engine,
            [_Shape([axis_form(axis) for axis in f.axes], f.element_bytes, f.encoding, f.optional) for f in firsts],
            tuple(field.name for field in layout.fields),
            tuple(shape_of),
            [group_form(group) for group in layout.groups],
            # In the order of their numbers: `maps` is filled as geometries are written.
            geometries=[
                _Geometry(
                    geometry.group,
                    geometry.page_stride_bytes,
                    tuple(maps.setdefault(mapped, len(maps)) for mapped in geometry.axes),
                )
                for geometry in geometries
            ],
            maps=[axis_map_form(mapped) for mapped in maps],
            outlines=[_outline_form(outline, layout) for outline in outlines],
            ranks=ranks,
        )
    )


def _outline_form(outline: Outline, layout: EngineLayout) -> _Outline:
    fields = {field.name: number for number, field in enumerate(layout.fields)}
    pools = {group.pool: number for number, group in reversed(list(enumerate(layout.groups)))}
    regions = {name: number for number, name in enumerate(outline.region_names)}
    return _Outline(
        outline.region_names,
        outline.region_bytes,
        [
            _Slab(pools[s.pool], regions[s.region], s.offset_bytes, s.page_stride_bytes, s.page_bytes)
            for s in outline.slabs
        ],
        tuple(fields[name] for name in outline.fields),
        outline.region_of,
        outline.offsets_bytes,
        outline.geometry_of,
    )


def decode(message: bytes) -> EngineLayout:
    """The layout that `encode` wrote, here or in the plain form. Raises WireError or LayoutError; never anything else."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"layout message of {len(message)} bytes: more than {MAX_MESSAGE_BYTES} are not accepted")
    try:
        header = _header.decode(message)
        if header.form == wire.FORM:
            return wire.decode(message)
        PACKED.check(header.form, header.version)
        body = _body.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a layout (packed, {len(message)} bytes): {plain(error)}") from None
    return _layout_of(body)


def _user_of(number: int, body: _Packed) -> str:
    """The first geometry that has a map, and the first rank that has it, for a person who looks for them."""
    for geometry, told in enumerate(body.geometries):
        if number in told.axes:
            ranks = [rank.rank for rank in body.ranks if geometry in rank.geometries]
            return f"geometry {geometry}, {f'rank {ranks[0]}' if ranks else 'on no rank'}"
    return "of no geometry"


def _layout_of(body: _Packed) -> EngineLayout:
    if len(body.fields) != len(body.shape_of):
        raise WireError(f"{len(body.fields)} fields and {len(body.shape_of)} numbers of shapes; each field has one")
    shapes = _all(body.shapes, body.shape_of, "shape")
    first = firsts(body.shape_of, zip(body.fields, shapes, strict=True))
    like = {
        number: Field(name, axes_of(shape.axes), shape.element_bytes, shape.encoding, shape.optional)
        for number, (name, shape) in first.items()
    }
    fields = tuple(like[number].named(name) for number, name in zip(body.shape_of, body.fields, strict=True))
    maps = []
    for number, mapped in enumerate(body.maps):
        try:
            maps.append(axis_map_of(mapped))
        except LayoutError as error:
            raise LayoutError(f"engine '{body.engine}', map {number} ({_user_of(number, body)}), {error}") from None
    geometries = [
        Geometry(told.group, told.page_stride_bytes, _all(maps, told.axes, "map")) for told in body.geometries
    ]
    for told in (_all(body.outlines, [rank.outline for rank in body.ranks], "outline"), body.outlines):
        shards, slabs = sum(len(outline.fields) for outline in told), sum(len(outline.slabs) for outline in told)
        check_sizes(body.engine, len(body.ranks), shards=shards, slabs=slabs)
    outlines = [_outline_of(told, body) for told in body.outlines]
    return EngineLayout(
        body.engine,
        fields,
        tuple(group_of(group) for group in body.groups),
        tuple(
            Rank(
                rank.rank,
                tuple(rank.place.items()),
                outlines[rank.outline],
                rank.addresses,
                rank.devices * len(rank.addresses) if len(rank.devices) == 1 else rank.devices,
                _all(geometries, rank.geometries, "geometry"),
            )
            for rank in body.ranks
        ),
    )


def _outline_of(told: _Outline, body: _Packed) -> Outline:
    groups = _all(body.groups, [slab.group for slab in told.slabs], "group")
    regions = _all(told.regions, [slab.region for slab in told.slabs], "region")
    return Outline(
        told.regions,
        told.region_bytes,
        tuple(
            Slab(group.pool, region, slab.offset_bytes, slab.page_stride_bytes, slab.page_bytes)
            for group, region, slab in zip(groups, regions, told.slabs, strict=True)
        ),
        _all(body.fields, told.fields, "field"),
        told.region_of,
        told.offsets_bytes,
        told.geometry_of,
    )


def _all(things: Sequence[T], numbers: Sequence[int], what: str) -> tuple[T, ...]:
    """The things with these numbers. Raises WireError for a number that has none."""
    if numbers and max(numbers) >= len(things):
        raise WireError(f"{what} number {max(numbers)} is not in the message, which has {len(things)}")
    return tuple([things[number] for number in numbers])
