"""What came out of a run of the suite, kept for `tests.reliability`?

With `KVRESHARD_RESULTS=FILE` in the environment a run of pytest leaves its outcomes per test file, and the sums of the figures that
tests record with pytest's `record_property`: of numbers, and of lists how long they are.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest


class Outcomes:
    """A plugin of pytest."""

    def __init__(self, path: Path, seed: object) -> None:
        self._path, self._seed = path, seed
        self._files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._figures: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test; set-up and tear-down count if something went wrong there."""
        if report.when == "teardown":  # whatever recorded a property has done so by now
            for name, value in report.user_properties:
                self._figures[name] += len(value) if isinstance(value, list) else int(str(value))
        if report.when == "call" or report.outcome != "passed":
            self._files[report.nodeid.partition("::")[0]][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Write them down."""
        found = {"kind": "pytest", "seed": self._seed, "files": self._files, "figures": self._figures}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
