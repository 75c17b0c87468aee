"""What the tests of the doctor look at in its lines."""

from __future__ import annotations

from collections.abc import Iterable

from kvreshard.cli.doctor_host import Line


def words(lines: Iterable[Line]) -> list[tuple[str, str]]:
    return [(line.check, line.status) for line in lines]


def only(lines: Iterable[Line]) -> Line:
    (line,) = lines
    return line
