"""Pages whose inside is not known. Equal whole pages are copied; anything else is refused.

| kind | one field per layer, `<layer>.page` | what a request moves |
|---|---|---|
| `Opaque` | axes (token, part, byte) | whole pages of `tokens_per_page` tokens; a partial last page is moved whole |
| `OpaqueState` | axes (part, byte) | the one page that holds a state |

Each tensor-parallel rank is one `part`. So engines of other parallel sizes, page sizes or page bytes differ in an extent or in
tokens per index, and the match refuses them with both values. Bytes count in memory order; a page that an engine keeps in several
pieces has that many slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError

TENSOR = "page"


@dataclass(frozen=True, slots=True)
class Opaque:
    """`page_bytes` bytes per page of `tokens_per_page` tokens on each rank; `tag` names backend and quantisation."""

    is_state: ClassVar[bool] = False
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

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        if tokens_per_page != self.tokens_per_page:
            raise LayoutError(
                f"opaque page '{self.tag}' spans {self.tokens_per_page} tokens, the engine's pages {tokens_per_page}"
            )
        return (TensorShape(TENSOR, 1, 1, self.page_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        axis = Axis("token", None, self.tokens_per_page, keep_partial=True)
        token = AxisMap("token", Interval(0, None), (Digit(None, 1, 0),))
        return (_page(layer, place, views[TENSOR], self.tag, ((axis, token),)),)


@dataclass(frozen=True, slots=True)
class OpaqueState:
    """A state, ring or other page per request of `page_bytes` bytes on each rank; `tag` names what wrote it."""

    is_state: ClassVar[bool] = True
    window_tokens: ClassVar[int | None] = None
    page_bytes: int
    tag: str

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or not self.tag:
            raise LayoutError(
                f"opaque state of {self.page_bytes} bytes, tag '{self.tag}': needs a positive size and the name of what "
                "wrote it"
            )

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        return (TensorShape(TENSOR, 1, 1, self.page_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        return (_page(layer, place, views[TENSOR], self.tag, ()),)


def _page(layer: str, place: Place, view: PageView, tag: str, sequence: tuple[tuple[Axis, AxisMap], ...]) -> Piece:
    """The page's bytes, in `slots` pieces, behind the sequence axis if there is one."""
    page_bytes = view.shape.page_bytes
    piece_bytes = page_bytes // view.shape.slots
    axes = (
        *sequence,
        (
            Axis("part", place.tp_size),
            AxisMap("part", Interval(place.tp_rank, place.tp_rank + 1), (Digit(1, 0, 0),)),
        ),
        (
            Axis("byte", page_bytes),
            AxisMap("byte", whole(page_bytes), (Digit(piece_bytes, 0, 1), Digit(view.shape.slots, 0, view.slot_step))),
        ),
    )
    field = Field(f"{layer}.{TENSOR}", tuple(axis for axis, _ in axes), 1, f"opaque/{tag}")
    return Piece(TENSOR, field, tuple(mapped for _, mapped in axes), 0)
