"""How does a layout travel between engines, so that a thousand ranks are read in the time of a few?

The plain form (`wire`) says each region and shard of each rank. Here what ranks share is said once, and refers to what it needs by
number:

- fields by shape, axis maps and geometries once each, and an outline (`model.outline`) for all ranks that share it, in columns;
- a rank: its number and place, the number of its outline, an address per region, a device (or one per region), its geometries.

A column is the bytes of a `model.column`, so that nobody reads its numbers one by one; version 1 had lists of numbers. msgpack only; a
person reads the plain form. `decode` takes both, since an older peer writes the plain one. Refused, as WireError or LayoutError: what
`wire` refuses, and numbers of things that are not in the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from kvreshard.model import wire
from kvreshard.model.address import AxisMap
from kvreshard.model.column import NUMBER_BYTES, Column
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Field
from kvreshard.model.fields import Fields
from kvreshard.model.form import Form, Step, Tree
from kvreshard.model.layout import EngineLayout, Geometry, Rank
from kvreshard.model.loops import bounds, int64s, row_kinds
from kvreshard.model.names import Names
from kvreshard.model.outline import Outline, Slabs
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

FORM = "kvreshard.layout.packed"

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_GEOMETRIES * MAX_AXES)]
Texts = Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_PER_RANK)]
Data = Annotated[bytes, msgspec.Meta(max_length=MAX_PER_RANK * NUMBER_BYTES)]
Wholes = Annotated[list[Whole], msgspec.Meta(max_length=MAX_PER_RANK)]
T = TypeVar("T")


class _Shape(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    axes: Annotated[list[AxisForm], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: Name
    optional: bool


class _Geometry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    group: ShortText
    page_stride_bytes: Whole
    axes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_AXES)]


class _Slabs(msgspec.Struct, forbid_unknown_fields=True):
    group_of: Data
    region_of: Data
    offsets_bytes: Data
    strides_bytes: Data
    pages_bytes: Data


class _Outline(msgspec.Struct, forbid_unknown_fields=True):
    regions: Texts
    region_bytes: Data
    slabs: _Slabs
    fields: Data
    region_of: Data
    offsets_bytes: Data
    geometry_of: Data


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Annotated[dict[ShortText, Whole], msgspec.Meta(max_length=MAX_AXES)]
    outline: Number
    addresses: Data
    devices: Texts
    geometries: Numbers


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    shapes: Annotated[list[_Shape], msgspec.Meta(max_length=MAX_FIELDS)]
    fields: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=MAX_FIELDS)]
    shape_of: Data
    groups: Annotated[list[GroupForm], msgspec.Meta(max_length=MAX_GROUPS)]
    maps: Annotated[list[AxisMapForm], msgspec.Meta(max_length=MAX_GEOMETRIES * MAX_AXES)]
    geometries: Annotated[list[_Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    outlines: Annotated[list[_Outline], msgspec.Meta(max_length=MAX_RANKS)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


_SLAB_COLUMNS = _Slabs.__struct_fields__
_OUTLINE_COLUMNS = ("region_bytes", "fields", "region_of", "offsets_bytes", "geometry_of")


def _with_columns(tree: Tree) -> Tree:
    """Version 1 had lists of numbers."""
    outlines = [
        {
            **outline,
            **{name: _data(outline[name]) for name in _OUTLINE_COLUMNS},
            "slabs": dict(
                zip(_SLAB_COLUMNS, map(_data, zip(*outline["slabs"], strict=True)), strict=True)
                if outline["slabs"]
                else dict.fromkeys(_SLAB_COLUMNS, b"").items()
            ),
        }
        for outline in tree["outlines"]
    ]
    ranks = [{**rank, "addresses": _data(rank["addresses"])} for rank in tree["ranks"]]
    return {**tree, "shape_of": _data(tree["shape_of"]), "outlines": outlines, "ranks": ranks}


def _with_lists(tree: Tree) -> Tree:
    outlines = [
        {
            **outline,
            **{name: list(Column(outline[name])) for name in _OUTLINE_COLUMNS},
            "slabs": list(zip(*(Column(outline["slabs"][name]) for name in _SLAB_COLUMNS), strict=True)),
        }
        for outline in tree["outlines"]
    ]
    ranks = [{**rank, "addresses": list(Column(rank["addresses"]))} for rank in tree["ranks"]]
    return {**tree, "shape_of": list(Column(tree["shape_of"])), "outlines": outlines, "ranks": ranks}


def _data(numbers: Any) -> bytes:
    return Column.of(msgspec.convert(numbers, Wholes)).data


PACKED = Form(FORM, (Step(up=_with_columns, down=_with_lists),))


# Made at import: msgspec learns a type at its first use, and two threads that make it learn the same one end the process.
_header = msgspec.msgpack.Decoder(HeaderForm)
_body = msgspec.msgpack.Decoder(_Packed)
_tree = msgspec.msgpack.Decoder(dict[str, Any])


def encode(layout: EngineLayout, version: int | None = None) -> bytes:
    """The layout as bytes, in the newest version unless an earlier one is asked for; `decode` gives an equal one.

    Raises WireError for a version that there is not.
    """
    body = _to_wire(layout)
    if version in (None, PACKED.version):
        return msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(PACKED.lower(msgspec.to_builtins(body, builtin_types=(bytes,)), version))


def _to_wire(layout: EngineLayout) -> _Packed:
    maps: dict[AxisMap, int] = {}
    geometries: dict[Geometry, int] = {}
    outlines: dict[Outline, int] = {}
    ranks = [
        _Rank(
            rank.rank,
            dict(rank.place),
            outlines.setdefault(rank.outline, len(outlines)),
            rank.addresses.data,
            rank.devices[:1] if len(set(rank.devices)) == 1 else rank.devices,
            tuple(geometries.setdefault(geometry, len(geometries)) for geometry in rank.geometries),
        )
        for rank in layout.ranks
    ]
    fields = layout.fields
    return _Packed(
        FORM,
        PACKED.version,
        layout.engine,
        [_Shape([axis_form(axis) for axis in f.axes], f.element_bytes, f.encoding, f.optional) for f in fields.shapes],
        fields.names.all,
        fields.shape_of.data,
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


def _outline_form(outline: Outline, layout: EngineLayout) -> _Outline:
    groups = {group.pool: number for number, group in reversed(list(enumerate(layout.groups)))}
    slabs = outline.slabs
    return _Outline(
        outline.region_names.all,
        outline.region_bytes.data,
        _Slabs(
            Column.of(groups[slabs.pools[pool]] for pool in slabs.pool_of).data,
            slabs.region_of.data,
            slabs.offsets_bytes.data,
            slabs.strides_bytes.data,
            slabs.pages_bytes.data,
        ),
        layout.fields.names.numbers(outline.fields.all).tobytes(),
        outline.region_of.data,
        outline.offsets_bytes.data,
        outline.geometry_of.data,
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
        if header.version == PACKED.version:
            body = _body.decode(message)
        else:
            body = msgspec.convert(PACKED.rise(_tree.decode(message)), _Packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a layout (packed, {len(message)} bytes): {plain(error)}") from None
    try:
        check_names(_names_of(body))
    except ValueError as error:
        raise WireError(f"not a layout (packed, {len(message)} bytes): {error}") from None
    return _layout_of(body)


def _names_of(body: _Packed) -> list[str]:
    """What msgspec has not looked at as a name."""
    found = [*body.fields, *(geometry.group for geometry in body.geometries)]
    for outline in body.outlines:
        found += outline.regions
    for rank in body.ranks:
        found += rank.devices
        found += rank.place
    return found


def _user_of(number: int, body: _Packed) -> str:
    """The first geometry that has a map, and the first rank that has it, for a person who looks for them."""
    for geometry, told in enumerate(body.geometries):
        if number in told.axes:
            ranks = [rank.rank for rank in body.ranks if geometry in rank.geometries]
            return f"geometry {geometry}, {f'rank {ranks[0]}' if ranks else 'on no rank'}"
    return "of no geometry"


def _layout_of(body: _Packed) -> EngineLayout:
    names, shape_of = Names(body.fields), _column(body.shape_of)
    if len(names) != len(shape_of):
        raise WireError(f"{len(names)} fields and {len(shape_of)} numbers of shapes; each field has one")
    _check_numbers(shape_of, len(body.shapes), "shape")
    which, firsts = row_kinds((shape_of.array,))
    shapes = []
    for row in firsts:
        shape = body.shapes[shape_of[row]]
        shapes.append(Field(names[row], axes_of(shape.axes), shape.element_bytes, shape.encoding, shape.optional))
    fields = Fields.numbered(names, shapes, which)
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
        shards, slabs = (
            sum(len(column) for column in columns) // NUMBER_BYTES
            for columns in ([outline.fields for outline in told], [outline.slabs.group_of for outline in told])
        )
        check_sizes(body.engine, len(body.ranks), shards=shards, slabs=slabs)
    outlines = [_outline_of(told, names, body.groups) for told in body.outlines]
    return EngineLayout(
        body.engine,
        fields,
        tuple(group_of(group) for group in body.groups),
        tuple(
            Rank(
                rank.rank,
                tuple(rank.place.items()),
                outlines[rank.outline],
                _column(rank.addresses),
                rank.devices * (len(rank.addresses) // NUMBER_BYTES) if len(rank.devices) == 1 else rank.devices,
                _all(geometries, rank.geometries, "geometry"),
            )
            for rank in body.ranks
        ),
    )


def _outline_of(told: _Outline, names: Names, groups: Sequence[GroupForm]) -> Outline:
    numbers = _column(told.fields)
    _check_numbers(numbers, len(names), "field")
    fields = names if numbers.array.tolist() == list(range(len(names))) else Names(tuple(names[n] for n in numbers))
    group_of, regions = _column(told.slabs.group_of), _column(told.slabs.region_of)
    _check_numbers(group_of, len(groups), "group")
    _check_numbers(regions, len(told.regions), "region")
    # By the number of its first group, which stands for a pool.
    pools = {group.pool: number for number, group in reversed(list(enumerate(groups)))}
    stands_for = int64s([pools[group.pool] for group in groups])
    pool_of, firsts = row_kinds((stands_for[group_of.array],))
    return Outline(
        Names(told.regions),
        _column(told.region_bytes),
        Slabs(
            tuple(groups[group_of[row]].pool for row in firsts),
            Column(pool_of.tobytes()),
            regions,
            _column(told.slabs.offsets_bytes),
            _column(told.slabs.strides_bytes),
            _column(told.slabs.pages_bytes),
        ),
        fields,
        _column(told.region_of),
        _column(told.offsets_bytes),
        _column(told.geometry_of),
    )


def _column(data: bytes) -> Column:
    if len(data) % NUMBER_BYTES:
        raise WireError(f"a column of {len(data)} bytes; numbers have {NUMBER_BYTES} each")
    return Column(data)


def _check_numbers(column: Column, count: int, what: str) -> None:
    """Raises WireError for a number that has no thing."""
    low, high = bounds(column.array) if len(column) else (0, -1)
    if low < 0 or high >= count:
        raise WireError(f"{what} number {low if low < 0 else high} is not in the message, which has {count}")


def _all(things: Sequence[T], numbers: Sequence[int], what: str) -> tuple[T, ...]:
    """The things with these numbers. Raises WireError for a number that has none."""
    if numbers and max(numbers) >= len(things):
        raise WireError(f"{what} number {max(numbers)} is not in the message, which has {len(things)}")
    return tuple([things[number] for number in numbers])
