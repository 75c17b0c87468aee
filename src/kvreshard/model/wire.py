"""The wire form of an engine's layout: msgpack between engines, JSON for people and tools.

`docs/wire.md` describes every key, with test vectors. In JSON each rank lists its regions, slabs and shards. In msgpack ranks that differ only
in their addresses, and in what they hold of each axis, share a template (`layout.RankTemplate`). The rest is the same.

1. `decode` reads form and version first (`form`) and refuses others with both numbers.
2. It decodes the body strictly by type and within the bounds below. The body becomes an `EngineLayout`, which checks itself.

Geometries are written once, under a key. Refused: messages above `MAX_MESSAGE_BYTES`, longer lists and texts than the bounds, unknown forms and
keys, wrong types, references that do not resolve. Raises WireError, or LayoutError when a well-formed layout is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import intern
from typing import Annotated, Literal, get_args

import msgspec

from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.errors import LayoutError, UsageError, WireError
from kvreshard.model.expect import did_you_mean, expect
from kvreshard.model.field import MAX_AXES, Axis, Field
from kvreshard.model.form import Head, Number, Whole
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.rank import Geometry, Group, PerRank, Rank, RankTemplate, Region, Shard, Slab
from kvreshard.model.text import Name, ShortText, check_names, plain

FORM, COMPACT_FORM = "kvreshard.layout", "kvreshard.layout.compact"
VERSION = 1
# As JSON, 64 ranks with 160 regions each take 8 MB; this is generous, and bounds what a peer can make us hold.
MAX_MESSAGE_BYTES = 64 << 20
# What a peer can make us compute grows with these. The largest engine that is planned for has 512 ranks; a model has some
# hundred layers of a few fields each.
MAX_RANKS = 1024
MAX_FIELDS = 1 << 14
MAX_GROUPS = 256
MAX_GEOMETRIES = 1 << 16
MAX_SHARDS = 1 << 18

Encoding = Literal["msgpack", "json"]
Place = Annotated[dict[Name, Whole], msgspec.Meta(max_length=MAX_AXES)]


class _OwnershipForm(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An interval (`start`, `stop`; without `stop`: all from `start` on) or a cyclic set (`start`, `run`, `step`)."""

    start: Whole
    stop: Whole | None = None
    run: Whole | None = None
    step: Whole | None = None


class _Digit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    extent: Whole | None
    page_step: Whole
    byte_step: Whole


class _AxisMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    axis: Name
    owned: _OwnershipForm
    digits: Annotated[tuple[_Digit, ...], msgspec.Meta(max_length=MAX_AXES)]


class _Geometry(msgspec.Struct, forbid_unknown_fields=True):
    group: Name
    page_stride_bytes: Whole
    axes: Annotated[tuple[_AxisMap, ...], msgspec.Meta(max_length=MAX_AXES)]


