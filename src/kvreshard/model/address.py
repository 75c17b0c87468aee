"""Address maps: the page and the byte of each coordinate that a rank holds of an axis.

An `AxisMap` writes the local index of a coordinate (its index among those that the rank holds) in mixed radix, innermost
digit first. Each digit advances some pages and some bytes:

    local = d0 + extent0 * (d1 + extent1 * (d2 + ...))
    page  = sum(d_i * page_step_i)        byte = sum(d_i * byte_step_i)

Pages and bytes of different axes add up; the sum of pages is an index into a request's block table. Digits are printed as CuTe prints
layouts, extents then steps, innermost first; `*` has no end, and a step `page` goes to the next page of the block table:

| digits | what they describe |
|---|---|
| `(128):(2)` | 128 channels of 2 bytes, side by side |
| `(16,*):(256,page)` | 16 tokens per page, 256 bytes apart; then the next page |
| `(2,8,*):(2,64,page)` | the same 16 tokens in 8 pairs |
| `(4,*):(512,0)` | a ring of 4 entries: its laps advance nothing |

On a sequence axis (no end) the digits are, in order: those inside a page, at most one that advances one page per step,
at most one lap. Anything else raises LayoutError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import msgspec
import numpy as np

from kvreshard.model.errors import LayoutError
from kvreshard.model.ownership import MAX_SIZE, Coordinates, Ownership


class Digit(msgspec.Struct, frozen=True):
    """One digit: `extent` values (None: no end), each step advancing `page_step` pages and `byte_step` bytes."""

    extent: int | None
    page_step: int
    byte_step: int

    def __post_init__(self) -> None:
        if self.extent is not None and self.extent <= 0:
            raise LayoutError(f"digit of extent {self.extent}: a size must be positive")
        if max(self.extent or 0, self.page_step, self.byte_step) > MAX_SIZE:
            raise LayoutError(
                f"digit of extent {self.extent}, {self.page_step} pages and {self.byte_step} bytes a step: must not be above "
                f"{MAX_SIZE}"
            )
        if self.page_step < 0 or self.byte_step < 0:
            raise LayoutError(f"digit steps {self.page_step} pages and {self.byte_step} bytes: must not be negative")


def digits_text(digits: Iterable[Digit]) -> str:
    """Extents and steps, innermost first, as CuTe prints a layout.

    >>> digits_text([Digit(16, 0, 256), Digit(None, 1, 0)])
    '(16,*):(256,page)'
    """
    extents, steps = [], []
    for digit in digits:
        extents.append("*" if digit.extent is None else str(digit.extent))
        pages = "page" if digit.page_step == 1 else f"{digit.page_step} pages"
        parts = [pages] if digit.page_step else []
        if digit.byte_step or not parts:
            parts.append(str(digit.byte_step))
        steps.append("+".join(parts))
    return f"({','.join(extents)}):({','.join(steps)})"


def canonical(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
    """The same map with the fewest digits: extents of one are dropped, a digit that continues the one before is merged.

    Post-condition: every local index has the page and byte that it had.

    >>> digits_text(canonical((Digit(4, 0, 2), Digit(1, 0, 7), Digit(3, 0, 8), Digit(None, 1, 0))))
    '(12,*):(2,page)'
    """
    merged: list[Digit] = []
    for digit in digits:
        if digit.extent == 1:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.extent is not None:
            continues_bytes = digit.byte_step == last.byte_step * last.extent
            continues_pages = digit.page_step == last.page_step * last.extent
            if continues_bytes and continues_pages and (digit.byte_step or digit.page_step):
                extent = None if digit.extent is None else last.extent * digit.extent
                merged[-1] = Digit(extent, last.page_step, last.byte_step)
                continue
        merged.append(digit)
    return tuple(merged) or (Digit(1, 0, 0),)


class AxisMap(msgspec.Struct, frozen=True, dict=True, cache_hash=True):
    """What a rank holds of one axis, and where: ownership plus digits, innermost first.

    Every second turn of 4 tokens, in pages of 6. Coordinate 12 is the fifth that is held, its local index 4; 20 has the local index 8:

    >>> from kvreshard.model.ownership import Cyclic
    >>> token = AxisMap("token", Cyclic(4, 4, 8), (Digit(6, 0, 256), Digit(None, 1, 0)))
    >>> print(token)
    token 4 of every 8 from 4 (6,*):(256,page)
    >>> local = token.owned.to_local(np.array([4, 12, 20]))
    >>> local, *token.locate(local)
    (array([0, 4, 8]), array([0, 0, 1]), array([   0, 1024,  512]))

    Raises LayoutError when the digits have fewer values than the ownership has coordinates, or (on an axis without
    end) are not pages of a fixed number of indices.
    """

    axis: str
    owned: Ownership
    digits: tuple[Digit, ...]

    def __post_init__(self) -> None:
        digits = self.digits
        if not digits:
            raise LayoutError(f"axis '{self.axis}': has no digits, so no address")
        num_values = math.prod([digit.extent or 1 for digit in digits])
        if num_values > MAX_SIZE:
            raise LayoutError(f"axis '{self.axis}': its digits have more than {MAX_SIZE} values")
        if None in [digit.extent for digit in digits[:-1]]:
            raise LayoutError(f"axis '{self.axis}': only the last digit may have no end")
        if self.num_held is None:
            self._check_sequence()
        else:
            self._check_bounded(self.num_held, num_values)

    def __str__(self) -> str:
        return f"{self.axis} {self.owned} {digits_text(self.digits)}"

    @property
    def num_held(self) -> int | None:
        """How many coordinates the rank holds; None on a sequence axis."""
        stop = getattr(self.owned, "stop", None)
        return None if stop is None else stop - self.owned.start

    @cached_property
    def indices_per_page(self) -> int:
        """Local indices inside one page (of a sequence axis: its tokens or states per page on this rank)."""
        return math.prod([digit.extent or 1 for digit in self.digits if not digit.page_step])

    @cached_property
    def ring_pages(self) -> int | None:
        """Pages after which a ring starts over; None if it is no ring."""
        if self.digits[-1].extent is not None or self.digits[-1].page_step:
            return None
        return math.prod([digit.extent or 1 for digit in self.digits if digit.page_step])

    @cached_property
    def page_loops(self) -> tuple[tuple[int, int], ...]:
        """Step in bytes and count of every digit that repeats inside a page. A count is at most the values that the digit takes for held
        coordinates (an upper bound where digits mix).
        """
        held, loops = self.num_held, []
        for digit in self.digits:
            count = digit.extent
            if count is None:
                continue
            if held is not None:
                count, held = min(count, held), -(-held // count)
            if count > 1 and not digit.page_step:
                loops.append((digit.byte_step, count))
        return tuple(loops)

    @cached_property
    def last_byte_offset(self) -> int:
        """The largest byte offset that any held coordinate has within its page."""
        return sum([(count - 1) * step for step, count in self.page_loops])

    def locate(self, local: Coordinates) -> tuple[Coordinates, Coordinates]:
        """Page index and byte offset of each local index."""
        pages, offsets, rest = np.zeros_like(local), np.zeros_like(local), local
        for digit in self.digits:
            value = rest if digit.extent is None else rest % digit.extent
            rest = rest if digit.extent is None else rest // digit.extent
            pages = pages + value * digit.page_step
            offsets = offsets + value * digit.byte_step
        return pages, offsets

    def _check_bounded(self, num_held: int, num_values: int) -> None:
        if self.digits[-1].extent is None:
            raise LayoutError(f"axis '{self.axis}': holds {self.owned}, so its last digit must have an end")
        if num_values < num_held:
            raise LayoutError(
                f"axis '{self.axis}': holds {num_held} coordinates {self.owned}, but its digits have only {num_values} values"
            )
        if max([digit.page_step for digit in self.digits]):
            raise LayoutError(f"axis '{self.axis}': advances pages, but only an axis without end is cut into pages")

    def _check_sequence(self) -> None:
        if self.owned.start and self.owned.period == 1:
            raise LayoutError(f"axis '{self.axis}': holds {self.owned}; an axis without end starts at 0")
        if self.digits[-1].extent is not None:
            raise LayoutError(f"axis '{self.axis}': has no end, so its last digit must have none")
        inside = [digit for digit in self.digits if not digit.page_step and digit.extent is not None]
        paging = self.digits[len(inside) :]
        in_order = list(self.digits[: len(inside)]) == inside
        lap = paging[-1:] if paging and not paging[-1].page_step else ()
        steps = paging[: len(paging) - len(lap)]
        if (
            not in_order
            or len(steps) > 1
            or any(d.page_step != 1 or d.byte_step for d in steps)
            or any(d.byte_step for d in lap)
        ):
            raise LayoutError(
                f"axis '{self.axis}': its digits must be those inside a page, then one that steps by one page, "
                f"then at most one lap; it has {digits_text(self.digits)}"
            )
