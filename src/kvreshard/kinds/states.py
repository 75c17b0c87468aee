"""States of recurrent layers: Mamba, gated delta networks, linear attention and short convolutions.

A state has no token axis; its page holds it whole. It is one field per projection, each with its own ownership, so that a projection that
is split and one that is whole on every rank (fewer groups than ranks) can share a tensor.

| kind | fields of `<layer>` |
|---|---|
| `Mamba2` | `conv.x` (head, channel, tap), `conv.B`, `conv.C` (group, state, tap), `ssm` (head, channel, state) |
| `Mamba1` | `conv.x` (channel, tap), `ssm` (channel, state) |
| `GatedDelta` | `conv.q`, `conv.k` (head, channel, tap), `conv.v` (value head, value channel, tap), `ssm` (value head, value channel, key channel) |
| `LinearState` | `ssm` (head, row, column) |
| `ShortConv` | `conv.x` (channel, tap), split by ranks or whole on each |

The tensors of a state follow one another without alignment, as vLLM 0.32 places them (`MambaSpec`: shapes in order):

- `Convolution`: rows of several projections, each a `Band`, with a tap axis. Channel first lays the taps of a row side by side, channel last
  the rows of a tap. Columns that speculation adds follow the live taps and are scratch: no field has them (vLLM 0.32 keeps the live taps
  of a prefilled state in the first columns).
- `Block`: a dense tensor, last axis fastest.

Mamba-2 with fewer groups than ranks has one whole group on each rank (vLLM 0.32 starts only where groups divide by ranks or there is
one; the rule here agrees with both). Kimi's delta attention (KDA) is a `GatedDelta` with as many key as value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes
from kvreshard.kinds.place import Place, size, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError

TENSOR = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """One axis of a projection: its whole extent and what the rank holds of it."""

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
    def num_rows(self) -> int:
        return sum(band.num_rows for band in self.bands)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * (self.live_taps + self.scratch_taps) * dtype_bytes(self.dtype)

    def pieces(self, layer: str, style: Style, offset: int) -> list[Piece]:
        element, columns = dtype_bytes(self.dtype), self.live_taps + self.scratch_taps
        row_step, tap_step = (
            (columns * element, element) if style.conv_dim_first else (element, self.num_rows * element)
        )
        taps = Part("tap", self.live_taps, whole(self.live_taps))
        tap = AxisMap("tap", taps.held, (Digit(self.live_taps, 0, tap_step),))
        pieces, row = [], 0
        for band in self.bands:
            axes = (*_dense(band.parts, row_step), tap)
            pieces.append(
                _piece(f"{layer}.{band.name}", (*band.parts, taps), axes, self.dtype, offset + row * row_step)
            )
            row += band.num_rows
        return pieces


@dataclass(frozen=True, slots=True)
class Block:
    """A dense tensor of one projection."""

    name: str
    parts: tuple[Part, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(size(part.held) for part in self.parts) * dtype_bytes(self.dtype)

    def pieces(self, layer: str, _style: Style, offset: int) -> list[Piece]:
        axes = _dense(self.parts, dtype_bytes(self.dtype))
        return [_piece(f"{layer}.{self.name}", self.parts, axes, self.dtype, offset)]


def _dense(parts: tuple[Part, ...], step: int) -> tuple[AxisMap, ...]:
    axes: list[AxisMap] = []
    for part in reversed(parts):
        axes.append(AxisMap(part.axis, part.held, (Digit(size(part.held), 0, step),)))
        step *= size(part.held)
    return tuple(reversed(axes))


def _piece(name: str, parts: tuple[Part, ...], axes: tuple[AxisMap, ...], dtype: str, offset: int) -> Piece:
    shape = tuple(Axis(part.axis, part.extent) for part in parts)
    return Piece(TENSOR, Field(name, shape, dtype_bytes(dtype), dtype), axes, offset)


@dataclass(frozen=True, slots=True)
class State:
    """What all kinds of state share. A kind adds its sizes, those of the whole model, and `layout`.

    `conv_kernel` taps are counted with the newest token, so `conv_kernel - 1` of them are kept.
    """

    is_state: ClassVar[bool] = True
    window_tokens: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), 2 if one.name == "conv_kernel" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise LayoutError(f"state {self}: {one.name} is {value}; it must be at least {least}")

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        """The tensors of one state on one rank, in page order. `scratch_taps`: columns that speculation adds to a convolution."""
        raise NotImplementedError

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        num_bytes = sum(tensor.num_bytes for tensor in self.layout(place, style.speculative_tokens))
        return (TensorShape(TENSOR, 1, 1, num_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        offset = 0
        for tensor in self.layout(place, style.speculative_tokens):
            pieces += tensor.pieces(layer, style, offset)
            offset += tensor.num_bytes
        return tuple(pieces)


def _split(axis: str, extent: int, place: Place) -> Part:
    return Part(axis, extent, place.part(extent))


def _whole(axis: str, extent: int) -> Part:
    return Part(axis, extent, whole(extent))


@dataclass(frozen=True, slots=True)
class Mamba2(State):
    """x and the recurrent state are split by head, B and C by group."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        head, channel = _split("head", self.num_heads, place), _whole("channel", self.head_size)
        group, state = _split("group", self.num_groups, place), _whole("state", self.state_size)
        bands = Band("conv.x", (head, channel)), Band("conv.B", (group, state)), Band("conv.C", (group, state))
        return (
            Convolution(bands, self.conv_kernel - 1, scratch_taps, self.conv_dtype),
            Block("ssm", (head, channel, state), self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class Mamba1(State):
    """All of it is split by channel. Speculation does not widen the convolution."""

    num_channels: int
    state_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        channel, state = _split("channel", self.num_channels, place), _whole("state", self.state_size)
        return (
            Convolution((Band("conv.x", (channel,)),), self.conv_kernel - 1, 0, self.conv_dtype),
            Block("ssm", (channel, state), self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class GatedDelta(State):
    """Key and value heads may differ in number and width. The rows of the convolution are q, then k, then v, each split by its own heads
    (vLLM 0.32, `MambaStateShapeCalculator.gated_delta_net_state_shape`).
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        key = _split("head", self.num_key_heads, place), _whole("channel", self.key_size)
        value = _split("head", self.num_value_heads, place), _whole("channel", self.value_size)
        bands = Band("conv.q", key), Band("conv.k", key), Band("conv.v", value)
        return (
            Convolution(bands, self.conv_kernel - 1, scratch_taps, self.conv_dtype),
            Block("ssm", (*value, _whole("key_channel", self.key_size)), self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class LinearState(State):
    """One square matrix per head: linear attention without a convolution (MiniMax, Bailing)."""

    num_heads: int
    head_size: int
    state_dtype: str

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        head, row, column = (
            _split("head", self.num_heads, place),
            _whole("row", self.head_size),
            _whole("column", self.head_size),
        )
        return (Block("ssm", (head, row, column), self.state_dtype),)


@dataclass(frozen=True, slots=True)
class ShortConv(State):
    """A convolution without more (LFM2). `is_replicated`: all channels on every rank (Qwen4-Exp)."""

    num_channels: int
    conv_kernel: int
    conv_dtype: str
    is_replicated: bool = False

    def layout(self, place: Place, scratch_taps: int) -> tuple[Convolution | Block, ...]:
        channel = (
            _whole("channel", self.num_channels) if self.is_replicated else _split("channel", self.num_channels, place)
        )
        return (Convolution((Band("conv.x", (channel,)),), self.conv_kernel - 1, scratch_taps, self.conv_dtype),)
