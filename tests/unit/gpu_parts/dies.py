"""Dies with a word."""

import os
import sys

from bench.gpu.findings import Bench


def run(bench: Bench) -> None:
    sys.stdout.write("a driver says something\n")
    sys.stdout.flush()
    os._exit(7)
