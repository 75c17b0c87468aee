"""What every cache kind implements, and the shapes in which it describes a page without knowing where pages lie.

An engine stores a layer as one or more tensors of logical shape (pages, slots, states, cell): `TensorShape`. Its
order of these dimensions gives a `PageView`, the byte steps inside a page. From the views a kind makes its `Piece`s: fields, with
what the rank holds of them and where that lies in the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvreshard.kinds.place import Place
from kvreshard.model import AxisMap, Digit, Field, LayoutError, Ownership


@dataclass(frozen=True, slots=True)
class Style:
    """What an engine chooses apart from parallel sizes.

    `interior`: how attention fills a cell (see `kinds.attention`). `conv_dim_first`: convolution state as (channel, tap),
    else (tap, channel). `speculative_tokens`: widens convolution states by scratch columns. `kernel_tokens`: tokens of a
    kernel block inside a page, None for the whole page.
    """

    interior: str = "cell"
    conv_dim_first: bool = True
    speculative_tokens: int = 0
    kernel_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Logical shape of one page of one tensor: `slots` x `states` cells of `cell_bytes`.

    The next page starts at a multiple of `page_alignment_bytes`. A state stands for `tokens_per_state` tokens.
    """

    name: str
    slots: int
    states: int
    cell_bytes: int
    page_alignment_bytes: int = 1
    tokens_per_state: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that hold something."""
        return self.slots * self.states * self.cell_bytes

    @property
    def aligned_page_bytes(self) -> int:
        """Bytes of a page up to where the next one may start."""
        return -(-self.page_bytes // self.page_alignment_bytes) * self.page_alignment_bytes


@dataclass(frozen=True, slots=True)
class PageView:
    """Byte steps inside a page of one tensor: between slots, between states of a kernel block, between kernel blocks."""

    shape: TensorShape
    slot_step: int
    state_step: int
    kernel_states: int
    kernel_step: int

    def sequence(self, axis: str, owned: Ownership, *inside: Digit) -> AxisMap:
        """The sequence axis: digits inside a kernel block (default: one state after another), kernel blocks, pages."""
        first = inside or (Digit(self.kernel_states, 0, self.state_step),)
        blocks = Digit(self.shape.states // self.kernel_states, 0, self.kernel_step)
        return AxisMap(axis, owned, (*first, blocks, Digit(None, 1, 0)))


@dataclass(frozen=True, slots=True)
class Piece:
    """One field in a page of tensor `tensor`: its first cell lies `offset_bytes` from the page's first byte."""

    tensor: str
    field: Field
    axes: tuple[AxisMap, ...]
    offset_bytes: int


class Kind(Protocol):
    """A cache kind. It is frozen data: two layers of equal kind have equal pages."""

    def __hash__(self) -> int: ...

    @property
    def is_state(self) -> bool:
        """Whether a page holds a whole state of a request instead of some of its tokens."""

    @property
    def window_tokens(self) -> int | None:
        """How many tokens the layer looks back; None for all."""

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        """The shape of a page on one rank. `tokens_per_page`: tokens of one page of this rank; ignored by states."""

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        """The fields of one layer on one rank."""


def states_per_page(tokens_per_page: int, tokens_per_state: int, what: str) -> int:
    """States in a page of `tokens_per_page` tokens. Raises LayoutError if that is not a whole number; `what` names the cache."""
    if tokens_per_page <= 0 or tokens_per_page % tokens_per_state:
        raise LayoutError(
            f"{what}: a page of {tokens_per_page} tokens is not a positive multiple of {tokens_per_state} tokens per state; "
            "use such a page size"
        )
    return tokens_per_page // tokens_per_state


def encoding(dtype: str, quantisation: str = "") -> str:
    """The tag of what bytes mean: the dtype, with the quantisation and its scales if there is one."""
    return f"{dtype}/{quantisation}" if quantisation else dtype


DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "uint8": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises LayoutError for a dtype that is not known."""
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"dtype '{dtype}' is not known; use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
