"""`python -m bench [rows]`: runs the rows, prints the table, writes `bench/results.json` and the plots.

Rows are named by their first letters (`python -m bench a c`); all without a name. BENCH=full runs every case, otherwise a
subset that ends within five minutes. Rows beside vLLM's own connector need vLLM, see `bench/intree.py`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from bench import (
    rows_bind,
    rows_growth,
    rows_handshake,
    rows_incast,
    rows_model,
    rows_mooncake,
    rows_session,
    rows_transfer,
    rows_ttft,
)
from bench.results import Result, machine, save, show, skipped

ROWS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "a": rows_handshake.run,
    "b": rows_bind.run,
    "c": rows_transfer.run,
    "d": rows_session.run,
    "e": rows_growth.run,
    "f": rows_ttft.run,
    "g": rows_mooncake.run,
    "h": rows_incast.run,
    "m": rows_model.run,
}
HERE = Path(__file__).parent


def main() -> None:
    """All rows that were asked for, one after another; a row that fails does not take the others with it."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    console = Console(width=int(os.environ.get("COLUMNS", "160")))
    wanted, full, about = sys.argv[1:] or list(ROWS), os.environ.get("BENCH") == "full", machine()
    results: list[Result] = []
    failed = False
    for row in wanted:
        started_s = time.monotonic()
        try:
            for result in ROWS[row](full):
                results.append(result)
                save(results, about, HERE / "results.json")  # a run that is cut off has measured something
                console.print(
                    f"{result.row}: {result.name}: {result.ratio if result.ratio is None else round(result.ratio, 2)}"
                )
        except Exception as error:  # noqa: BLE001  the other rows are worth having
            console.print_exception()
            failed = True
            results.append(skipped(row, "the row failed", f"{type(error).__name__}: {error}"))
        console.print(f"row {row}: {time.monotonic() - started_s:.0f} s")
    save(results, about, HERE / "results.json")
    show(results, console)
    sys.exit(failed)


if __name__ == "__main__":
    main()
