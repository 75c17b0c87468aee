"""Pages whose inside is not known. Equal whole pages are copied; anything else is refused.

One field per layer, `<layer>.page`:

| `tokens_per_page` | axes | what a request moves |
|---|---|---|
| a number | (token, part, byte) | whole pages; a partial last page is moved whole |
| None | (part, byte) | the one page per request: a state, a ring |

Each tensor-parallel rank is one `part`. So engines of other parallel sizes, page sizes or page bytes differ in an extent or in
tokens per index, and the match refuses them with both values. Bytes count in memory order; a page that an engine keeps in several
pieces has that many slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError

TENSOR = "page"


@dataclass(frozen=True, slots=True)
class Opaque:
    """`page_bytes` bytes per page of `tokens_per_page` tokens on each rank; `tag` names backend and quantisation."""

    page_bytes: int
    tokens_per_page: int | None
    tag: str
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or (self.tokens_per_page is not None and self.tokens_per_page <= 0) or not self.tag:
            raise LayoutError(
                f"opaque page of {self.page_bytes} bytes, {self.tokens_per_page} tokens, tag '{self.tag}': needs positive "
                "sizes and the name of what wrote it"
            )

    @property
    def is_state(self) -> bool:
        return self.tokens_per_page is None

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        if self.tokens_per_page not in (None, tokens_per_page):
            raise LayoutError(
                f"opaque page '{self.tag}' spans {self.tokens_per_page} tokens, the engine's pages {tokens_per_page}"
            )
        return (TensorShape(TENSOR, 1, 1, self.page_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        view = views[TENSOR]
        page_bytes, num_slots = view.shape.page_bytes, view.shape.slots
        axes = [Axis("part", place.tp_size), Axis("byte", page_bytes)]
        maps = [
            AxisMap("part", Interval(place.tp_rank, place.tp_rank + 1), (Digit(1, 0, 0),)),
            AxisMap(
                "byte", whole(page_bytes), (Digit(page_bytes // num_slots, 0, 1), Digit(num_slots, 0, view.slot_step))
            ),
        ]
        if self.tokens_per_page is not None:
            axes.insert(0, Axis("token", None, self.tokens_per_page, keep_partial=True))
            maps.insert(0, AxisMap("token", Interval(0, None), (Digit(None, 1, 0),)))
        return (Piece(TENSOR, Field(f"{layer}.{TENSOR}", tuple(axes), 1, f"opaque/{self.tag}"), tuple(maps), 0),)
