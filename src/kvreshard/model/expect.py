"""Errors for a value of another type and for a key with a typo."""

from __future__ import annotations

import difflib
import re

import msgspec
import numpy as np

from kvreshard.model.errors import UsageError


def expect(value: object, wanted: type | tuple[type, ...], what: str, remedy: str) -> None:
    """Raises UsageError unless `value` is one of `wanted`. `what`: its name in the error; `remedy`: how to make one."""
    if not isinstance(value, wanted):
        types = wanted if isinstance(wanted, tuple) else (wanted,)
        names = " or ".join(one.__name__ for one in types)
        raise UsageError(f"{what} is of type {type(value).__name__}, and must be {names}: {remedy}")


def expect_whole(value: object, what: str) -> None:
    """Raises UsageError unless `value` is a whole number, Python's or NumPy's."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise UsageError(f"{what} is {value!r:.80}, and must be a whole number")


def did_you_mean(error: Exception, message_type: type) -> str:
    """A hint for an error of decoding `message_type`: the known key nearest to an unknown one, or that another object has it, or nothing.

    >>> class Engine(msgspec.Struct, forbid_unknown_fields=True):
    ...     fields: int
    >>> try:
    ...     msgspec.json.decode(b'{"feilds": 1}', type=Engine)
    ... except msgspec.ValidationError as error:
    ...     print(error, did_you_mean(error, Engine), sep="")
    Object contains unknown field `feilds`; did you mean `fields`?
    """
    unknown = re.search(r"unknown field `(.{1,100}?)`", str(error))
    if unknown is None:
        return ""
    schemas = msgspec.json.schema(message_type).get("$defs", {}).values()
    known = sorted({key for schema in schemas for key in schema.get("properties", {})})
    if unknown[1] in known:
        return f"; `{unknown[1]}` is a key of another object"
    near = difflib.get_close_matches(unknown[1], known, 1)
    return f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}"
