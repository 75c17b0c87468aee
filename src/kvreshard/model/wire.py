"""How does an engine's layout travel, and how does a person read it?

One form, two encodings: msgpack on the wire, JSON for people and tools (`docs/wire.md` describes every key, with test
vectors). The form carries its name and version first:

1. `decode` reads only that header; a later version is refused with both numbers, before anything else is looked at.
2. The body is decoded strictly by type, then becomes an `EngineLayout`, which checks itself.

Geometries that several shards share are written once, under a key. Refused: messages above `MAX_MESSAGE_BYTES`, unknown
forms, wrong types, keys that do not resolve. Raises WireError, or LayoutError when a well-formed layout is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Axis, Field
from kvreshard.model.layout import EngineLayout, Geometry, Group, Rank, Region, Shard, Slab
from kvreshard.model.ownership import Cyclic, Interval, Ownership

FORM = "kvreshard.layout"
VERSION = 1
# A 61-layer model on 64 ranks takes about 0.4 MB; a hundredfold is generous, and bounds what a peer can make us hold.
MAX_MESSAGE_BYTES = 64 << 20

Encoding = Literal["msgpack", "json"]


class _Header(msgspec.Struct):
    form: str
    version: int


class _Owned(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    start: int
    stop: int | None = None
    run: int | None = None
    step: int | None = None


class _Digit(msgspec.Struct, forbid_unknown_fields=True):
    extent: int | None
    page_step: int
    byte_step: int


class _AxisMap(msgspec.Struct, forbid_unknown_fields=True):
    axis: str
    owned: _Owned
    digits: list[_Digit]


class _Geometry(msgspec.Struct, forbid_unknown_fields=True):
    group: str
    page_stride_bytes: int
    axes: list[_AxisMap]


class _Axis(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    extent: int | None
    tokens_per_index: int = 1
    keep_partial: bool = False


class _Field(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    axes: list[_Axis]
    element_bytes: int
    encoding: str
    optional: bool = False


class _Group(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    pool: str
    num_pages: int
    tokens_per_page: int | None
    null_page: int | None = None
    window_tokens: int | None = None


class _Region(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    name: str
    address: int
    size_bytes: int
    device: str = "cpu"


class _Slab(msgspec.Struct, forbid_unknown_fields=True):
    pool: str
    region: str
    offset_bytes: int
    page_stride_bytes: int
    page_bytes: int


class _Shard(msgspec.Struct, forbid_unknown_fields=True):
    field: str
    region: str
    offset_bytes: int
    geometry: str


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    place: dict[str, int]
    regions: list[_Region]
    slabs: list[_Slab]
    shards: list[_Shard]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    form: str
    version: int
    engine: str
    fields: list[_Field]
    groups: list[_Group]
    geometries: dict[str, _Geometry]
    ranks: list[_Rank]


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
    read = msgspec.json.decode if encoding == "json" else msgspec.msgpack.decode
    try:
        header = read(message, type=_Header)
        if header.form != FORM:
            raise WireError(f"message is a '{header.form}', not a '{FORM}'")
        if not 1 <= header.version <= VERSION:
            raise WireError(
                f"layout of version {header.version}; this side reads versions 1 to {VERSION}: upgrade the older side"
            )
        body = read(message, type=_Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a layout ({encoding}, {len(message)} bytes): {error}") from None
    return _from_wire(body)


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
        version=VERSION,
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
        ranks=tuple(_ranks_from_wire(body.ranks, geometries)),
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
    return Rank(
        rank.rank,
        tuple(rank.place.items()),
        tuple(Region(r.name, r.address, r.size_bytes, r.device) for r in rank.regions),
        slabs,
        tuple(shards),
    )
