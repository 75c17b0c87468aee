"""Has every log line a name, and is every name in docs/reference/logs.md, with its level?"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import kvreshard
from kvreshard.model.logs import fields

PACKAGE = Path(kvreshard.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "logs.md"
LEVELS = {"info", "warning", "error", "exception", "critical", "log"}
# Those that hand a line on, with the name that they were given.
PASSING = {"model/logs.py"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call that logs from INFO on."""
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if where in PASSING or not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            target = ast.unparse(node.func.value)
            if (target == "logger" and node.func.attr in LEVELS) or (
                target.rpartition(".")[2] in ("repeats", "_repeats") and node.func.attr == "log"
            ):
                yield f"{where}:{node.lineno}", node


def event_of(where: str, call: ast.Call) -> tuple[str, set[str]]:
    """The name of a line and its fields."""
    (extra,) = [keyword.value for keyword in call.keywords if keyword.arg == "extra"] or [None]
    assert isinstance(extra, ast.Call), f"{where}: a line from INFO on needs extra=fields(...)"
    assert ast.unparse(extra.func).lstrip("_") == "fields", where
    (name,) = extra.args
    assert isinstance(name, ast.Constant), where
    assert isinstance(name.value, str), where
    return name.value, {keyword.arg for keyword in extra.keywords if keyword.arg}


def test_every_line_has_a_name_that_the_page_explains() -> None:
    named = {event_of(where, call)[0] for where, call in calls()}
    explained = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(named) > 40
    assert sorted(explained) == sorted(named)


def test_no_field_hides_an_attribute_of_a_record() -> None:
    record = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
    for where, call in calls():
        name, found = event_of(where, call)
        assert not found & record, where
        logging.getLogger("kvreshard.tests").makeRecord("n", 20, "f", 1, "m", (), None, extra=fields(name))
