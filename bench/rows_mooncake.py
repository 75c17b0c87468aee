"""Mooncake's transfer engine over TCP, beside NIXL over TCP as we use it: the same scattered pieces, one host, loopback.

Its wheel without CUDA, `mooncake-transfer-engine-non-cuda` (0.3.13), goes into the environment that runs the bench by hand, and
links against the system's libibverbs; where either is missing the row says so. `tcp_pair` measures, in processes of its own.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator

from bench.results import Result, skipped

ROW = "g mooncake"
NAME = "NIXL over TCP beside Mooncake over TCP"
TIMEOUT_S = 120


def run(full: bool) -> Iterator[Result]:
    """One row per size of a piece."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        remedy = "pip install mooncake-transfer-engine-non-cuda==0.3.13; it needs the system's libibverbs1"
        yield skipped(ROW, NAME, f"{error} ({remedy})")
        return
    done = subprocess.run(
        [sys.executable, "-m", "bench.tcp_pair"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        yield skipped(ROW, NAME, f"it did not run: {done.stderr.strip()[-200:]}")
    for line in lines:
        size = f"{line['size'] >> 10} KiB" if line["size"] < 1 << 20 else f"{line['size'] >> 20} MiB"
        ratio, low, high = line["ratio"]
        num_bytes = line["size"] * line["count"]
        yield Result(
            ROW, f"{NAME}, {line['count']} pieces of {size}", line["ours_s"] * 1e3, line["theirs_s"] * 1e3, "ms", ratio, (low, high), "none",
            None, "no bar", {"gb_per_s": num_bytes / line["ours_s"] / 1e9, "theirs_gb_per_s": num_bytes / line["theirs_s"] / 1e9},
        )  # fmt: skip
