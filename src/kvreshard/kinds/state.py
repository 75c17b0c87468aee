"""States of recurrent layers: how do the tensors of one state lie back to back in a page?

A state has no token axis; its page holds it whole. It is one field per projection, each with its own ownership, so that a
projection that is split and one that is whole on every rank (fewer groups than ranks) can share a tensor:

- `Band`: consecutive rows of a convolution state, for one projection, with a tap axis. Channel first lays a row's taps side
  by side, channel last lays the rows of a tap side by side. Columns that speculation adds follow the live taps and are
  scratch: they are in no field (vLLM 0.32 keeps the live taps of a prefilled state in the first columns).
- `Block`: a dense tensor, last axis fastest.

Tensors follow one another without alignment, as vLLM 0.32 places them (`MambaSpec`: shapes in order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvreshard.kinds.page import Piece, Style, TensorShape, dtype_bytes
from kvreshard.kinds.place import size
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval

TENSOR = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """One axis of a projection: its whole extent and what the rank holds."""

    axis: str
    extent: int
    held: Interval


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a convolution state that belong to one projection."""

    name: str
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        return prod(size(part.held) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Convolution:
    """`live_taps` columns that matter of every row of every band, plus `scratch_taps`."""

    bands: tuple[Band, ...]
    live_taps: int
    scratch_taps: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return (
            sum(band.num_rows for band in self.bands) * (self.live_taps + self.scratch_taps) * dtype_bytes(self.dtype)
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A dense tensor of one projection."""

    name: str
    parts: tuple[Part, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(size(part.held) for part in self.parts) * dtype_bytes(self.dtype)


def state_shape(tensors: Sequence[Convolution | Block]) -> tuple[TensorShape, ...]:
    """One cell with all tensors back to back."""
    return (TensorShape(TENSOR, 1, 1, sum(tensor.num_bytes for tensor in tensors)),)


def state_pieces(layer: str, style: Style, tensors: Sequence[Convolution | Block]) -> tuple[Piece, ...]:
    """The fields of all tensors, in page order."""
    pieces: list[Piece] = []
    offset = 0
    for tensor in tensors:
        if isinstance(tensor, Block):
            axes = _dense(tensor.parts, dtype_bytes(tensor.dtype))
            pieces.append(_piece(layer, tensor.name, tensor.parts, axes, tensor.dtype, offset))
        else:
            pieces += _convolution(layer, style, tensor, offset)
        offset += tensor.num_bytes
    return tuple(pieces)


def _convolution(layer: str, style: Style, tensor: Convolution, offset: int) -> list[Piece]:
    element, columns = dtype_bytes(tensor.dtype), tensor.live_taps + tensor.scratch_taps
    num_rows = sum(band.num_rows for band in tensor.bands)
    row_step, tap_step = (columns * element, element) if style.conv_dim_first else (element, num_rows * element)
    pieces, row = [], 0
    for band in tensor.bands:
        taps = Part("tap", tensor.live_taps, Interval(0, tensor.live_taps))
        tap = AxisMap("tap", taps.held, (Digit(tensor.live_taps, 0, tap_step),))
        axes = (*_dense(band.parts, row_step), tap)
        pieces.append(_piece(layer, band.name, (*band.parts, taps), axes, tensor.dtype, offset + row * row_step))
        row += band.num_rows
    return pieces


def _dense(parts: tuple[Part, ...], step: int) -> tuple[AxisMap, ...]:
    axes: list[AxisMap] = []
    for part in reversed(parts):
        axes.append(AxisMap(part.axis, part.held, (Digit(size(part.held), 0, step),)))
        step *= size(part.held)
    return tuple(reversed(axes))


def _piece(layer: str, name: str, parts: tuple[Part, ...], axes: tuple[AxisMap, ...], dtype: str, offset: int) -> Piece:
    shape = tuple(Axis(part.axis, part.extent) for part in parts)
    return Piece(TENSOR, Field(f"{layer}.{name}", shape, dtype_bytes(dtype), dtype), axes, offset)
