"""Mamba states: Mamba-2 (heads, groups) and Mamba-1 (channels).

Mamba-2 fields: `<layer>.conv.x` (head, channel, tap), `conv.B` and `conv.C` (group, channel, tap), `ssm` (head, channel,
state). x and the recurrent state are split by head; B and C by group, and with fewer groups than ranks each rank holds one
whole group (vLLM 0.32 starts only where groups divide by ranks or there is one; the rule here agrees with both).
Mamba-1 fields: `conv.x` (channel, tap), `ssm` (channel, state); speculation does not widen it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place, whole
from kvreshard.kinds.state import Band, Block, Convolution, Part, state_pieces, state_shape
from kvreshard.model import LayoutError


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of the whole model. `conv_kernel` taps, of which `conv_kernel - 1` are kept."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_size, self.num_groups, self.state_size, self.conv_kernel - 1) <= 0:
            raise LayoutError(f"Mamba-2 state with a size that is not positive: {self}")

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
        head = Part("head", self.num_heads, place.part(self.num_heads))
        channel = Part("channel", self.head_size, whole(self.head_size))
        group = Part("group", self.num_groups, place.part(self.num_groups))
        state = Part("state", self.state_size, whole(self.state_size))
        bands = (
            Band("conv.x", (head, channel)),
            Band("conv.B", (group, state)),
            Band("conv.C", (group, state)),
        )
        return (
            Convolution(bands, self.conv_kernel - 1, style.speculative_tokens, self.conv_dtype),
            Block("ssm", (head, channel, state), self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Sizes of the whole model."""

    num_channels: int
    state_size: int
    conv_kernel: int
    conv_dtype: str
    state_dtype: str

    def __post_init__(self) -> None:
        if min(self.num_channels, self.state_size, self.conv_kernel - 1) <= 0:
            raise LayoutError(f"Mamba-1 state with a size that is not positive: {self}")

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
        channel = Part("channel", self.num_channels, place.part(self.num_channels))
        state = Part("state", self.state_size, whole(self.state_size))
        return (
            Convolution((Band("conv.x", (channel,)),), self.conv_kernel - 1, 0, self.conv_dtype),
            Block("ssm", (channel, state), self.state_dtype),
        )
