"""Fields: the logical tensors of a model, without who holds them and where.

Fields of two engines with the same name are the same tensor. An axis has a name and an extent; an axis without extent is
the sequence. `encoding` tags the meaning of the bytes (dtype, quantisation, scales): equal tags may be copied, others not.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvreshard.model.errors import LayoutError
from kvreshard.model.form import Whole
from kvreshard.model.ownership import MAX_SIZE
from kvreshard.model.text import ShortText, plain

MAX_AXES = 16


class Axis(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One axis: `extent` coordinates, or None for the sequence.

    On the sequence one coordinate stands for `tokens_per_index` tokens. Of tokens [a, b) the complete indices are
    moved; with `keep_partial` the last, incomplete one too (a page whose inside is unknown is one index).
    """

    name: ShortText
    extent: Whole | None
    tokens_per_index: Whole = 1
    keep_partial: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("an axis has no name")
        if self.extent is not None and self.extent <= 0:
            raise LayoutError(f"axis '{plain(self.name)}': extent {self.extent}; a size must be positive")
        if not 0 < self.tokens_per_index <= MAX_SIZE:
            raise LayoutError(
                f"axis '{plain(self.name)}': {self.tokens_per_index} tokens per index; must be positive, and not above {MAX_SIZE}"
            )
        if self.extent is not None and (self.tokens_per_index != 1 or self.keep_partial):
            raise LayoutError(f"axis '{plain(self.name)}': only the sequence axis counts tokens")

    def indices_of(self, start_token: int, stop_token: int) -> tuple[int, int]:
        """The half-open range of indices that tokens `[start_token, stop_token)` bring."""
        stop = stop_token + self.tokens_per_index - 1 if self.keep_partial else stop_token
        return start_token // self.tokens_per_index, stop // self.tokens_per_index


class Field(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One logical tensor. `optional`: an engine may lack it (a draft model's cache), which is then only a warning."""

    name: ShortText
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=MAX_AXES)]
    element_bytes: Whole
    encoding: ShortText
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("a field has no name")
        if not 0 < self.element_bytes <= MAX_SIZE:
            raise LayoutError(
                f"field '{plain(self.name)}': element of {self.element_bytes} bytes; a size must be positive, and not above {MAX_SIZE}"
            )
        names = [axis.name for axis in self.axes]
        if not names or len(set(names)) != len(names):
            raise LayoutError(
                f"field '{plain(self.name)}': axes {plain(names)}; needs at least one, each with a name of its own"
            )
        if [axis.extent for axis in self.axes].count(None) > 1:
            raise LayoutError(f"field '{plain(self.name)}': has more than one sequence axis among {plain(names)}")

    @property
    def sequence(self) -> Axis | None:
        """The axis without extent; None for a state, whose page holds a whole state."""
        return next((axis for axis in self.axes if axis.extent is None), None)
