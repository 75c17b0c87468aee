"""Does a table lose nothing, however narrow the terminal, and does every command fit a terminal of 80 columns?"""

import io
import re

import pytest
from rich.console import Console
from rich.table import Column

from kvreshard.catalog import MODELS, EngineSpec
from kvreshard.cli.inputs import read_pair
from kvreshard.cli.models import read_model, show_model, show_models
from kvreshard.cli.output import fit_columns, number_column, show_line, show_table
from kvreshard.cli.plan_view import show_plan
from kvreshard.plan import compile_routes
from kvreshard.plan.explain import explain

READINGS = (
    "readings",
    (
        Column("decode rank"), Column("reads from"), Column("what"), number_column("per token"), number_column("runs per page"),
        Column("way"),
    ),
    (("0-1", "0", "head 0 of 8", "25 KiB", "80 x 1 KiB", "staged"), ("2-3", "1", "head 1 of 8", "25 KiB", "8 x 1 KiB", "direct")),
)  # fmt: skip
LOAD = (
    "load",
    (Column("what"), Column("value")),
    (("destination", "'decode', 2 ranks, 60 fields in 6 groups"), ("source", "never met at tcp://10.0.0.1:5600")),
)


def terminal(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, color_system=None), file


@pytest.mark.parametrize("width", [32, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("sheet", [READINGS, LOAD], ids=lambda sheet: sheet[0])
def test_every_word_is_there_and_in_one_piece(sheet: tuple, width: int) -> None:
    console, file = terminal(width)
    show_table(console, *sheet)
    text = file.getvalue()
    is_table = fit_columns(sheet[1], sheet[2], width) is not None
    assert not is_table or max(map(len, text.splitlines())) <= width
    words = {
        word for cells in (*sheet[2], [column.header for column in sheet[1]]) for cell in cells for word in cell.split()
    }
    assert words <= set(re.split(r"\s+", text))


def test_a_table_takes_no_more_than_it_needs_and_begins_with_what_it_must_have() -> None:
    assert fit_columns(READINGS[1], READINGS[2], 200) == [11, 10, 11, 9, 13, 6]
    assert sum(fit_columns(READINGS[1], READINGS[2], 57) or ()) == 57 - 2 * 5
    assert fit_columns(READINGS[1], READINGS[2], 47) == [6, 5, 4, 6, 10, 6]
    assert fit_columns(READINGS[1], READINGS[2], 46) is None


def test_text_wraps_at_words() -> None:
    console, file = terminal(20)
    show_line(console, "error: one long sentence without any [markup] of rich's")
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "error: one long",
        "sentence without any",
        "[markup] of rich's",
    ]


def test_the_catalog_fits_a_screen() -> None:
    console, file = terminal(80)
    show_models(console, [read_model(name) for name in MODELS])
    lines = file.getvalue().splitlines()
    assert len(lines) <= len(MODELS) + 6
    assert max(map(len, lines)) <= 80
    console, file = terminal(80)
    show_model(console, read_model("deepseek-v4-flash"))
    assert max(map(len, file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("model", MODELS)
def test_plans_fit_80_columns(model: str) -> None:
    pair = read_pair(model, (EngineSpec(tp=1), EngineSpec(tp=2, page=512)))
    console, file = terminal(80)
    show_plan(console, explain(compile_routes(pair.prefill, pair.decode)), pair, None, details=False)
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "decode rank  reads from" in file.getvalue()  # as tables, not as the lines of a terminal that is too narrow
