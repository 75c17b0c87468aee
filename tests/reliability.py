"""What is promised, how was it tried, and what came out? A table from the results that runs have left.

    python -m tests.reliability --into docs/reliability.md [--results DIR]

Each row names the run that it stands on; a row without its result says "not run". The runs: `make reliability`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- reliability: begin -->", "<!-- reliability: end -->"
Result = Mapping[str, Any]
COLUMNS = ("promise", "tried by", "tries", "faults survived", "bad inputs", "lost", "wrong")


@dataclass(frozen=True)
class Figures:
    """Of one row; None where it does not apply."""

    tries: str
    faults: int | None = None
    bad_inputs: int | None = None
    lost: int | None = None
    wrong: int | None = None


@dataclass(frozen=True)
class Row:
    """A promise, where it is tried, the result's file and what it says. `read` is only called if there is one."""

    promise: str
    where: str
    file: str
    read: Callable[[Result], Figures]


def _passed(result: Result, part: str = "") -> int:
    return sum(counts.get("passed", 0) for name, counts in result["files"].items() if part in name)


def _failed(result: Result, part: str = "") -> int:
    return sum(counts.get("failed", 0) for name, counts in result["files"].items() if part in name)


def _model(result: Result) -> Figures:
    figures = result["figures"]
    tries = f"{figures['machines']:,} histories, {figures['loads']:,} loads"
    return Figures(tries, None, None, 0 if not _failed(result) else _failed(result), _failed(result))


def _soak(result: Result) -> Figures:
    faults = {name: count for name, count in result["faults"].items() if name != "hostile client"}
    return Figures(
        f"{result['ended']:,} requests in {result['seconds']:,.0f} s, {result['compared_bytes'] / 1e9:.1f} GB compared",
        sum(faults.values()),
        result["faults"].get("hostile client", 0),
        result["lost"],
        result["wrong_requests"],
    )


def _leaks(result: Result) -> Figures:
    rows = result["rows"]
    return Figures(
        f"{sum(row['cycles'] for row in rows):,} requests, {len(rows)} pairs of engines",
        sum(row["restarts"] for row in rows),
        None,
        sum(len(row["grown"]) for row in rows),
        sum(row["wrong"] for row in rows),
    )


def _incast(result: Result) -> Figures:
    rows = [row for row in result["rows"] if "no bound" not in row["case"]]
    worst = min(row["jain"] for row in rows)
    return Figures(f"{len(rows)} cases of {len(rows[0]['num_bytes'])} readers, Jain's index {worst:.2f} or more")


def _tests(part: str = "", figure: str = "") -> Callable[[Result], Figures]:
    """Rows that are tests by name: those that failed are what was lost."""

    def read(result: Result) -> Figures:
        told = f", {result['figures'][figure]:,} {figure}" if figure in result["figures"] else ""
        return Figures(f"{_passed(result, part)} tests{told}", None, None, _failed(result, part), _failed(result, part))

    return read


def _hostile(result: Result) -> Figures:
    return Figures(f"{_passed(result)} tests", None, result["figures"]["hostile clients"], _failed(result), None)


def _in_tree(result: Result) -> Figures:
    figures = result["figures"]
    return Figures(
        "for comparison", None, figures["hostile clients"], figures["ended_by"] + figures["silenced_by"], None
    )


def _fuzz(result: Result) -> Figures:
    total = result["total"]
    return Figures(f"{len(result) - 1} decoders", None, total["inputs"], None, total["findings"])


ROWS = (
    Row(
        "No order of events serves wrong bytes, writes pages that were given back, loses a request or keeps a lease",
        "`tests/property/test_session.py`, random histories of two requests",
        "model.json",
        _model,
    ),
    Row(
        "Every request ends in time, and every byte that is served is right, whatever is killed, stopped or aborted",
        "`make soak`, eight engines as processes over NIXL",
        "soak.json",
        _soak,
    ),
    Row(
        "Nothing is left of requests, however they ended (lost: counters that grew)",
        "`python -m tests.faults.leaks`",
        "leaks.json",
        _leaks,
    ),
    Row("Many readers share one source", "`python -m bench.incast`", "incast.json", _incast),
    Row(
        "A stopped source leaves its readers' other loads alone",
        "`tests/faults/test_incast.py`",
        "faults.json",
        _tests("test_incast"),
    ),
    Row(
        "The faults of a session that have names",
        "`tests/unit/session/`",
        "session.json",
        _tests(),
    ),
    Row(
        "After a hostile client the next honest one is answered",
        "`tests/faults/test_hostile_clients.py`, with and without keys",
        "hostile.json",
        _hostile,
    ),
    Row(
        "vLLM's own listener, the same clients (lost: those that ended or silenced it)",
        "`tests/vllm/test_hostile_clients.py`",
        "hostile-in-tree.json",
        _in_tree,
    ),
    Row("What decodes a peer's bytes refuses what is not right", "`python -m tests.fuzz.run`", "fuzz.json", _fuzz),
    Row(
        "Real vLLM engines survive the death, the sleep and the restart of either side",
        "`tests/e2e/test_faults.py`",
        "e2e-faults.json",
        _tests(),
    ),
)


