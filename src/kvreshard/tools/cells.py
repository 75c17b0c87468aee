"""The cells of some fields that one rank digests, as a box: its own address maps, cut to what else a coordinate must satisfy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.ownership import Ownership
from kvreshard.model.rank import Group
from kvreshard.plan.transfer import RankTransfer

Int64s = NDArray[np.int64]
Side = Literal["src", "dst"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis: where the rank keeps it, and which ownerships a coordinate must be in besides the rank's own."""

    name: str
    extent: int | None
    mapped: AxisMap
    within: tuple[Ownership, ...]

    def bounds(self) -> tuple[int, int]:
        """The half-open range of coordinates of a bounded axis; empty where the ownerships do not meet."""
        owners = (self.mapped.owned, *self.within)
        stops = [stop for stop in (getattr(owned, "stop", None) for owned in owners) if stop is not None]
        return max(owned.start for owned in owners), min(stops)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Congruent fields of one rank, cut to a box. `bases`: address of each field's first cell in page 0, same order."""

    fields: tuple[str, ...]
    bases: Int64s
    element_bytes: int
    group: Group
    page_stride_bytes: int
    axes: tuple[Cut, ...]
    tokens_per_index: int
    keep_partial: bool

    @property
    def sequence(self) -> Cut | None:
        """The axis without end; None for a state."""
        return next((axis for axis in self.axes if axis.extent is None), None)

    @property
    def bounded(self) -> tuple[Cut, ...]:
        """The axes with an end, in the field's order."""
        return tuple(axis for axis in self.axes if axis.extent is not None)

    def only(self, names: Collection[str] | None) -> Cells:
        """The same cells of the named fields; of all fields for None."""
        if names is None:
            return self
        kept = [index for index, field in enumerate(self.fields) if field in names]
        return replace(self, fields=tuple(self.fields[index] for index in kept), bases=self.bases[kept])


def of_transfer(transfer: RankTransfer, side: Side) -> Cells:
    """The cells that a transfer moves, on one side: the elected part, and what the other side holds."""
    at_source = side == "src"
    axes = [
        Cut(a.name, a.extent, *((a.src, (a.dst.owned, a.chosen)) if at_source else (a.dst, (a.src.owned, a.chosen))))
        for a in transfer.axes
    ]
    return Cells(
        transfer.fields,
        transfer.bases.src if at_source else transfer.bases.dst,
        transfer.element_bytes,
        transfer.src_group if at_source else transfer.dst_group,
        transfer.src_page_stride_bytes if at_source else transfer.dst_page_stride_bytes,
        tuple(axes),
        transfer.tokens_per_index,
        transfer.keep_partial,
    )
