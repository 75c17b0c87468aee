"""The sparse indexer of DeepSeek-V3.2 and V4: a quantised key per token that decides which tokens are attended to.

Two fields per layer, whole on every rank: `<layer>.index_k` (128 fp8 values) and `<layer>.index_scale` (4 bytes per token).
Inside a kernel block all values come first, then all scales (vLLM 0.32: kernel blocks of 64 tokens, 132 bytes per token),
so a token's two parts are far apart, and regrouping tokens needs exactly this description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, states_per_page
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, LayoutError


@dataclass(frozen=True, slots=True)
class Indexer:
    """`channels` one-byte values and `scale_bytes` of scales per state of `tokens_per_state` tokens."""

    channels: int
    scale_bytes: int = 4
    tokens_per_state: int = 1
    quantisation: str = "fp8_e4m3/scale-per-token"
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.channels <= 0 or self.scale_bytes <= 0 or self.tokens_per_state <= 0:
            raise LayoutError(
                f"indexer of {self.channels} channels, {self.scale_bytes} scale bytes, {self.tokens_per_state} tokens per "
                "state: sizes must be positive"
            )

    @property
    def is_state(self) -> bool:
        return False

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        states = states_per_page(tokens_per_page, self.tokens_per_state, "indexer")
        return (TensorShape("index", 1, states, self.channels + self.scale_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        view = views["index"]
        states = view.kernel_states
        return tuple(
            Piece(
                "index",
                Field(
                    f"{layer}.{name}",
                    (Axis("token", None, self.tokens_per_state), Axis("channel", extent)),
                    1,
                    f"uint8/{self.quantisation}",
                ),
                (
                    view.sequence("token", place.tokens(), Digit(states, 0, extent)),
                    AxisMap("channel", whole(extent), (Digit(extent, 0, 1),)),
                ),
                offset,
            )
            for name, extent, offset in (
                ("index_k", self.channels, 0),
                ("index_scale", self.scale_bytes, states * self.channels),
            )
        )
