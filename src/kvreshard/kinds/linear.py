"""Linear attention states: gated delta networks (Qwen3-Next, Qwen3.5) and relatives.

Fields: `<layer>.conv.q`, `conv.k` (key head, channel, tap), `conv.v` (value head, channel, tap), and `ssm` (value head, value
channel, key channel). The convolution's rows are q, then k, then v, each split by its own heads (vLLM 0.32,
`MambaStateShapeCalculator.gated_delta_net_state_shape`).
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
