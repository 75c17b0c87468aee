"""A ring: the last `capacity` tokens, overwritten in turn.

A field per part of a token, `<layer>.<part>`, axes (token, channel), whole on every rank. The page holds `capacity` entries of each part; token
t lies in entry t mod capacity. Its lap digit advances nothing; `bind` checks that the live tokens fit both capacities.
Speculation widens the ring of its own engine only, so two engines may have rings of different length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError

TENSOR = "ring"


@dataclass(frozen=True, slots=True)
class Ring:
    """`live_tokens` tokens that matter, `channels` values of `dtype` for each of `parts`; speculation widens the ring.

    A ring has whole laps of `lap_entries`: as many as are needed or, with `is_doubled`, the next power of two; at least `min_entries`.
    """

    is_state: ClassVar[bool] = True
    live_tokens: int
    channels: int
    dtype: str
    parts: tuple[str, ...] = ("ring",)
    tokens_per_state: int = 1
    lap_entries: int = 1
    is_doubled: bool = False
    min_entries: int = 1

    def __post_init__(self) -> None:
        sizes = (self.live_tokens, self.channels, self.tokens_per_state, self.lap_entries, len(self.parts))
        if min(sizes) <= 0:
            raise LayoutError(
                f"ring of {self.live_tokens} tokens x {len(self.parts)} parts x {self.channels} channels, laps of "
                f"{self.lap_entries}: sizes must be positive"
            )

    @property
    def window_tokens(self) -> int | None:
        return self.live_tokens

    def capacity(self, style: Style) -> int:
        """Entries of the ring on an engine of this style."""
        needed = self.live_tokens // self.tokens_per_state + style.speculative_tokens
        laps = -(-needed // self.lap_entries)
        if self.is_doubled:
            laps = 1 << (laps - 1).bit_length()
        return max(self.min_entries, laps * self.lap_entries)

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        cell_bytes = self.channels * dtype_bytes(self.dtype)
        return (TensorShape(TENSOR, len(self.parts), self.capacity(style), cell_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        element, view = dtype_bytes(self.dtype), views[TENSOR]
        axes = (Axis("token", None, self.tokens_per_state), Axis("channel", self.channels))
        # Each kernel block is laid out like a small page.
        num_blocks = view.shape.states // view.kernel_states
        blocks = (Digit(num_blocks, 0, view.kernel_step),) if num_blocks > 1 else ()
        digits = (Digit(view.kernel_states, 0, view.state_step), *blocks, Digit(None, 0, 0))
        token = AxisMap("token", Interval(0, None), digits)
        channel = AxisMap("channel", whole(self.channels), (Digit(self.channels, 0, element),))
        return tuple(
            Piece(TENSOR, Field(f"{layer}.{part}", axes, element, self.dtype), (token, channel), slot * view.slot_step)
            for slot, part in enumerate(self.parts)
        )
