"""How does a result reach a person, a pipe or a program?

- To a real terminal: tables with colours, fitted to its width; where not even that is enough, a line per cell. Nothing is left out.
- To a pipe or a file: the same rows as plain lines, columns padded with spaces, never wrapped, whatever the width.
- With `--json`: one JSON document on stdout and nothing else.

Progress goes to stderr: bars on a terminal, one line at the start elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import lt
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Between two columns.
GAP = 2
# A longer word is a path or a list without spaces, and may be broken.
LONGEST_WORD = 24
STYLES = {
    "direct": "green",
    "staged": "yellow",
    "direct:": "green",
    "staged:": "yellow",
    "right:": "bold green",
    "wrong:": "bold red",
    "warning:": "bold yellow",
    "failed:": "bold red",
    "refused:": "bold red",
    "reproduced:": "bold green",
    "different:": "bold red",
    "unconfirmed": "yellow",
    "ok": "green",
    "warning": "yellow",
    "error": "bold red",
    "skipped": "dim",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name. `right`: its cells are numbers, aligned there. `whole`: its cells are not broken to fit a terminal."""

    name: str
    right: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A titled table of text, with notes below. Every row has as many cells as there are columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def show_sheet(console: Console, sheet: Sheet) -> None:
    """The sheet and an empty line."""
    if not console.is_terminal:
        for line in plain_lines(sheet):
            write_line(console, line)
        write_line(console, "")
        return
    widths = column_widths(sheet, console.width)
    if widths is None:
        _show_lines(console, sheet)
    else:
        _show_table(console, sheet, widths)
    for note in sheet.notes:
        show_line(console, note)
    console.print()


def column_widths(sheet: Sheet, width: int) -> list[int] | None:
    """How wide each column is in a terminal; None if it is too narrow for words, numbers and cells that are not to be broken.

    >>> sheet = Sheet("", (Column("bytes read", right=True), Column("why")), (("80 KiB", "because it is so"),))
    >>> [column_widths(sheet, width) for width in (80, 20, 12)]
    [[10, 16], [6, 12], None]
    """
    cells = [(column.name, *(row[index] for row in sheet.rows)) for index, column in enumerate(sheet.columns)]
    widths = []
    for column, (name, *texts) in zip(sheet.columns, cells, strict=True):
        whole = max(map(len, texts), default=0) if column.right or column.whole else 0
        words = [name, *texts] if not whole else [name]
        longest = max((len(word) for text in words for word in text.split()), default=0)
        widths.append(max(whole, min(longest, LONGEST_WORD)))
    spare = width - sum(widths) - GAP * (len(widths) - 1)
    if spare < 0:
        return None
    for first in (1, 0):  # cells before names, which have a line or two more only once
        wanted = [max(map(len, column[first:]), default=0) for column in cells]
        while spare > 0 and any(map(lt, widths, wanted)):
            for index, most in enumerate(wanted):
                if widths[index] < most and spare > 0:
                    widths[index] += 1
                    spare -= 1
    return widths


def _show_table(console: Console, sheet: Sheet, widths: list[int]) -> None:
    table = Table(
        title=Text(sheet.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for column, width in zip(sheet.columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.name), justify=justify, overflow="fold", width=width)
    for row in sheet.rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _show_lines(console: Console, sheet: Sheet) -> None:
    """A line per cell, an empty one between rows."""
    console.print(Text(sheet.title, style="bold"))
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in sheet.rows:
        grid.add_row("", "")
        for column, cell in zip(sheet.columns, row, strict=True):
            grid.add_row(Text(column.name, style="dim"), Text(cell, style=STYLES.get(cell, "")))
    console.print(grid)


def show_line(console: Console, text: str) -> None:
    """One line; a first word with a colour of its own is shown in it."""
    if not console.is_terminal:
        write_line(console, text)
        return
    first, space, rest = text.partition(" ")
    console.print(Text.assemble((first, STYLES.get(first, "")), space, rest), soft_wrap=False)


def plain_lines(sheet: Sheet) -> list[str]:
    """Title, header, rows and notes; columns two spaces apart.

    >>> plain_lines(Sheet("heads", (Column("rank"), Column("bytes", right=True)), (("0", "8"), ("10", "16"))))
    ['heads', 'rank  bytes', '0         8', '10       16']
    """
    cells = [tuple(column.name for column in sheet.columns), *sheet.rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(sheet.columns))]
    padded = [
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, sheet.columns, strict=True)
        ).rstrip()
        for row in cells
    ]
    return [sheet.title, *padded, *sheet.notes]


def write_line(console: Console, text: str) -> None:
    """Text as it is: no markup, no wrapping, no colour."""
    console.file.write(text + "\n")


def write_json(document: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def bytes_text(count: int | Fraction) -> str:
    """Bytes for people: exact below 10 KiB and where whole, else one digit behind the point.

    >>> [bytes_text(n) for n in (512, 1024, 5120, 25600, 1 << 20, 3000000000)]
    ['512 B', '1 KiB', '5 KiB', '25 KiB', '1 MiB', '2.8 GiB']
    >>> bytes_text(Fraction(1, 4)), bytes_text(Fraction(1000, 3))
    ('0.25 B', '333.33 B')
    """
    size, unit = Fraction(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or (size < 10 * 1024 and size % 1024 and unit == "B"):
            break
        size, unit = size / 1024, larger
    if size.denominator == 1:
        return f"{int(size):,} {unit}"
    digits = 2 if unit == "B" else 1
    return f"{float(size):,.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration for people, three digits.

    >>> [seconds_text(s) for s in (0.0000651, 0.0123, 1.5, 90)]
    ['65.1 us', '12.3 ms', '1.5 s', '90 s']
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def number(value: Fraction) -> int | float:
    """A JSON number: whole if it is."""
    return int(value) if value.denominator == 1 else float(value)


def join_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, `none` if there are none."""
    from kvreshard.plan.explain import number_ranges

    return number_ranges(ranks) if ranks else "none"
