"""What a part of the kit has found: one line of JSON per check, written as soon as the check is over.

1. A part gets a `Bench`: the device, whether this is a rehearsal, and a file.
2. `with bench.check(name) as found:` runs one check. Its figures go to `found`; an exception fails that check alone.
3. `bench.skip(name, why)` names what was not run.

A part that hangs or dies loses only the check that it was in: the lines before it are there.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
MAX_TEXT = 2000


@dataclass(slots=True)
class Found:
    """One check: its verdict, its figures by name, `ratio` where two things were compared side by side, a text for people."""

    part: str
    check: str
    verdict: str = PASSED
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    ratio: float | None = None
    text: str = ""

    def figure(self, **figures: Any) -> None:
        """Add figures; floats are kept to four digits."""
        self.figures.update({name: _short(value) for name, value in figures.items()})

    def fail(self, text: str) -> None:
        """Fail the check and go on."""
        self.verdict, self.text = FAILED, "; ".join(filter(None, (self.text, text)))[:MAX_TEXT]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        names = ("part", "check", "verdict", "seconds", "figures", "ratio", "text")
        found = {name: getattr(self, name) for name in names}
        return {name: _short(value) for name, value in found.items() if value not in ("", {}, None)}


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part is run with. `device`: "cuda:0", or "cpu" in a rehearsal. `cores`: processor cores of this machine. `until_s`: when, by
    `time.monotonic`, the part is ended.
    """

    part: str
    device: str
    is_rehearsal: bool
    cores: int
    lines: Path
    until_s: float

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self.until_s - time.monotonic()

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Found]:
        """Run one check and write it down; what it raises fails it."""
        found, started_s = Found(self.part, name), time.monotonic()
        try:
            yield found
        except Exception as error:  # noqa: BLE001  the next check is run all the same
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            found.fail(f"{type(error).__name__}: {error} [{where}]")
            traceback.print_exc()
        found.seconds = time.monotonic() - started_s
        self._write(found)

    def skip(self, name: str, why: str) -> None:
        """Name a check that is not run."""
        self._write(Found(self.part, name, SKIPPED, text=why))

    def _write(self, found: Found) -> None:
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found.document()) + "\n")
        sys.stdout.write(f"{found.verdict}: {found.part}: {found.check} {found.figures} {found.text}\n")
        sys.stdout.flush()


def read_lines(lines: Path) -> list[dict[str, Any]]:
    """All checks that were written down, in their order."""
    if not lines.exists():
        return []
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
