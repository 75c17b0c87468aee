"""Does docs/reliability.md say what the runs have left, and nothing else?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests import reliability
from tests.reliability import BEGIN, END, RESULTS, ROWS, main, markdown

PAGE = RESULTS.parents[1] / "docs" / "reliability.md"


def test_the_page_is_what_the_script_writes(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    shutil.copy(PAGE, copy)
    assert main(["--into", str(copy)]) == 0
    assert copy.read_text() == PAGE.read_text(), "python -m tests.reliability --into docs/reliability.md"


def test_without_results_nothing_was_run(tmp_path: Path) -> None:
    table = markdown(tmp_path)
    assert table.count("| not run |") == len(ROWS)


def test_a_figure_comes_from_its_file(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    soak = json.loads((RESULTS / "soak.json").read_text())
    (tmp_path / "soak.json").write_text(json.dumps({**soak, "ended": 123456, "lost": 77}))
    row = next(line for line in markdown(tmp_path).splitlines() if "make soak" in line)
    assert "123,456 requests" in row
    assert row.endswith("| 77 | 0 |")


def test_a_page_without_a_place_for_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nno end")
    with pytest.raises(SystemExit):
        main(["--into", str(page)])
    assert END in capsys.readouterr().err
    assert page.read_text() == f"{BEGIN}\nno end"


def test_every_row_has_a_file_of_its_own() -> None:
    files = [row.file for row in reliability.ROWS]
    assert len(set(files)) == len(files)
