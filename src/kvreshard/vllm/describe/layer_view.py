"""Where a layer's pages lie in a rank's memory, from the tensor that vLLM registers, and which bytes belong to a page.

vLLM gives a connector one view `(blocks, head slots, states, cell)` per layer, cut from few storages. Strides come from the tensor,
never from a layout's name. A *block* is a kernel block: `blocks_per_page` of them make a page.

Pages of overlaid groups are the same bytes, so `slabs` are the union of what all layers have of page 0, per region and page
stride; padding that no layer reads is in no slab.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvreshard.kinds import PageView, TensorShape
from kvreshard.model import LayoutError, Slab


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's pages in `region`: extents, and steps in bytes. Page p starts at `offset_bytes + p * page_step`."""

    region: str
    offset_bytes: int
    page_step: int
    blocks_per_page: int
    block_step: int
    slots: int
    slot_step: int
    block_states: int
    state_step: int
    cell_bytes: int

    @property
    def states(self) -> int:
        """States of a whole page."""
        return self.blocks_per_page * self.block_states

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that hold something."""
        return self.slots * self.states * self.cell_bytes

    @property
    def order(self) -> str:
        """Which of head slots (H) and states (N) is the outer loop in memory; kernel blocks are outside both."""
        inner = "NH" if self.slots > 1 and self.block_states > 1 and self.slot_step < self.state_step else "HN"
        return f"{self.blocks_per_page}x{inner}" if self.blocks_per_page > 1 else inner

    def page_view(self, shape: TensorShape) -> PageView:
        """The view of a kind's tensor of this shape, which must match."""
        return PageView(shape, self.slot_step, self.state_step, self.block_states, self.block_step)

    def runs(self) -> list[tuple[int, int]]:
        """Contiguous pieces of page 0: offset in the region and bytes, ascending."""
        loops = sorted(
            (step, extent)
            for step, extent in (
                (self.slot_step, self.slots),
                (self.state_step, self.block_states),
                (self.block_step, self.blocks_per_page),
            )
            if extent > 1
        )
        size = self.cell_bytes
        while loops and loops[0][0] == size:
            size *= loops.pop(0)[1]
        steps = [[index * step for index in range(extent)] for step, extent in reversed(loops)]
        return sorted((self.offset_bytes + sum(parts), size) for parts in product(*steps))

    def opaque_view(self, name: str) -> PageView:
        """The page as equal pieces of bytes of unknown content. Raises LayoutError unless the pieces are equally far apart."""
        runs = self.runs()
        step = runs[1][0] - runs[0][0] if len(runs) > 1 else 0
        if any(start != runs[0][0] + index * step for index, (start, _) in enumerate(runs)):
            raise LayoutError(
                f"page in {len(runs)} pieces at {runs[:4]}: pieces of an opaque page must be equally far apart"
            )
        return PageView(TensorShape(name, len(runs), 1, runs[0][1]), step, runs[0][1], 1, 0)


def layer_view(name: str, tensor: Any, region: str, num_pages: int) -> LayerView:
    """The view of layer `name`, from the tensor that vLLM registered for it. `num_pages`: pages of its pool.

    Raises LayoutError for cells that are not contiguous, blocks that are no multiple of the pages, or kernel blocks that do not tile
    their page.
    """
    item = int(tensor.element_size())
    shape, strides = [int(size) for size in tensor.shape], [int(stride) * item for stride in tensor.stride()]
    if len(shape) != 4:
        raise LayoutError(
            f"layer '{name}': its cache has shape {tuple(shape)}; expected (blocks, head slots, states, cell)"
        )
    blocks, slots, states, cell = shape
    if blocks <= 0 or blocks % num_pages:
        raise LayoutError(f"layer '{name}': its cache has {blocks} blocks, which is no multiple of {num_pages} pages")
    if cell > 1 and strides[3] != item:
        raise LayoutError(f"layer '{name}': the values of a cell are {strides[3]} bytes apart, of {item} bytes each")
    ratio = blocks // num_pages
    view = LayerView(
        region=region,
        offset_bytes=int(tensor.storage_offset()) * item,
        page_step=strides[0] * ratio,
        blocks_per_page=ratio,
        block_step=strides[0] if ratio > 1 else 0,
        slots=slots,
        slot_step=strides[1],
        block_states=states,
        state_step=strides[2],
        cell_bytes=cell * item,
    )
    if ratio > 1 and view.page_bytes != view.page_step:
        raise LayoutError(
            f"layer '{name}': {ratio} kernel blocks of {strides[0]} bytes make no dense page of {view.page_bytes} bytes"
        )
    return view


def slabs(pool: str, views: Iterable[LayerView]) -> tuple[Slab, ...]:
    """The bytes of a page of the pool, over all layers that overlay in it."""
    pieces: defaultdict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for view in views:
        pieces[view.region, view.page_step].update(view.runs())
    found = []
    for (region, page_step), runs in sorted(pieces.items()):
        merged: list[tuple[int, int]] = []
        for start, size in sorted(runs):
            end = start + size
            if merged:
                first, last = merged[-1]
                if start < last or (start == last and end - first <= page_step):
                    merged[-1] = (first, max(last, end))
                    continue
            merged.append((start, end))
        found += [Slab(pool, region, start, page_step, end - start) for start, end in merged]
    return tuple(found)
