"""The engine option that sets how a field is stored, for the remedy in an error.

This room does not know what fields keep. The room that does (`kinds`) registers a function that finds the option.
"""

from __future__ import annotations

from collections.abc import Callable

from kvreshard.model.field import Field

USUAL = "the same cache dtype and quantisation"
Finder = Callable[[Field], str]
_finders: list[Finder] = []


def announce(find: Finder) -> Finder:
    """Register `find`, which returns an empty text for fields that it does not know."""
    _finders.append(find)
    return find


def remedy_for(field: Field) -> str:
    """The remedy where two engines store a field differently.

    >>> from kvreshard.model.field import Axis
    >>> remedy_for(Field("a", (Axis("channel", 2),), 2, "bfloat16")).startswith("use the same ")
    True
    """
    option = next((found for find in _finders if (found := find(field))), "")
    return f"use {USUAL}" + (f": the same {option} on both engines" if option else "")
