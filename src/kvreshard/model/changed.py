"""How is frozen data made anew with some of its values changed? `copy.replace` of Python 3.13, for the versions before it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """The same dataclass or structure with other values, checked like any new one. Raises TypeError for anything else."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