class _Shard(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    field: ShortText
    region: ShortText
    offset_bytes: Whole
    geometry: ShortText


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Place
    regions: Annotated[tuple[Region, ...], PerRank]
    slabs: Annotated[tuple[Slab, ...], PerRank]
    shards: Annotated[list[_Shard], PerRank]


class _FieldForm(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What fields have in common: a `Field` without its name."""

    axes: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: ShortText
    optional: bool = False


class _CompactField(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: ShortText
    form: Number


class _CompactRank(msgspec.Struct, forbid_unknown_fields=True):
    rank: Whole
    place: Place
    template: Number
    addresses: Annotated[tuple[Whole, ...], PerRank]
    devices: Annotated[tuple[ShortText, ...], PerRank]
    geometries: Annotated[tuple[ShortText, ...], PerRank]


Groups = Annotated[tuple[Group, ...], msgspec.Meta(max_length=MAX_GROUPS)]
Geometries = Annotated[dict[Name, _Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    fields: Annotated[tuple[Field, ...], msgspec.Meta(max_length=MAX_FIELDS)]
    groups: Groups
    geometries: Geometries
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


class _Compact(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: Name
    field_forms: Annotated[list[_FieldForm], msgspec.Meta(max_length=MAX_FIELDS)]
    fields: Annotated[list[_CompactField], msgspec.Meta(max_length=MAX_FIELDS)]
    groups: Groups
    geometries: Geometries
    templates: Annotated[list[RankTemplate], msgspec.Meta(max_length=MAX_RANKS)]
    ranks: Annotated[list[_CompactRank], msgspec.Meta(max_length=MAX_RANKS)]


# Made at import, because handshakes run on several threads: msgspec prepares a type at its first use, and two threads that do so at once
# end the process (0.22: a segmentation fault in 7 of 10 tries).
_heads: Mapping[Encoding, msgspec.msgpack.Decoder[Head] | msgspec.json.Decoder[Head]] = {
    "msgpack": msgspec.msgpack.Decoder(Head),
    "json": msgspec.json.Decoder(Head),
}
_compact, _json = msgspec.msgpack.Decoder(_Compact), msgspec.json.Decoder(_Json)


def encode(layout: EngineLayout, encoding: Encoding = "msgpack") -> bytes:
    """The layout as bytes. JSON is indented, for people; both decode to an equal layout. Raises UsageError."""
    expect(layout, EngineLayout, "a layout", "what `kvreshard.describe` returns")
    _check_encoding(encoding)
    return _write_compact(layout) if encoding == "msgpack" else _write_json(layout)


def decode(message: bytes, encoding: Encoding = "msgpack") -> EngineLayout:
    """The layout that `encode` wrote. Raises WireError or LayoutError for any bytes, UsageError for anything else."""
    expect(message, (bytes, bytearray, memoryview), "a layout message", "what `encode` wrote")
    _check_encoding(encoding)
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"layout message of {len(message)} bytes: more than {MAX_MESSAGE_BYTES} are not accepted")
    body: _Compact | _Json
    try:
        _heads[encoding].decode(message).check(COMPACT_FORM if encoding == "msgpack" else FORM, VERSION)
        body = _compact.decode(message) if encoding == "msgpack" else _json.decode(message)
        _check_names(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        meant = did_you_mean(error, _Compact if encoding == "msgpack" else _Json)
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {plain(error)}{meant}") from None
    geometries = _geometries(body)
    ranks = _ranks_of_json(body, geometries) if isinstance(body, _Json) else _ranks_of_compact(body, geometries)
    fields = body.fields if isinstance(body, _Json) else _fields_of_compact(body)
    return EngineLayout(body.engine, fields, body.groups, ranks)


def _check_encoding(encoding: object) -> None:
    if encoding not in get_args(Encoding):
        raise UsageError(f"encoding is {encoding!r:.80}, and must be 'msgpack' or 'json'")


def _check_names(body: _Compact | _Json) -> None:
    """Raises ValueError for a text that could break a line of a log. Texts that come in thousands are checked together."""
    forms = body.fields if isinstance(body, _Json) else body.field_forms
    texts = {axis.name for axes in {form.axes for form in forms} for axis in axes}
    texts.update([field.name for field in body.fields], [form.encoding for form in forms])
    parts: list[_Rank] | list[RankTemplate]
    if isinstance(body, _Json):
        parts = body.ranks
        for rank in body.ranks:
            texts.update(text for region in rank.regions for text in (region.name, region.device))
            texts.update(shard.geometry for shard in rank.shards)
    else:
        parts = body.templates
        texts.update(name for template in body.templates for name in template.regions)
        texts.update(text for other in body.ranks for text in (*other.geometries, *other.devices))
    for part in parts:
        texts.update([slab.pool for slab in part.slabs], [slab.region for slab in part.slabs])
        texts.update([shard.field for shard in part.shards], [shard.region for shard in part.shards])
    check_names(texts)


def _check_sizes(engine: str, num_ranks: int, parts: Sequence[_Rank | RankTemplate]) -> None:
    """Raises WireError for more shards or slabs over all ranks, or templates, than are accepted."""
    for what, count in (
        ("shards", sum(len(part.shards) for part in parts)),
        ("slabs", sum(len(part.slabs) for part in parts)),
    ):
        if count > MAX_SHARDS:
            raise WireError(
                f"layout of engine '{engine}': {count} {what} on {num_ranks} ranks; more than {MAX_SHARDS} are not accepted"
            )


def _write_json(layout: EngineLayout) -> bytes:
    keys = _keys(layout)
    ranks = []
    for rank in layout.ranks:
        shards = [_Shard(s.field, s.region, s.offset_bytes, keys[s.geometry]) for s in rank.shards]
        # Interned: msgspec leaves out a default only if it is the same object.
        regions = tuple(Region(r.name, r.address, r.size_bytes, intern(r.device)) for r in rank.regions)
        ranks.append(_Rank(rank.rank, dict(rank.place), regions, rank.slabs, shards))
    body = _Json(FORM, VERSION, layout.engine, layout.fields, layout.groups, _geometry_forms(keys), ranks)
    return msgspec.json.format(msgspec.json.encode(body), indent=1)


def _write_compact(layout: EngineLayout) -> bytes:
    keys = _keys(layout)
    numbers: dict[RankTemplate, int] = {}
    ranks = [
        _CompactRank(
            rank.rank,
            dict(rank.place),
            numbers.setdefault(rank.template, len(numbers)),
            rank.addresses,
            rank.devices[:1] if len(set(rank.devices)) == 1 else rank.devices,
            tuple(keys[geometry] for geometry in rank.geometries),
        )
        for rank in layout.ranks
    ]
    forms: dict[_FieldForm, int] = {}
    fields = []
    for field in layout.fields:
        form = _FieldForm(field.axes, field.element_bytes, field.encoding, field.optional)
        fields.append(_CompactField(field.name, forms.setdefault(form, len(forms))))
    geometries = _geometry_forms(keys)
    return msgspec.msgpack.encode(
        _Compact(
            COMPACT_FORM, VERSION, layout.engine, list(forms), fields, layout.groups, geometries, list(numbers), ranks
        )
    )


def _keys(layout: EngineLayout) -> dict[Geometry, str]:
    """A key for every geometry, in the order of the shards that have them."""
    keys: dict[Geometry, str] = {}
    for rank in layout.ranks:
        for geometry in rank.geometries:
            keys.setdefault(geometry, f"g{len(keys)}")
    return keys


def _geometry_forms(keys: Mapping[Geometry, str]) -> dict[str, _Geometry]:
    return {key: _geometry_form(geometry) for geometry, key in keys.items()}


def _geometry_form(geometry: Geometry) -> _Geometry:
    axes = []
    for mapped in geometry.axes:
        owned = mapped.owned
        if isinstance(owned, Interval):
            held = _OwnershipForm(owned.start, owned.stop)
        else:
            held = _OwnershipForm(owned.start, run=owned.run, step=owned.step)
        digits = tuple([_Digit(digit.extent, digit.page_step, digit.byte_step) for digit in mapped.digits])
        axes.append(_AxisMap(mapped.axis, held, digits))
    return _Geometry(geometry.group, geometry.page_stride_bytes, tuple(axes))


def _geometries(body: _Compact | _Json) -> dict[str, Geometry]:
    """The geometries by key. Most of them share all of their maps but one, so each distinct map is made once."""
    maps: dict[_AxisMap, AxisMap] = {}
    geometries = {}
    for key, form in body.geometries.items():
        try:
            axes = tuple([maps.get(axis) or maps.setdefault(axis, _axis_map(axis)) for axis in form.axes])
            geometries[key] = Geometry(form.group, form.page_stride_bytes, axes)
        except LayoutError as error:
            raise LayoutError(f"geometry '{key}' ({_user_of(key, body)}), {error}") from None
    return geometries


def _axis_map(form: _AxisMap) -> AxisMap:
    try:
        owned = _owned(form.owned)
        digits = tuple([Digit(digit.extent, digit.page_step, digit.byte_step) for digit in form.digits])
    except LayoutError as error:
        raise LayoutError(f"axis '{form.axis}': {error}") from None
    return AxisMap(form.axis, owned, digits)


def _owned(form: _OwnershipForm) -> Ownership:
    if (form.run is None) != (form.step is None) or (form.run is not None and form.stop is not None):
        raise LayoutError("give either start and stop, or start, run and step")
    if form.run is not None and form.step is not None:
        return Cyclic(form.start, form.run, form.step)
    return Interval(form.start, form.stop)


def _user_of(key: str, body: _Compact | _Json) -> str:
    """The first rank that has a geometry, and in JSON a field that has it there, for the error."""
    if isinstance(body, _Json):
        held = [(rank.rank, shard.field) for rank in body.ranks for shard in rank.shards if shard.geometry == key]
        return f"rank {held[0][0]}, field '{held[0][1]}'" if held else "of no shard"
    users = [rank.rank for rank in body.ranks if key in rank.geometries]
    return f"rank {users[0]}" if users else "of no rank"


def _ranks_of_json(body: _Json, geometries: Mapping[str, Geometry]) -> tuple[Rank, ...]:
    _check_sizes(body.engine, len(body.ranks), body.ranks)
    ranks = []
    for form in body.ranks:
        shards = []
        for shard in form.shards:
            geometry = geometries.get(shard.geometry)
            if geometry is None:
                raise WireError(
                    f"rank {form.rank}, field '{shard.field}': geometry '{shard.geometry}' is not in the message"
                )
            shards.append(Shard(shard.field, shard.region, shard.offset_bytes, geometry))
        ranks.append(Rank.of(form.rank, tuple(form.place.items()), form.regions, form.slabs, shards))
    return tuple(ranks)


def _fields_of_compact(body: _Compact) -> tuple[Field, ...]:
    fields = []
    for field in body.fields:
        if field.form >= len(body.field_forms):
            raise WireError(
                f"field '{field.name}': form {field.form} is not in the message, which has {len(body.field_forms)}"
            )
        form = body.field_forms[field.form]
        fields.append(Field(field.name, form.axes, form.element_bytes, form.encoding, form.optional))
    return tuple(fields)


def _ranks_of_compact(body: _Compact, geometries: Mapping[str, Geometry]) -> tuple[Rank, ...]:
    for rank in body.ranks:
        if rank.template >= len(body.templates):
            raise WireError(
                f"rank {rank.rank}: template {rank.template} is not in the message, which has {len(body.templates)}"
            )
        for key in rank.geometries:
            if key not in geometries:
                raise WireError(f"rank {rank.rank}: geometry '{key}' is not in the message")
    _check_sizes(body.engine, len(body.ranks), [body.templates[rank.template] for rank in body.ranks])
    _check_sizes(body.engine, len(body.ranks), body.templates)
    return tuple(
        [
            Rank(
                form.rank,
                tuple(form.place.items()),
                body.templates[form.template],
                form.addresses,
                form.devices * len(form.addresses) if len(form.devices) == 1 else form.devices,
                tuple([geometries[key] for key in form.geometries]),
            )
            for form in body.ranks
        ]
    )
