"""A page whose inside is not known: equal whole pages may be copied, everything else must be refused.

One field per layer, `<layer>.page`, axes (token, part, byte). One index of the sequence is a whole page of `tokens_per_page`
tokens; a partial last page is moved whole. Each tensor-parallel rank is one `part`, so that other parallel sizes, page sizes
or page bytes differ in an extent or in tokens per index, and the match refuses them with both values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError


@dataclass(frozen=True, slots=True)
class Opaque:
    """`page_bytes` bytes per page of `tokens_per_page` tokens on each rank; `tag` names backend and quantisation."""

    page_bytes: int
    tokens_per_page: int
    tag: str
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.tokens_per_page <= 0 or not self.tag:
            raise LayoutError(
                f"opaque page of {self.page_bytes} bytes, {self.tokens_per_page} tokens, tag '{self.tag}': needs positive "
                "sizes and the name of what wrote it"
            )

    @property
    def is_state(self) -> bool:
        return False

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        if tokens_per_page != self.tokens_per_page:
            raise LayoutError(
                f"opaque page '{self.tag}' spans {self.tokens_per_page} tokens, the engine's pages {tokens_per_page}"
            )
        return (TensorShape("page", 1, 1, self.page_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        field = Field(
            f"{layer}.page",
            (
                Axis("token", None, self.tokens_per_page, keep_partial=True),
                Axis("part", place.tp_size),
                Axis("byte", self.page_bytes),
            ),
            1,
            f"opaque/{self.tag}",
        )
        axes = (
            AxisMap("token", Interval(0, None), (Digit(None, 1, 0),)),
            AxisMap("part", Interval(place.tp_rank, place.tp_rank + 1), (Digit(1, 0, 0),)),
            AxisMap("byte", whole(self.page_bytes), (Digit(self.page_bytes, 0, 1),)),
        )
        return (Piece("page", field, axes, 0),)
