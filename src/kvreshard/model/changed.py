"""`copy.replace` of Python 3.13 for the versions before it: frozen data with some of its values changed."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """The dataclass or msgspec structure with other values, checked like any new one. Raises TypeError for anything else."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
