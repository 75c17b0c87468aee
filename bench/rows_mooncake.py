"""Mooncake's transfer engine over TCP, beside NIXL over TCP as we use it: the same scattered pieces, one host, loopback.

1. `scripts/venv bench` puts its wheel without CUDA (`requirements-mooncake.txt`) into `.venv`, whichever environment the bench runs in.
2. The wheel wants the system's libibverbs, also for TCP. NIXL's wheel has one in it: where the system has none, that one is found by the
   name that Mooncake looks for.
3. `tcp_pair` measures, in processes of its own. Where the engine cannot be imported the row says why.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.results import Result, skipped

ROW = "g mooncake"
NAME = "NIXL over TCP beside Mooncake over TCP"
TIMEOUT_S = 120
ROOT = Path(__file__).resolve().parents[1]


def run(full: bool) -> Iterator[Result]:
    """One row per size of a piece."""
    own = ROOT / ".venv/bin/python"
    python = str(own) if own.exists() else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **_libraries(Path(folder))}
        tried = subprocess.run(
            [python, "-c", "import mooncake.engine"], capture_output=True, text=True, env=environment, check=False
        )
        if tried.returncode:
            remedy = "pip install --no-deps -r requirements-mooncake.txt; it needs libibverbs1"
            yield skipped(ROW, NAME, f"{tried.stderr.strip().splitlines()[-1]} ({remedy})")
            return
        done = subprocess.run(
            [python, "-m", "bench.tcp_pair"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
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


def _libraries(folder: Path) -> dict[str, str]:
    """Where to look for NIXL's libibverbs under its usual name, if the system has none."""
    bundled = next(ROOT.glob(".venv/lib/python*/site-packages/nixl*.libs/libibverbs-*.so.1*"), None)
    if ctypes.util.find_library("ibverbs") or bundled is None:
        return {}
    (folder / "libibverbs.so.1").symlink_to(bundled)
    others = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), str(bundled.parent), *others])}
