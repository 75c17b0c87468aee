"""Runs one part of the kit in this process: `python -m bench.gpu.part NAME --device D --lines FILE [--rehearse]`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.findings import Bench


def main(words: Sequence[str]) -> None:
    """A part is a module of `bench.gpu.parts` with a function `run(bench)`."""
    parser = argparse.ArgumentParser("bench.gpu.part")
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(words)
    module = importlib.import_module(f"bench.gpu.parts.{given.name}")
    module.run(Bench(given.name, given.device, given.rehearse, os.cpu_count() or 1, given.lines))


if __name__ == "__main__":
    main(sys.argv[1:])
