"""Where are the outcomes of measured rows kept, until a table is written from them?

One JSON object per line in `results.jsonl` below `tests.e2e.models.home()`, or in `results-0.33.0.jsonl` when the whole run is of another release of
vLLM than the installed one; `KVRESHARD_E2E_RESULTS` names another file.
A later line about the same row and connector replaces an earlier one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.e2e import models
from tests.e2e.engine import RELEASE
from tests.releases import INSTALLED


def path(release: str = RELEASE) -> Path:
    """The file of a run with that release."""
    name = "results.jsonl" if release == INSTALLED else f"results-{release}.jsonl"
    return Path(os.environ.get("KVRESHARD_E2E_RESULTS", models.home() / name))


def keep(result: dict[str, Any]) -> None:
    """Append one row's outcome."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().open("a") as file:
        file.write(json.dumps(result) + "\n")


def read(source: Path | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest outcome of each (row, connector)."""
    source = source or path()
    lines = source.read_text().splitlines() if source.exists() else []
    found = (json.loads(line) for line in lines if line.strip())
    return {(result["case"], result["connector"]): result for result in found}
