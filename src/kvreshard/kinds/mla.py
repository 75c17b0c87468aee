"""Multi-head latent attention: one latent vector per token, whole on every rank.

One field per layer, `<layer>.latent`, axes (token, channel): the compressed KV followed by the rotary part. There is no
head axis, so every tensor-parallel rank owns all channels. `tokens_per_state > 1` stores several tokens compressed in one
state (DeepSeek-V4). A packed quantised row (`fp8_ds_mla`: 512 fp8 values, 4 float32 scales, 64 bfloat16 rotary values, 656
bytes per token, vLLM 0.32) is given as `row_bytes` of that encoding: its bytes are moved as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes, encoding, states_per_page
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, LayoutError


@dataclass(frozen=True, slots=True)
class Latent:
    """`channels` values of `dtype` per state, or `row_bytes` packed bytes of encoding `quantisation`."""

    is_state: ClassVar[bool] = False
    channels: int
    dtype: str
    quantisation: str = ""
    row_bytes: int | None = None
    tokens_per_state: int = 1
    window_tokens: int | None = None
    name: str = "latent"
    page_alignment_bytes: int = 1

    def __post_init__(self) -> None:
        if min(self.channels, self.tokens_per_state, self.page_alignment_bytes) <= 0 or (
            self.row_bytes is not None and self.row_bytes <= 0
        ):
            raise LayoutError(
                f"latent cache of {self.channels} channels, {self.row_bytes} packed bytes, {self.tokens_per_state} tokens "
                "per state: sizes must be positive"
            )
        if self.row_bytes is not None and not self.quantisation:
            raise LayoutError("latent cache with packed rows needs the name of its quantisation")

    @property
    def cell_bytes(self) -> int:
        return self.row_bytes if self.row_bytes is not None else self.channels * dtype_bytes(self.dtype)

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        states = states_per_page(tokens_per_page, self.tokens_per_state, "latent cache")
        return (TensorShape(self.name, 1, states, self.cell_bytes, self.page_alignment_bytes, self.tokens_per_state),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        element = 1 if self.row_bytes is not None else dtype_bytes(self.dtype)
        extent = self.cell_bytes // element
        field = Field(
            f"{layer}.{self.name}",
            (Axis("token", None, self.tokens_per_state), Axis("channel", extent)),
            element,
            encoding(self.dtype, self.quantisation),
        )
        token = views[self.name].sequence("token", place.tokens(self.tokens_per_state))
        return (Piece(self.name, field, (token, AxisMap("channel", whole(extent), (Digit(extent, 0, element),))), 0),)
