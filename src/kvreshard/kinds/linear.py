"""Linear attention states: gated delta networks (Qwen3-Next, Qwen3.5) and relatives.

| kind | fields of `<layer>` |
|---|---|
| `GatedDelta` | `conv.q`, `conv.k` (key head, channel, tap), `conv.v` (value head, channel, tap), `ssm` (value head, value channel, key channel) |
| `LinearState` | `ssm` (head, row, column) |
| `ShortConv` | `conv.x` (channel, tap), split by ranks or whole on each |

A gated delta convolution's rows are q, then k, then v, each split by its own heads (vLLM 0.32,
`MambaStateShapeCalculator.gated_delta_net_state_shape`). Kimi's delta attention (KDA) is one with as many key as value heads.
`LinearState` is the state of attention without a convolution (MiniMax, Bailing), `ShortConv` a convolution without more (LFM2; Qwen4-Exp, whole on
every rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place, whole
from kvreshard.kinds.state import Band, Block, Convolution, Part, state_pieces, state_shape
from kvreshard.model import LayoutError


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Sizes of the whole model; key and value heads may differ in number and width."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def __post_init__(self) -> None:
        if min(self.num_key_heads, self.num_value_heads, self.key_size, self.value_size, self.conv_kernel - 1) <= 0:
            raise LayoutError(f"gated delta state with a size that is not positive: {self}")

    @property
    def is_state(self) -> bool:
        return True

    @property
    def window_tokens(self) -> int | None:
        return None

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        return state_shape(self._tensors(place, style))

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        return state_pieces(layer, style, self._tensors(place, style))

    def _tensors(self, place: Place, style: Style) -> tuple[Convolution | Block, ...]:
        key_head = Part("head", self.num_key_heads, place.part(self.num_key_heads))
        value_head = Part("head", self.num_value_heads, place.part(self.num_value_heads))
        key, value = (Part("channel", width, whole(width)) for width in (self.key_size, self.value_size))
        bands = (
            Band("conv.q", (key_head, key)),
            Band("conv.k", (key_head, key)),
            Band("conv.v", (value_head, value)),
        )
        inner = Part("key_channel", self.key_size, whole(self.key_size))
        return (
            Convolution(bands, self.conv_kernel - 1, style.speculative_tokens, self.conv_dtype),
            Block("ssm", (value_head, value, inner), self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class LinearState:
    """One square matrix per head, of the whole model."""

    num_heads: int
    head_size: int
    state_dtype: str

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_size) <= 0:
            raise LayoutError(f"linear attention state with a size that is not positive: {self}")

    @property
    def is_state(self) -> bool:
        return True

    @property
    def window_tokens(self) -> int | None:
        return None

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        return state_shape(self._tensors(place))

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        return state_pieces(layer, style, self._tensors(place))

    def _tensors(self, place: Place) -> tuple[Convolution | Block, ...]:
        head = Part("head", self.num_heads, place.part(self.num_heads))
        row, column = (Part(name, self.head_size, whole(self.head_size)) for name in ("row", "column"))
        return (Block("ssm", (head, row, column), self.state_dtype),)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """`num_channels` channels of the whole model, of which `conv_kernel - 1` taps are kept. `is_replicated`: all on every rank."""

    num_channels: int
    conv_kernel: int
    conv_dtype: str
    is_replicated: bool = False

    def __post_init__(self) -> None:
        if min(self.num_channels, self.conv_kernel - 1) <= 0:
            raise LayoutError(f"short convolution with a size that is not positive: {self}")

    @property
    def is_state(self) -> bool:
        return True

    @property
    def window_tokens(self) -> int | None:
        return None

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        return state_shape(self._tensors(place, style))

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        return state_pieces(layer, style, self._tensors(place, style))

    def _tensors(self, place: Place, style: Style) -> tuple[Convolution | Block, ...]:
        held = whole(self.num_channels) if self.is_replicated else place.part(self.num_channels)
        band = Band("conv.x", (Part("channel", self.num_channels, held),))
        return (Convolution((band,), self.conv_kernel - 1, style.speculative_tokens, self.conv_dtype),)
