"""Assembles the layout of a whole engine from its layers, groups and order of dimensions.

Every rank keeps one buffer. Each group starts at byte 0 of it, so groups overlay; within a group, tensors of equal shape
form a block of logical shape (L layers, B pages, H slots, N states, C cell bytes) whose memory order is the engine's:

| order | also called | a page of one layer |
|---|---|---|
| `LBNHC` | NHD | contiguous, token after token |
| `LBHNC` | HND | contiguous, head after head |
| `LHBNC` | | one piece per head; heads lie outside the pages |
| `BLNHC`, `BLHNC` | block-outermost | contiguous; the layers of a page side by side |
| `BHLNC` | block-outermost | one piece per head |

1. A rank has the layers of its pipeline stage; the kind of each gives the shape of its page.
2. Groups that overlay in a layer-outermost order get equal page strides: smaller pages are padded.
3. The order gives the strides, the kinds make fields of them, and slabs list the bytes that belong to a page.

The orders and the overlaying are vLLM 0.32's (`v1/kv_cache_layout.py`, `KVCacheTensor`). Refused: an order that cannot hold
padded or unequal pages, a layer in no group or in two, tensors that end outside their region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvreshard.kinds.page import Kind, PageView, Style, TensorShape
from kvreshard.kinds.place import Place
from kvreshard.kinds.ring import Ring
from kvreshard.model import EngineLayout, Field, Geometry, Group, LayoutError, Rank, Region, Shard, Slab, UsageError
from kvreshard.model.changed import replace
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.text import escaped, is_name

ORDERS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
ALIASES: Mapping[str, str] = {"NHD": "LBNHC", "HND": "LBHNC"}
POOL = "pages"
# vLLM keeps page 0 of every pool for "no page" (0.32.0, `v1/core/block_pool.py`, `null_block`).
NULL_PAGE = 0
REGION = "kv"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache: its kind, the pipeline stage that holds it, and whether a peer may lack the cache."""

    name: str
    kind: Kind
    stage: int = 0
    optional: bool = False


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers that share a block table. `tokens_per_page`: tokens of a page on one rank; ignored by states."""

    name: str
    layers: tuple[str, ...]
    tokens_per_page: int
    padded_page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes of an engine: `num_stages` pipeline stages of `tp_size` tensor-parallel ranks each.

    With prefill context parallelism each of these is `pcp_size` ranks. Without decode context parallelism they hold the same, and
    one of them is described; with it they share the sequence, counted over PCP first (vLLM 0.32, `parallel_state.py:2222`).
    """

    tp_size: int = 1
    num_stages: int = 1
    dcp_size: int = 1
    interleave: int = 1
    pcp_size: int = 1

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage that are described: those of PCP only where they hold different tokens."""
        return self.tp_size * (self.pcp_size if self.dcp_size > 1 else 1)

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.stage_ranks

    def place(self, rank: int) -> Place:
        pcp_rank, tp_rank = divmod(rank % self.stage_ranks, self.tp_size)
        shared_by = self.stage_ranks // self.tp_size
        return Place(tp_rank * shared_by + pcp_rank, self.stage_ranks, self.dcp_size, self.interleave)

    def labels(self, rank: int) -> tuple[tuple[str, int], ...]:
        """The place for people."""
        pcp_rank, tp_rank = divmod(rank % self.stage_ranks, self.tp_size)
        pcp = (("pcp", pcp_rank),) if self.pcp_size > 1 else ()
        dcp = (("dcp", self.place(rank).dcp_rank),) if self.dcp_size > 1 else ()
        return (("pp", rank // self.stage_ranks), *pcp, ("tp", tp_rank), *dcp)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of one layer in one group: the bytes of its page with padding, where it starts, and its strides in bytes."""

    layer: str
    shape: TensorShape
    padded: int
    offset: int
    page_stride: int
    slot_step: int
    state_step: int


