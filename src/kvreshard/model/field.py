"""Fields: the logical tensors of a model, without who holds them and where.

Fields of two engines with the same name are the same tensor. An axis has a name and an extent; an axis without extent is
the sequence. `encoding` tags the meaning of the bytes (dtype, quantisation, scales): equal tags may be copied, others not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        if self.extent is None:
            if not 0 < self.tokens_per_index <= MAX_SIZE:
                raise LayoutError(
                    f"axis '{plain(self.name)}': {self.tokens_per_index} tokens per index; must be positive, and not above {MAX_SIZE}"
                )
        elif not 0 < self.extent <= MAX_SIZE:
            raise LayoutError(
                f"axis '{plain(self.name)}': extent {self.extent}; a size must be positive, and not above {MAX_SIZE}"
            )
        elif self.tokens_per_index != 1 or self.keep_partial:
            raise LayoutError(f"axis '{plain(self.name)}': only the sequence axis counts tokens")

    def __str__(self) -> str:
        """`head of 8`, `token`, or `token (4 to an index, partial ones too)`."""
        if self.extent is not None:
            return f"{self.name} of {self.extent}"
        counted = [f"{self.tokens_per_index} to an index"] if self.tokens_per_index != 1 else []
        kept = ["partial ones too"] if self.keep_partial else []
        return f"{self.name} ({', '.join(counted + kept)})" if counted or kept else self.name

    def indices_of(self, start_token: int, stop_token: int) -> tuple[int, int]:
        """The half-open range of indices that tokens `[start_token, stop_token)` bring."""
        stop = stop_token + self.tokens_per_index - 1 if self.keep_partial else stop_token
        return start_token // self.tokens_per_index, stop // self.tokens_per_index

    def index_ranges(self, intervals: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The ranges of indices that token intervals bring, no index twice: two intervals may touch one index.

        >>> list(Axis("token", None, tokens_per_index=4, keep_partial=True).index_ranges([(0, 6), (6, 12)]))
        [(0, 2), (2, 3)]
        """
        end = 0
        for start_token, stop_token in intervals:
            start, stop = self.indices_of(start_token, stop_token)
            if stop > max(start, end):
                yield max(start, end), stop
                end = stop


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
        by_name = {axis.name: axis.extent for axis in self.axes}
        if not by_name or len(by_name) != len(self.axes):
            names = plain([axis.name for axis in self.axes])
            raise LayoutError(
                f"field '{plain(self.name)}': axes {names}; needs at least one, each with a name of its own"
            )
        if list(by_name.values()).count(None) > 1:
            raise LayoutError(
                f"field '{plain(self.name)}': has more than one sequence axis among {plain(list(by_name))}"
            )

    @property
    def sequence(self) -> Axis | None:
        """The axis without extent; None for a state, whose page holds a whole state."""
        return next((axis for axis in self.axes if axis.extent is None), None)
