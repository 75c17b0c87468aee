"""Output of the commands: tables, lines and JSON, for a terminal, a pipe or a program.

- A terminal gets tables with colours, fitted to its width, and text that wraps at words. A terminal too narrow for a table gets its rows
  as plain lines.
- A pipe or a file gets the same rows as plain lines, columns padded with spaces, never wrapped.
- With `--json`, stdout has one JSON document and nothing else. Progress and warnings go to stderr.

Everything that prints runs inside `writing`: a stdout that takes no more is a `PipeClosedError` or an `OutputError`, never a traceback. An
error of a file with a name is not stdout's and passes through.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvreshard.model import KvReshardError
from kvreshard.model.text import escaped
from kvreshard.plan.explain import number_ranges

# Errors of write(2) for a file, a disk or a terminal that takes no more.
_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EINVAL, errno.EAGAIN})
# Characters between two columns.
GAP = 2
# A longer word is a path or a list without spaces, and may be broken.
LONGEST_WORD = 24
STYLES = {
    **dict.fromkeys(("direct", "ok"), "green"),
    **dict.fromkeys(("staged", "warning"), "yellow"),
    **dict.fromkeys(("right:", "reproduced:"), "bold green"),
    **dict.fromkeys(("wrong:", "error:", "error", "failed:", "refused:", "different:"), "bold red"),
    **dict.fromkeys(("warning:", "note:"), "bold yellow"),
    "skipped": "dim",
}


class OutputError(KvReshardError):
    """Stdout takes no more, or is closed."""


class PipeClosedError(Exception):
    """The reader of stdout went away. Not a BrokenPipeError, for which Typer has an exit code of its own."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Wraps everything that prints, and flushes at the end. Raises PipeClosedError or OutputError."""
    if sys.stdout is None:  # it was closed when Python started
        raise OutputError("stdout is closed: there is no place for the result; > /dev/null drops it")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosedError from None
    except SystemExit as stop:
        # Rich, which writes the help, turns it into exit code 1.
        if isinstance(stop.__context__, BrokenPipeError):
            raise PipeClosedError from None
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _REFUSES:
            raise
        raise OutputError(f"stdout cannot be written: {error.strerror}; give the result another place") from None


def forget(stream: TextIO) -> None:
    """Drop a stream's unwritten text, which Python would try to write at exit."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def tell(text: str) -> None:
    """Write a line to stderr; a stderr that takes nothing is ignored."""
    if sys.stderr is None:
        return
    try:
        show_line(Console(stderr=True), text)
        sys.stderr.flush()
    except OSError:
        forget(sys.stderr)


def number_column(name: str) -> Column:
    """A column of numbers: aligned right, never broken."""
    return Column(name, justify="right", no_wrap=True)


def show_table(
    console: Console, title: str, columns: Sequence[Column], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> None:
    """A titled table, notes below and an empty line. A column with `no_wrap` is shown whole or, where the terminal is too narrow, not as a table."""
    rows = [tuple(escaped(cell) for cell in row) for row in rows]
    widths = fit_columns(columns, rows, console.width) if console.is_terminal else None
    if title:
        show_line(console, title, "bold")
    if widths is None:
        for line in plain_lines(columns, rows):
            _write_line(console, line)
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for column, width in zip(columns, widths, strict=True):
            table.add_column(Text(str(column.header)), justify=column.justify, overflow="fold", width=width)
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        console.print(table)
    for note in notes:
        show_line(console, note)
    _write_line(console, "")


def fit_columns(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths of the columns in a terminal; None if it is too narrow for whole words, numbers and `no_wrap` cells.

    Columns that need little get it first; the others share what is left.

    >>> columns, rows = [number_column("bytes read"), Column("why")], [("80 KiB", "because it is so")]
    >>> [fit_columns(columns, rows, width) for width in (80, 20, 12)]
    [[10, 16], [8, 10], None]
    """
    widths, wanted = [], []
    for column, *cells in zip(columns, *rows, strict=True):
        texts = [str(column.header), *cells]
        words = max(
            (len(word) for text in (texts[:1] if column.no_wrap else texts) for word in text.split()), default=0
        )
        wanted.append(max(map(len, texts)))
        widths.append(max([min(words, LONGEST_WORD), *(map(len, cells) if column.no_wrap else ())]))
    spare = width - sum(widths) - GAP * (len(widths) - 1)
    if spare < 0:
        return None
    order = sorted(range(len(widths)), key=lambda index: wanted[index] - widths[index])
    for place, index in enumerate(order):
        more = min(wanted[index] - widths[index], spare // (len(order) - place))
        widths[index] += more
        spare -= more
    return widths


def plain_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Header and rows, columns two spaces apart.

    >>> plain_lines([Column("rank"), number_column("bytes")], [("0", "8"), ("10", "16")])
    ['rank  bytes', '0         8', '10       16']
    """
    cells = [tuple(str(column.header) for column in columns), *rows]
    widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
    is_number = [column.justify == "right" for column in columns]
    padded = [
        [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        for row in cells
    ]
    return [(" " * GAP).join(row).rstrip() for row in padded]


def show_line(console: Console, text: str, style: str = "") -> None:
    """A line, wrapped at words in a terminal, invisible characters escaped; the first word has its colour of `STYLES`."""
    text = escaped(text)
    if not console.is_terminal:
        _write_line(console, text)
        return
    first, space, rest = text.partition(" ")
    console.print(Text.assemble((first, STYLES.get(first, style)), (space + rest, style), overflow="fold"))


def _write_line(console: Console, text: str) -> None:
    """Text without markup, wrapping or colour."""
    console.file.write(text + "\n")


def write_json(document: Any) -> None:
    """One JSON document on stdout, with escapes for what its encoding or JSON cannot carry: a path may be any bytes."""
    text = json.dumps(document, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=1)
    sys.stdout.write(text + "\n")


def write_encoded(content: bytes) -> None:
    """JSON that is encoded already."""
    text = content.decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        write_json(json.loads(text))
    else:
        sys.stdout.write(text)


def ignore_no_width() -> None:
    """Drop COLUMNS=0, as some parents of a terminal without a size set it: Rich would print nothing at all, errors included."""
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def escape_unencodable() -> None:
    """Make stdout write escapes for characters that its encoding lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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

    >>> [seconds_text(s) for s in (8e-9, 0.0000651, 0.0123, 0.9999, 1.5, 1234.5, 0)]
    ['8 ns', '65.1 us', '12.3 ms', '1 s', '1.5 s', '1,234 s', '0 s']
    """
    if seconds >= 999.5:  # in three digits it would have an exponent
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 0.9995 or not seconds:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def number(value: Fraction) -> int | float:
    """A JSON number: whole if it is."""
    return int(value) if value.denominator == 1 else float(value)


def join_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, `none` if there are none."""
    return number_ranges(ranks) if ranks else "none"
