"""The smallest engines and requests that show something, for tests and for a look by hand.

`engine` is one group of attention layers; `request` gives it plain block tables: page 1 upwards at the source, page 2 upwards
at the destination, so that the two sides are never equal by accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvreshard.kinds import Attention, Kind, Style
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout
from kvreshard.model.tables import PageTable, Request, Tokens

GROUP = "full"


def engine(
    name: str,
    *,
    tp: int = 1,
    dcp: int = 1,
    interleave: int = 1,
    stages: Sequence[int] = (0,),
    page: int = 4,
    num_pages: int = 10,
    order: str = "NHD",
    kind: Kind = Attention(2, 2, "bfloat16"),  # noqa: B008 (frozen)
    style: Style = Style(),  # noqa: B008 (frozen)
    null_page: int | None = None,
    padded_page_bytes: int = 0,
) -> EngineLayout:
    """One group of layers `layers.0`, `layers.1`, ... of one kind; `stages`: the pipeline stage of each."""
    layers = [Layer(f"layers.{i}", kind, stage) for i, stage in enumerate(stages)]
    group = PagedGroup(GROUP, tuple(layer.name for layer in layers), page, padded_page_bytes)
    return assemble(
        name,
        layers,
        [group],
        Grid(tp, max(stages) + 1, dcp, interleave),
        order=order,
        num_pages=num_pages,
        style=style,
        null_page=null_page,
        first_address=1_000_000 if name == "prefill" else 2_000_000,
    )


def request(
    src: EngineLayout,
    dst: EngineLayout,
    num_tokens: int,
    intervals: Sequence[Tokens] | None = None,
    *,
    src_pages: Sequence[int] | None = None,
    dst_pages: Sequence[int] | None = None,
    new_pages: Sequence[int] = (),
) -> Request:
    """A request for the group of `engine`; all of its tokens unless `intervals` says otherwise."""
    return Request(
        {GROUP: PageTable(_pages(src, num_tokens, 1) if src_pages is None else src_pages, num_tokens)},
        {GROUP: PageTable(_pages(dst, num_tokens, 2) if dst_pages is None else dst_pages, num_tokens)},
        {GROUP: [(0, num_tokens)] if intervals is None else list(intervals)},
        {GROUP: np.array(new_pages, dtype=np.int64)},
    )


def _pages(layout: EngineLayout, num_tokens: int, first: int) -> list[int]:
    size = layout.group_by_name[GROUP].tokens_per_page
    return list(range(first, first + (1 if size is None else -(-num_tokens // size))))


def changed(request: Request, **parts: Mapping[str, object]) -> Request:
    """The request with some of its parts replaced."""
    names = ("src_tables", "dst_tables", "intervals", "dst_new_pages")
    return Request(*(parts.get(name, getattr(request, name)) for name in names))