def _read(folder: Path, file: str) -> Result | None:
    path = folder / file
    return json.loads(path.read_text()) if path.exists() else None


def _cells(row: Row, result: Result | None) -> list[str]:
    if result is None:
        return [row.promise, row.where, "not run", "", "", "", ""]
    figures = row.read(result)
    numbers = (figures.faults, figures.bad_inputs, figures.lost, figures.wrong)
    return [row.promise, row.where, figures.tries, *("" if number is None else f"{number:,}" for number in numbers)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _details(folder: Path) -> list[str]:
    """The runs behind some of the rows, in their own words."""
    lines = []
    if soak := _read(folder, "soak.json"):
        lines += [f"**Soak**, seed {soak['seed']}.", ""]
        for title, key in (("ends", "ends"), ("loaded", "per_pair"), ("early loads", "early"), ("faults", "faults")):
            counts = soak[key]
            told = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
            lines.append(f"- {title}: {told}")
        lines.append(
            f"- slowest failure {soak['slowest_failure_s']:.1f} s; {soak['quarantined']} loads quarantined; {soak['innocent']} failed "
            "though neither their source nor their reader had been touched"
        )
        if stalls_s := soak["stalls_s"]:
            lines.append(
                f"- the machine stood still for more than a second {len(stalls_s)} times, {max(stalls_s):.1f} s at most; bounds leave "
                "out those times"
            )
        grown = ", ".join(
            f"{name} {count / 1e6:+.1f} MB and {soak['growth_fds'][name]:+d} file descriptors"
            for name, count in soak["growth_bytes"].items()
        )
        lines += [f"- engines that lived all the time, from a fifth of it to its end: {grown}", ""]
    if leaks := _read(folder, "leaks.json"):
        lines += ["**Leaks**, before and after, of the process with both engines.", ""]
        lines += [_line(("pair", "requests", "file descriptors", "threads", "resident MB")), _line(["---"] * 5)]
        for row in leaks["rows"]:
            before, after = row["before"][0], row["after"][0]
            pairs = [f"{before[name]} → {after[name]}" for name in ("fds", "threads")]
            memory = f"{before['resident_bytes'] / 1e6:.1f} → {after['resident_bytes'] / 1e6:.1f}"
            lines.append(_line([" → ".join(row["pair"]), f"{row['cycles']:,}", *pairs, memory]))
        sockets = leaks["rows"][0]["nixl_fds_per_return"] / 2
        lines += [
            "",
            f"NIXL's own, apart: {sockets:g} file descriptors a side when a living peer is removed and added.",
            "",
        ]
    if incast := _read(folder, "incast.json"):
        lines += ["**Incast.**", "", _line(("case", "Jain's index", "largest / smallest share", "MB/s together"))]
        lines.append(_line(["---"] * 4))
        for row in incast["rows"]:
            rate = sum(row["num_bytes"]) / row["seconds"] / 1e6
            lines.append(_line([row["case"], f"{row['jain']:.3f}", f"{row['ratio']:.2f}", f"{rate:,.0f}"]))
        lines.append("")
    return lines


def markdown(folder: Path) -> str:
    """The table and the details."""
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(_cells(row, _read(folder, row.file))) for row in ROWS]
    return "\n".join([*lines, "", *_details(folder)]).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description="What is promised, what came out?")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, help="file that has a place for the table; default: standard output")
    options = parser.parse_args(arguments)
    if options.into is None:
        print(markdown(options.results), end="")
        return 0
    before, _, rest = options.into.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        parser.error(f"{options.into} has no lines '{BEGIN}' and '{END}'")
    options.into.write_text(f"{before}{BEGIN}\n\n{markdown(options.results)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
