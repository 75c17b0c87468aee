"""Where are the outcomes of measured rows kept, until a table is written from them?

One JSON object per line in `results.jsonl` below `tests.e2e.models.home()`; `KVRESHARD_E2E_RESULTS` names another file.
A later line about the same row and connector replaces an earlier one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.e2e import models


def path() -> Path:
    return Path(os.environ.get("KVRESHARD_E2E_RESULTS", models.home() / "results.jsonl"))


def keep(result: dict[str, Any]) -> None:
    """Append one row's outcome."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().open("a") as file:
        file.write(json.dumps(result) + "\n")


def read(source: Path | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest outcome of each (row, connector)."""
    lines = (source or path()).read_text().splitlines()
    found = (json.loads(line) for line in lines if line.strip())
    return {(result["case"], result["connector"]): result for result in found}
