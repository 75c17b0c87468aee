"""Rows beside vLLM's own NIXL connector, once per release of vLLM, each release in a process of its own.

Two releases cannot share an interpreter. The parent (`beside`) starts `python -m bench.beside RELEASE ROW ...`, which prints one line of JSON
per result; the parent hands them on as they come.

| release | where it is |
|---|---|
| 0.32.0 | `.venv-vllm`, made by `scripts/venv vllm` |
| 0.33.0 | the folder of `tests.releases`, before 0.32.0 on `PYTHONPATH` |
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tests import releases

from bench.bars import Bar
from bench.results import Result, skipped

RELEASES = (releases.INSTALLED, releases.NEWEST)
NEWEST = RELEASES[-1]
# Letter of the row, and the module that measures it: its `run(release, full)`.
ROWS = {
    "a": "rows_handshake",
    "b": "rows_preparation",
    "c": "rows_transfer",
    "f": "rows_first_token",
    "g": "rows_load",
    "n": "rows_early",
}
# The largest block that glibc learns from (`DEFAULT_MMAP_THRESHOLD_MAX`, less its own header).
KEPT_BYTES = 31 << 20
MARK = "RESULT "
FAILED = "failed: "
ENVIRONMENT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_LOGGING_LEVEL": "ERROR"}


def missing(release: str) -> str | None:
    """Why the rows beside this release cannot run here; None if they can."""
    return releases.missing(release)


def beside(letters: Sequence[str], full: bool) -> Iterator[Result]:
    """All rows of these letters, beside every release. `full`: every case."""
    for release in RELEASES:
        why = missing(release)
        if why is not None:
            yield from (skipped(letter, f"all beside vLLM {release}", why, named(release)) for letter in letters)
        else:
            yield from _from_a_process(release, letters, full)


def named(release: str) -> str:
    """What the release's connector is called in results."""
    return f"NixlConnector {release}"


def _from_a_process(release: str, letters: Sequence[str], full: bool) -> Iterator[Result]:
    places = [str(releases.folder(release) or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    command = [sys.executable, "-m", "bench.beside", release, "full" if full else "short", *letters]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield _decoded(line[len(MARK) :])
    if process.returncode:
        why = f"{FAILED}the process beside vLLM {release} ended with {process.returncode}"
        yield from (Result(letter, f"all beside vLLM {release}", note=why) for letter in letters)


def _decoded(text: str) -> Result:
    entry = json.loads(text)
    bars = tuple(Bar(**bar) for bar in entry.pop("bars"))
    span = entry.pop("interval")
    return Result(**entry, bars=bars, interval=None if span is None else (span[0], span[1]))


def guarded(row: str, results: Callable[[], Iterable[Result]]) -> Iterator[Result]:
    """The row's results; one that says so if it fails, so that it does not take other rows with it."""
    try:
        yield from results()
    except Exception as error:  # noqa: BLE001  the other rows are worth having
        traceback.print_exc()
        yield Result(row, "the row", note=f"{FAILED}{type(error).__name__}: {error}")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, as it does in an engine, which has freed large arrays before its first request.

    Otherwise the memory of one request is given back to the kernel and fetched again for the next one, page by page: half of the processor
    time of 655,360 copies, on either side.
    """
    np.empty(KEPT_BYTES, dtype=np.uint8)


def main() -> None:
    """The child: measures rows beside the release that is imported here. Exits with 1 if that is another one."""
    release, extent, *letters = sys.argv[1:]
    found = importlib.import_module("vllm").__version__
    if not found.startswith(release):
        sys.exit(f"vLLM is {found} here, not {release}")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    keep_freed_memory()
    for letter in letters:
        module = importlib.import_module(f"bench.{ROWS[letter]}")
        for result in guarded(letter, lambda: module.run(release, extent == "full")):  # noqa: B023 (called here)
            print(MARK + json.dumps(asdict(result), default=float), flush=True)


if __name__ == "__main__":
    main()
