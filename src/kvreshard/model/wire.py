"""How does an engine's layout travel, and how does a person read it?

One form, two encodings: msgpack on the wire, JSON for people and tools (`docs/wire.md` describes every key, with test
vectors). The form carries its name and version first:

1. `decode` reads only that header; a later version is refused with both numbers, before anything else is looked at, and an
   earlier one is brought up to this one (`form`).
2. The body is decoded strictly by type and within the bounds below, then becomes an `EngineLayout`, which checks itself.

Geometries that several shards share are written once, under a key. Refused: messages above `MAX_MESSAGE_BYTES`, longer lists
and texts than the bounds, unknown forms, wrong types, keys that do not resolve. Raises WireError, or LayoutError when a
well-formed layout is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Axis, Field
from kvreshard.model.form import Form
from kvreshard.model.layout import EngineLayout, Geometry, Group, Rank, Region, Shard, share_outlines
from kvreshard.model.outline import Slab
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.text import Name, Reference, check_references, plain

FORM = "kvreshard.layout"
LAYOUT = Form(FORM)
VERSION = LAYOUT.version
# A 61-layer model on 64 ranks takes about 0.4 MB; a hundredfold is generous, and bounds what a peer can make us hold.
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


# Both encodings take the same numbers: JSON knows larger ones, which could be read and not be written again.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Header(msgspec.Struct):
    form: str
    version: int


class _Owned(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
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


class _Axis(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    extent: Whole | None
    tokens_per_index: Whole = 1
    keep_partial: bool = False


class _Field(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    axes: Annotated[list[_Axis], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: Name
    optional: bool = False


class _Group(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    pool: Name
    num_pages: Whole
    tokens_per_page: Whole | None
    null_page: Whole | None = None
    window_tokens: Whole | None = None


class _Region(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: Name
    address: Whole
    size_bytes: Whole
    device: Name = "cpu"


class _Slab(msgspec.Struct, forbid_unknown_fields=True):
    pool: Reference
    region: Reference
    offset_bytes: Whole
    page_stride_bytes: Whole
    page_bytes: Whole


class _Shard(msgspec.Struct, forbid_unknown_fields=True):
    field: Reference
    region: Reference
    offset_bytes: Whole
    geometry: Reference


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
    groups: Annotated[list[_Group], msgspec.Meta(max_length=MAX_GROUPS)]
    geometries: Annotated[dict[Name, _Geometry], msgspec.Meta(max_length=MAX_GEOMETRIES)]
    ranks: Annotated[list[_Rank], msgspec.Meta(max_length=MAX_RANKS)]


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
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(f"layout message of {len(message)} bytes: more than {MAX_MESSAGE_BYTES} are not accepted")
    read = msgspec.json.decode if encoding == "json" else msgspec.msgpack.decode
    try:
        header = read(message, type=_Header)
        LAYOUT.check(header.form, header.version)
        if header.version == LAYOUT.version:
            body = read(message, type=_Layout)
        else:
            body = msgspec.convert(LAYOUT.rise(read(message, type=dict[str, Any])), _Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {plain(error)}") from None
    _check_sizes(body)
    try:
        _check_names(body)
    except ValueError as error:
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {error}") from None
    return _from_wire(body)


def _check_sizes(body: _Layout) -> None:
    for what, count in {
        "shards": sum(len(rank.shards) for rank in body.ranks),
        "slabs": sum(len(rank.slabs) for rank in body.ranks),
    }.items():
        if count > MAX_SHARDS:
            raise WireError(
                f"layout of engine '{body.engine}': {count} {what} on {len(body.ranks)} ranks; more than {MAX_SHARDS} are "
                "not accepted"
            )


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
        check_references(here, names | {region.name for region in rank.regions})


def _to_wire(layout: EngineLayout) -> _Layout:
    keys: dict[Geometry, str] = {}
    ranks = []
    for rank in layout.ranks:
        shards = []
        for shard in rank.shards:
            key = keys.setdefault(shard.geometry, f"g{len(keys)}")
            shards.append(_Shard(shard.field, shard.region, shard.offset_bytes, key))
        regions = [_Region(r.name, r.address, r.size_bytes, r.device) for r in rank.regions]
        slabs = [_Slab(s.pool, s.region, s.offset_bytes, s.page_stride_bytes, s.page_bytes) for s in rank.slabs]
        ranks.append(_Rank(rank.rank, dict(rank.place), regions, slabs, shards))
    return _Layout(
        form=FORM,
        version=LAYOUT.version,
        engine=layout.engine,
        fields=[
            _Field(
                field.name,
                [_Axis(a.name, a.extent, a.tokens_per_index, a.keep_partial) for a in field.axes],
                field.element_bytes,
                field.encoding,
                field.optional,
            )
            for field in layout.fields
        ],
        groups=[
            _Group(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens) for g in layout.groups
        ],
        geometries={key: _geometry_to_wire(geometry) for geometry, key in keys.items()},
        ranks=ranks,
    )


def _geometry_to_wire(geometry: Geometry) -> _Geometry:
    axes = []
    for mapped in geometry.axes:
        owned = mapped.owned
        held = (
            _Owned(owned.start, owned.stop)
            if isinstance(owned, Interval)
            else _Owned(owned.start, run=owned.run, step=owned.step)
        )
        axes.append(_AxisMap(mapped.axis, held, [_Digit(d.extent, d.page_step, d.byte_step) for d in mapped.digits]))
    return _Geometry(geometry.group, geometry.page_stride_bytes, axes)


def _from_wire(body: _Layout) -> EngineLayout:
    geometries = {
        key: Geometry(
            wire.group,
            wire.page_stride_bytes,
            tuple(
                AxisMap(
                    axis.axis,
                    _owned_from_wire(axis),
                    tuple(Digit(d.extent, d.page_step, d.byte_step) for d in axis.digits),
                )
                for axis in wire.axes
            ),
        )
        for key, wire in body.geometries.items()
    }
    return EngineLayout(
        engine=body.engine,
        fields=tuple(
            Field(
                field.name,
                tuple(Axis(a.name, a.extent, a.tokens_per_index, a.keep_partial) for a in field.axes),
                field.element_bytes,
                field.encoding,
                field.optional,
            )
            for field in body.fields
        ),
        groups=tuple(
            Group(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens) for g in body.groups
        ),
        ranks=share_outlines(_ranks_from_wire(body.ranks, geometries)),
    )


def _owned_from_wire(axis: _AxisMap) -> Ownership:
    owned = axis.owned
    if (owned.run is None) != (owned.step is None) or (owned.run is not None and owned.stop is not None):
        raise LayoutError(f"axis '{axis.axis}': give either start and stop, or start, run and step")
    if owned.run is not None and owned.step is not None:
        return Cyclic(owned.start, owned.run, owned.step)
    return Interval(owned.start, owned.stop)


def _ranks_from_wire(ranks: list[_Rank], geometries: dict[str, Geometry]) -> Iterator[Rank]:
    """The ranks; those with equal slabs, as most have, share one tuple, which is then made and checked once."""
    before: list[_Slab] = []
    slabs: tuple[Slab, ...] = ()
    for rank in ranks:
        if rank.slabs != before:
            before = rank.slabs
            slabs = tuple(Slab(s.pool, s.region, s.offset_bytes, s.page_stride_bytes, s.page_bytes) for s in rank.slabs)
        yield _rank_from_wire(rank, slabs, geometries)


def _rank_from_wire(rank: _Rank, slabs: tuple[Slab, ...], geometries: dict[str, Geometry]) -> Rank:
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
        slabs,
        tuple(shards),
    )
