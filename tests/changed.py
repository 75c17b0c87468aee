"""Parameters as JSON has them, value by value, and another value for each: what a client may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(inner: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of the parameters, with its path."""
    if isinstance(inner, dict | list):
        for place, value in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from leaves(value, (*path, place))
    else:
        yield path, inner


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return ("0" if value[:1] != "0" else "1") + value[1:]
        case _:
            return 3