def assemble(
    engine: str,
    layers: Sequence[Layer],
    groups: Sequence[PagedGroup],
    grid: Grid,
    *,
    order: str,
    num_pages: int,
    style: Style = Style(),  # noqa: B008 (frozen)
    null_page: int | None = None,
    first_address: int = 1 << 40,
) -> EngineLayout:
    """The layout of every rank; region addresses are made up (`relocate` gives real ones). Raises LayoutError."""
    order = ALIASES.get(order, order)
    if order not in ORDERS:
        raise LayoutError(f"order '{order}' is not known; use one of {', '.join([*ALIASES, *ORDERS])}")
    if num_pages <= 0:
        raise LayoutError(f"engine '{engine}': {num_pages} pages; a size must be positive")
    by_name = _check_groups(layers, groups)
    fields: dict[str, Field] = {}
    ranks, address = [], first_address
    for number in range(grid.num_ranks):
        rank = _rank(number, by_name, groups, grid, order, num_pages, style, fields, address)
        address += -(-sum(rank.template.region_bytes) // (1 << 30)) * (1 << 30)
        ranks.append(rank)
    places = {layer.name: place for place, layer in enumerate(layers)}
    return EngineLayout(
        engine,
        tuple(fields[name] for name in sorted(fields, key=lambda name: _place_of(name, places))),
        tuple(_group(group, by_name, grid, num_pages, style, null_page) for group in groups),
        tuple(ranks),
    )


def _place_of(field: str, places: Mapping[str, int]) -> int:
    """The place of the layer that a field belongs to: `<layer>.<part>`."""
    layer = field.rpartition(".")[0]
    while layer not in places:
        layer = layer.rpartition(".")[0]
    return places[layer]


def relocate(layout: EngineLayout, addresses: Mapping[int, Mapping[str, int]], device: str = "cpu") -> EngineLayout:
    """The same layout with every region at a real address: rank -> region name -> address. Raises UsageError where one is not given."""
    expect(layout, EngineLayout, "a layout", "what `kvreshard.describe` returns")
    expect(addresses, Mapping, "the addresses", "rank -> region name -> address")
    expect(device, str, "the device", "as in 'cpu' or 'cuda:0'")
    if not device or not is_name(device):
        raise UsageError(f"device '{escaped(device, 60)}': must be a name, as in 'cpu' or 'cuda:0'")
    for rank in layout.ranks:
        expect(addresses.get(rank.rank, {}), Mapping, f"the addresses of rank {rank.rank}", "region name -> address")
        for name in rank.template.regions:
            if name not in addresses.get(rank.rank, {}):
                raise UsageError(
                    f"engine '{layout.engine}': no address is given for region '{name}' of rank {rank.rank}"
                )
            expect_whole(addresses[rank.rank][name], f"the address of region '{name}' of rank {rank.rank}")
    return replace(
        layout,
        ranks=tuple(
            replace(
                rank,
                addresses=tuple(int(addresses[rank.rank][name]) for name in rank.template.regions),
                devices=(device,) * len(rank.template.regions),
            )
            for rank in layout.ranks
        ),
    )


def _check_groups(layers: Sequence[Layer], groups: Sequence[PagedGroup]) -> dict[str, Layer]:
    by_name = {layer.name: layer for layer in layers}
    if len(by_name) != len(layers):
        raise LayoutError("two layers have one name; names must be unique")
    grouped = [name for group in groups for name in group.layers]
    for name in grouped:
        if name not in by_name:
            raise LayoutError(f"layer '{name}' is in a group, but is not one of the engine's layers")
    times = Counter(grouped)
    for name in by_name:
        if times[name] != 1:
            raise LayoutError(f"layer '{name}' is in {times[name]} groups; each layer is in exactly one")
    return by_name


def _group(
    group: PagedGroup, by_name: Mapping[str, Layer], grid: Grid, num_pages: int, style: Style, null_page: int | None
) -> Group:
    kinds = [by_name[name].kind for name in group.layers]
    if len({kind.is_state for kind in kinds}) > 1:
        raise LayoutError(f"group '{group.name}': mixes states and tokens; give each a group of its own")
    first = kinds[0]
    tokens: int | None = None
    if isinstance(first, Ring):
        tokens = first.capacity(style) * first.tokens_per_state
    elif not first.is_state:
        tokens = group.tokens_per_page * grid.dcp_size
    windows = {kind.window_tokens for kind in kinds}
    window = None if None in windows else max(w for w in windows if w is not None)
    return Group(group.name, POOL, num_pages, tokens, null_page, window)


def _rank(
    number: int,
    by_name: Mapping[str, Layer],
    groups: Sequence[PagedGroup],
    grid: Grid,
    order: str,
    num_pages: int,
    style: Style,
    fields: dict[str, Field],
    address: int,
) -> Rank:
    stage, place = number // grid.stage_ranks, grid.place(number)
    shapes = {
        group.name: [
            (name, shape, max(shape.aligned_page_bytes, group.padded_page_bytes))
            for name in group.layers
            if by_name[name].stage == stage
            for shape in by_name[name].kind.tensors(place, style, group.tokens_per_page)
        ]
        for group in groups
    }
    if order[0] == "L" and sum(bool(found) for found in shapes.values()) > 1:
        stride = max(padded for found in shapes.values() for _, _, padded in found)
        shapes = {group: [(name, shape, stride) for name, shape, _ in found] for group, found in shapes.items()}
    block_bytes = max((sum(padded for _, _, padded in found) for found in shapes.values()), default=0)
    shards: list[Shard] = []
    slabs: dict[Slab, None] = {}
    placed = {group.name: _place_tensors(shapes[group.name], order, num_pages, block_bytes) for group in groups}
    _check_overlay(order, placed)
    for group in groups:
        by_layer: dict[str, dict[str, _Tensor]] = {}
        for tensor in placed[group.name]:
            by_layer.setdefault(tensor.layer, {})[tensor.shape.name] = tensor
            slabs.update(dict.fromkeys(_slabs(tensor, order, block_bytes)))
        for name, own in by_layer.items():
            views = {key: _view(tensor, style) for key, tensor in own.items()}
            for piece in by_name[name].kind.pieces(name, place, style, views):
                tensor = own[piece.tensor]
                geometry = Geometry(group.name, tensor.page_stride, piece.axes)
                shards.append(Shard(piece.field.name, REGION, tensor.offset + piece.offset_bytes, geometry))
                fields.setdefault(piece.field.name, replace(piece.field, optional=by_name[name].optional))
    size = block_bytes * num_pages
    regions = (Region(REGION, address, size),) if size else ()
    return Rank.of(number, grid.labels(number), regions, tuple(slabs), tuple(shards))


def _place_tensors(
    found: Sequence[tuple[str, TensorShape, int]], engine_order: str, num_pages: int, block_bytes: int
) -> list[_Tensor]:
    """Tensors of one group: those of equal shape form one L dimension, one such block after another."""
    classes: dict[tuple[TensorShape, int], list[str]] = {}
    for name, shape, padded in found:
        classes.setdefault((shape, padded), []).append(name)
    tensors, offset = [], 0
    for (shape, padded), names in classes.items():
        order = _order_of(shape, engine_order)
        if padded != shape.page_bytes and order[:2] not in ("LB", "BL"):
            raise LayoutError(
                f"order '{order}': layer '{names[0]}' has pages of {shape.page_bytes} bytes padded to {padded}; orders "
                "that cut pages into heads need pages without padding"
            )
        slot_step, state_step, layer_step, page_stride = _strides(
            shape, padded, len(names), order, num_pages, block_bytes
        )
        for index, name in enumerate(names):
            start = offset + index * layer_step
            tensors.append(_Tensor(name, shape, padded, start, page_stride, slot_step, state_step))
        offset += padded * len(names) * (num_pages if order[0] == "L" else 1)
    return tensors


def _check_overlay(order: str, placed: Mapping[str, Sequence[_Tensor]]) -> None:
    """In a layer-outermost order overlaid groups need one page stride, or a page would not be the same bytes in each."""
    found = {tensor.page_stride: (group, tensor) for group, tensors in placed.items() for tensor in tensors}
    if order[0] != "L" or len(found) == 1 or sum(bool(tensors) for tensors in placed.values()) <= 1:
        return
    shown = "; ".join(
        f"group '{group}' steps {stride} bytes per page for {tensor.shape.slots} heads x {tensor.shape.states} tokens x "
        f"{tensor.shape.cell_bytes} bytes"
        for stride, (group, tensor) in found.items()
    )
    raise LayoutError(f"order '{order}': overlaid groups cut their pages differently ({shown}); use another order")


def _order_of(shape: TensorShape, order: str) -> str:
    """With one head slot nothing is cut: where the head dimension stands among the others changes no address."""
    return {"LHBNC": "LBHNC", "BHLNC": "BLHNC"}.get(order, order) if shape.slots == 1 else order


def _strides(
    shape: TensorShape, padded: int, num_layers: int, order: str, num_pages: int, block_bytes: int
) -> tuple[int, int, int, int]:
    """Byte steps of slots, states, layers and pages, from the innermost dimension outwards."""
    extents = {"L": num_layers, "B": num_pages, "H": shape.slots, "N": shape.states}
    steps, step = {}, shape.cell_bytes
    for dimension in reversed(order[:-1]):
        if dimension in "LB" and order[:2] in ("LB", "BL"):
            step = max(step, padded)
        steps[dimension] = step
        step *= extents[dimension]
    if order[0] == "B":
        steps["B"] = block_bytes
    return steps["H"], steps["N"], steps["L"], steps["B"]


def _view(tensor: _Tensor, style: Style) -> PageView:
    """Kernel blocks cut a page only where the page is one piece; each is laid out like a small page."""
    shape = tensor.shape
    kernel = 0 if style.kernel_tokens is None else style.kernel_tokens // shape.tokens_per_state
    if not kernel or shape.states <= kernel or shape.states % kernel:
        return PageView(shape, tensor.slot_step, tensor.state_step, shape.states, 0)
    kernel_bytes = shape.slots * kernel * shape.cell_bytes
    head_major = tensor.slot_step == shape.states * shape.cell_bytes and shape.slots > 1
    slot_step = kernel * shape.cell_bytes if head_major else tensor.slot_step
    if not head_major and shape.slots > 1 and tensor.state_step == shape.cell_bytes:
        raise LayoutError(
            f"layer '{tensor.layer}': kernel blocks of {kernel} tokens need pages in one piece; its heads are "
            f"{tensor.slot_step} bytes apart"
        )
    return PageView(shape, slot_step, tensor.state_step, kernel, kernel_bytes)


def _slabs(tensor: _Tensor, order: str, block_bytes: int) -> list[Slab]:
    if order[0] == "B":
        return [Slab(POOL, REGION, 0, block_bytes, block_bytes)]
    if _order_of(tensor.shape, order) == "LHBNC":
        size = tensor.shape.states * tensor.shape.cell_bytes
        return [
            Slab(POOL, REGION, tensor.offset + slot * tensor.slot_step, tensor.page_stride, size)
            for slot in range(tensor.shape.slots)
        ]
    return [Slab(POOL, REGION, tensor.offset, tensor.page_stride, tensor.padded)]
