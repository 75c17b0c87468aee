"""Runs one part of the kit in this process: `python -m bench.gpu.part MODULE --device D --lines FILE --seconds N [--rehearse]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.findings import Bench


def main(words: Sequence[str]) -> None:
    """A part is a module with a function `run(bench)`; its name is the last of its dotted ones."""
    parser = argparse.ArgumentParser("bench.gpu.part")
    parser.add_argument("module")
    parser.add_argument("--device", required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(words)
    module = importlib.import_module(given.module)
    until_s = time.monotonic() + given.seconds
    module.run(
        Bench(given.module.rpartition(".")[2], given.device, given.rehearse, os.cpu_count() or 1, given.lines, until_s)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
