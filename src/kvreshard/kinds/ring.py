"""A ring: the last `capacity` tokens, overwritten in turn.

One field per layer, `<layer>.<name>`, axes (token, channel), whole on every rank. The page holds `capacity` entries; token t
lies in entry t mod capacity. Its lap digit advances nothing; `bind` checks that the live tokens fit both capacities.
Entries that speculation adds are capacity of that engine alone: the other side's ring may be shorter or longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError


@dataclass(frozen=True, slots=True)
class Ring:
    """`live_tokens` tokens that matter, `channels` values of `dtype` each; speculation widens the ring."""

    live_tokens: int
    channels: int
    dtype: str
    name: str = "ring"
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        if self.live_tokens <= 0 or self.channels <= 0 or self.tokens_per_state <= 0:
            raise LayoutError(f"ring of {self.live_tokens} tokens x {self.channels} channels: sizes must be positive")

    @property
    def is_state(self) -> bool:
        return True

    @property
    def window_tokens(self) -> int | None:
        return self.live_tokens

    def capacity(self, style: Style) -> int:
        """Entries of the ring on an engine of this style."""
        return self.live_tokens // self.tokens_per_state + style.speculative_tokens

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        return (TensorShape(self.name, 1, self.capacity(style), self.channels * dtype_bytes(self.dtype)),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        element = dtype_bytes(self.dtype)
        field = Field(
            f"{layer}.{self.name}",
            (Axis("token", None, self.tokens_per_state), Axis("channel", self.channels)),
            element,
            self.dtype,
        )
        digits = (Digit(self.capacity(style), 0, views[self.name].state_step), Digit(None, 0, 0))
        token = AxisMap("token", Interval(0, None), digits)
        channel = AxisMap("channel", whole(self.channels), (Digit(self.channels, 0, element),))
        return (Piece(self.name, field, (token, channel), 0),)
