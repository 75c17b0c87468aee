"""Attention over heads, full or with a sliding window: K and V of every token.

Two fields per layer, `<layer>.k` and `<layer>.v`, axes (token, head, channel); only the first where V has no
channels (caches of something else per token and head). With more ranks than KV heads, several ranks hold the same head. Engines differ in
the inside of a page, `interior`:

| interior | slots x cell | where a value lies |
|---|---|---|
| `cell` | heads x (K then V) | K and V of a token and head side by side: GPU backends |
| `separate` | two tensors, heads x K and heads x V | K of all pages, then V of all pages |
| `slots` | 2 x all heads | slot 0 is K of all heads of a token, slot 1 is V |
| `planes` | heads x (K then V) | per page and head all K, then all V, token after token |
| `planes-kt` | heads x (K then V) | per page and head K channel after channel, then V token after token |
| `tiles` | heads x (K then V) | per page and head K in tiles of 16 tokens, channels in pairs; V in tiles of 16 channels, tokens in pairs |

vLLM 0.32's CPU attention stores `planes-kt` with its `vec` instructions and `tiles` with `amx`; labelled values written through its
operator show it. Refused: `slots` with K and V of different width, `tiles` that are not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes, encoding, states_per_page
from kvreshard.kinds.place import Place, size, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, Interval, LayoutError

INTERIORS = ("cell", "separate", "slots", "planes", "planes-kt", "tiles")
TILE = 16


@dataclass(frozen=True, slots=True)
class Attention:
    """`num_kv_heads` heads of the whole model, `head_size` channels of K, `head_size_v` of V (None: as many; 0: there is no V)."""

    is_state: ClassVar[bool] = False
    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None
    window_tokens: int | None = None
    quantisation: str = ""

    def __post_init__(self) -> None:
        for label, value in (("KV heads", self.num_kv_heads), ("channels", self.head_size)):
            if value <= 0:
                raise LayoutError(f"attention with {value} {label}: a size must be positive")
        if self.head_size_v is not None and self.head_size_v < 0:
            raise LayoutError(f"attention with {self.head_size_v} channels of V: must not be negative")
        dtype_bytes(self.dtype)

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        heads = size(place.heads(self.num_kv_heads))
        states = states_per_page(tokens_per_page, 1, "attention")
        k_bytes, v_bytes = self._cell_bytes()
        if not v_bytes and style.interior != "cell":
            raise LayoutError(f"interior '{style.interior}': there is no V; use 'cell'")
        if style.interior == "separate":
            return (TensorShape("k", heads, states, k_bytes), TensorShape("v", heads, states, v_bytes))
        if style.interior == "slots":
            if k_bytes != v_bytes:
                raise LayoutError(
                    f"interior 'slots': K has {self.head_size} channels and V {self.value_size}; they must be equal"
                )
            return (TensorShape("kv", 2, states, heads * k_bytes),)
        if style.interior not in INTERIORS:
            raise LayoutError(f"interior '{style.interior}' is not known; use one of {', '.join(INTERIORS)}")
        return (TensorShape("kv", heads, states, k_bytes + v_bytes),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        heads = place.heads(self.num_kv_heads)
        make = {
            "cell": self._side_by_side,
            "separate": self._side_by_side,
            "slots": self._slots,
            "planes": self._planes,
            "planes-kt": self._planes_transposed,
            "tiles": self._tiles,
        }[style.interior]
        return tuple(
            Piece(tensor, self._field(f"{layer}.{part}", channels), (token, head, channel), offset)
            for part, channels, (tensor, token, head, channel, offset) in zip(
                ("k", "v"), (self.head_size, self.value_size), make(place, heads, views), strict=bool(self.value_size)
            )
        )

    def _field(self, name: str, channels: int) -> Field:
        axes = (Axis("token", None), Axis("head", self.num_kv_heads), Axis("channel", channels))
        return Field(name, axes, dtype_bytes(self.dtype), encoding(self.dtype, self.quantisation))

    def _cell_bytes(self) -> tuple[int, int]:
        element = dtype_bytes(self.dtype)
        return self.head_size * element, self.value_size * element

    def _channels(self, extent: int, *digits: Digit) -> AxisMap:
        return AxisMap("channel", whole(extent), digits or (Digit(extent, 0, dtype_bytes(self.dtype)),))

    def _side_by_side(self, place: Place, heads: Interval, views: Mapping[str, PageView]) -> tuple[_Part, ...]:
        k_bytes, _ = self._cell_bytes()
        sides = [(views["kv"], 0), (views["kv"], k_bytes)] if "kv" in views else [(views["k"], 0), (views["v"], 0)]
        return tuple(
            (
                view.shape.name,
                view.sequence("token", place.tokens()),
                _slot_heads(heads, view),
                self._channels(channels),
                offset,
            )
            for (view, offset), channels in zip(sides, (self.head_size, self.value_size), strict=True)
            if channels
        )

    def _slots(self, place: Place, heads: Interval, views: Mapping[str, PageView]) -> tuple[_Part, _Part]:
        view, (k_bytes, _) = views["kv"], self._cell_bytes()
        head = AxisMap("head", heads, (Digit(size(heads), 0, k_bytes),))
        token, channel = view.sequence("token", place.tokens()), self._channels(self.head_size)
        return ("kv", token, head, channel, 0), ("kv", token, head, channel, view.slot_step)

    def _planes(self, place: Place, heads: Interval, views: Mapping[str, PageView]) -> tuple[_Part, _Part]:
        view, (k_bytes, v_bytes) = _planes_view(views), self._cell_bytes()
        head, states = _slot_heads(heads, view), view.kernel_states
        return (
            ("kv", view.sequence("token", place.tokens(), Digit(states, 0, k_bytes)), head,
             self._channels(self.head_size), 0),
            ("kv", view.sequence("token", place.tokens(), Digit(states, 0, v_bytes)), head,
             self._channels(self.value_size), states * k_bytes),
        )  # fmt: skip

    def _planes_transposed(self, place: Place, heads: Interval, views: Mapping[str, PageView]) -> tuple[_Part, _Part]:
        view, element = _planes_view(views), dtype_bytes(self.dtype)
        _, v_part = self._planes(place, heads, views)
        token = view.sequence("token", place.tokens(), Digit(view.kernel_states, 0, element))
        channel = self._channels(self.head_size, Digit(self.head_size, 0, view.kernel_states * element))
        return ("kv", token, _slot_heads(heads, view), channel, 0), v_part

    def _tiles(self, place: Place, heads: Interval, views: Mapping[str, PageView]) -> tuple[_Part, _Part]:
        view, element = _planes_view(views), dtype_bytes(self.dtype)
        states, (k_bytes, _) = view.kernel_states, self._cell_bytes()
        if states % TILE or self.value_size % TILE or self.head_size % 2:
            raise LayoutError(
                f"interior 'tiles': pages of {states} tokens and {self.head_size}, {self.value_size} channels do not fill "
                f"tiles of {TILE}"
            )
        head = _slot_heads(heads, view)
        k_token = view.sequence(
            "token", place.tokens(), Digit(TILE, 0, 2 * element), Digit(states // TILE, 0, TILE * k_bytes)
        )
        k_channel = self._channels(
            self.head_size, Digit(2, 0, element), Digit(self.head_size // 2, 0, 2 * TILE * element)
        )
        v_token = view.sequence(
            "token", place.tokens(), Digit(2, 0, element), Digit(states // 2, 0, 2 * TILE * element)
        )
        v_channel = self._channels(
            self.value_size, Digit(TILE, 0, 2 * element), Digit(self.value_size // TILE, 0, TILE * states * element)
        )
        return ("kv", k_token, head, k_channel, 0), ("kv", v_token, head, v_channel, states * k_bytes)


_Part = tuple[str, AxisMap, AxisMap, AxisMap, int]


def _slot_heads(heads: Interval, view: PageView) -> AxisMap:
    return AxisMap("head", heads, (Digit(size(heads), 0, view.slot_step),))


def _planes_view(views: Mapping[str, PageView]) -> PageView:
    view = views["kv"]
    if view.state_step != view.shape.cell_bytes:
        raise LayoutError(
            f"interiors with planes or tiles need each head's tokens side by side, and tokens are {view.state_step} bytes apart instead of "
            f"{view.shape.cell_bytes}; add order=HND to this engine"
        )
    return view
