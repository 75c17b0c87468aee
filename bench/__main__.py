"""`python -m bench [rows]`: runs the rows, prints the table with its verdicts, writes `bench/results.json`.

Rows are named by their letters (`python -m bench a c`); all without a letter. BENCH=full runs every case, otherwise a subset that
ends within ten minutes. A bar that does not hold is no failure: the exit code is 1 only where a row did not come to its end.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from bench import beside, rows_growth, rows_orders, rows_session, rows_staging
from bench.results import Result, machine, save, show

# Those that stand by themselves; `beside.ROWS` are the others.
ROWS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "d": rows_session.run,
    "e": rows_growth.run,
    "m": rows_staging.run,
    "o": rows_orders.run,
}
HERE = Path(__file__).parent


def main() -> None:
    """All rows that were asked for, one after another; results are kept as they come."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    console = Console(width=int(os.environ.get("COLUMNS", "160")))
    letters = sorted([*ROWS, *beside.ROWS])
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", default=letters, metavar="row", help=f"one of {', '.join(letters)}")
    wanted, full, about = parser.parse_args().rows, os.environ.get("BENCH") == "full", machine()
    if unknown := sorted({*wanted} - {*letters}):
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(letters)}")
    results: list[Result] = []
    for result in _results(wanted, full):
        results.append(result)
        save(results, about, HERE / "results.json")
        console.print(f"{result.row}: {result.name}{result.beside and ', beside '}{result.beside} {result.note}")
    show(results, console)
    sys.exit(any(result.note.startswith(beside.FAILED) for result in results))


def _results(wanted: list[str], full: bool) -> Iterator[Result]:
    letters = [letter for letter in wanted if letter in beside.ROWS]
    if letters:
        yield from beside.beside(letters, full)
    for letter in wanted:
        if letter not in letters:
            yield from beside.guarded(letter, lambda: ROWS[letter](full))  # noqa: B023 (called here)


if __name__ == "__main__":
    main()
