"""Does a table lose nothing, however narrow the terminal?"""

import io
import re

import pytest
from rich.console import Console

from kvreshard.catalog import MODELS
from kvreshard.cli.models import models_sheet, read_row
from kvreshard.cli.terminal import Column, Sheet, column_widths, show_sheet

READINGS = Sheet(
    "readings",
    (
        Column("decode rank"), Column("reads from"), Column("what"), Column("per token", right=True),
        Column("runs per page", right=True), Column("way"),
    ),
    (("0-1", "0", "head 0 of 8", "25 KiB", "80 x 1 KiB", "staged"), ("2-3", "1", "head 1 of 8", "25 KiB", "8 x 1 KiB", "direct")),
)  # fmt: skip
LOAD = Sheet(
    "load",
    (Column("what"), Column("value")),
    (("destination", "'decode', 2 ranks, 60 fields in 6 groups"), ("source", "never met at tcp://10.0.0.1:5600")),
)
CATALOG = models_sheet([read_row(MODELS[name]) for name in ("llama-3.1-8b", "deepseek-v4-flash")], with_layers=False)


def shown(sheet: Sheet, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    show_sheet(console, sheet)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [32, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("sheet", [READINGS, LOAD, CATALOG], ids=lambda sheet: sheet.title)
def test_every_word_is_there_and_in_one_piece(sheet: Sheet, width: int) -> None:
    text = shown(sheet, width)
    assert max(map(len, text.splitlines())) <= width
    words = {
        word
        for cells in (*sheet.rows, [column.name for column in sheet.columns])
        for cell in cells
        for word in cell.split()
    }
    assert {word for word in words if len(word) <= 20} <= set(re.split(r"\s+", text))


def test_a_table_takes_no_more_than_it_needs_and_begins_with_what_it_must_have() -> None:
    assert column_widths(READINGS, 200) == [11, 10, 11, 9, 13, 6]
    assert column_widths(READINGS, 57) == [7, 6, 11, 7, 10, 6]
    assert column_widths(READINGS, 47) == [6, 5, 4, 6, 10, 6]
    assert column_widths(READINGS, 46) is None
