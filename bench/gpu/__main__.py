"""Runs every part of the kit, each in a process of its own with a bound, and writes what was found. See README.md.

1. Parts that only compare bytes run side by side, as far as there are cores; parts that measure time run alone, afterwards.
2. A part that hangs is ended at its bound, with all that it started; one that dies is told with its last words. The others go on.
3. `gpu-results.json` and `gpu-results.txt` are written after every part, so that what was found is there whatever comes next.

Exit status: 0 when nothing failed, 1 when something did, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu.environment import describe_machine
from bench.gpu.findings import FAILED, SKIPPED, read_lines
from bench.gpu.show import as_text

ROOT = Path(__file__).resolve().parents[2]
# Of the kit as a whole, on a device and in a rehearsal.
WHOLE_S, REHEARSAL_S = 540, 170
LAST_WORDS = 1500
CORES_PER_PART = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A module with a function `run`, its bound on a device and in a rehearsal, and whether it measures time."""

    name: str
    bound_s: float
    rehearsal_s: float
    is_timed: bool = False
    package: str = "bench.gpu.parts"


PARTS = (
    Part("wire", 60, 30),
    Part("contract", 150, 60),
    Part("deaths", 90, 45),
    Part("main_job", 200, 60),
    Part("memory", 60, 30),
    Part("session", 90, 40),
    Part("views", 60, 30),
    Part("streams", 60, 20, True),
    Part("staging", 110, 40, True),
    Part("figures", 150, 40, True),
    Part("leaks", 60, 40, True),
    Part("model", 150, 40, True),
    Part("orders", 60, 30, True),
)


def main(words: Sequence[str]) -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser("bench/gpu/run", description="Prove and measure everything on one GPU.")
    parser.add_argument("--rehearse", action="store_true", help="run every part on the processor, in small")
    parser.add_argument("--device", default="cuda:0", help="the device (default: cuda:0)")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: build/gpu; bench/gpu/README.md says what to keep)"
    )
    parser.add_argument("--parts", default="", help="only these parts, with commas between")
    parser.add_argument("--seconds", type=float, help="bound of the whole run")
    given = parser.parse_args(words)
    if not given.rehearse and not re.fullmatch(r"cuda:\d+", given.device):
        parser.error(f"--device {given.device}: give cuda: and a number, as cuda:0, or --rehearse")
    names = [name for name in given.parts.split(",") if name]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        parser.error(
            f"--parts: no part is called {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}"
        )
    chosen = [part for part in PARTS if not names or part.name in names]
    out = given.out or ROOT / "build" / "gpu"
    out.mkdir(parents=True, exist_ok=True)
    return Kit(given.rehearse, given.device, out, given.seconds).run(chosen)


class Kit:
    """One run of the kit."""

    def __init__(self, is_rehearsal: bool, device: str, out: Path, seconds: float | None) -> None:
        self._is_rehearsal, self._out = is_rehearsal, out
        self._device = "cpu" if is_rehearsal else device
        self._deadline_s = time.monotonic() + (seconds or (REHEARSAL_S if is_rehearsal else WHOLE_S))
        self._started_s, self._when = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self._found: list[dict[str, Any]] = []
        self._machine = describe_machine(self._device)

    def run(self, parts: Sequence[Part]) -> int:
        """All of them; returns the exit status."""
        with tempfile.TemporaryDirectory() as folder:
            together = max(1, (os.cpu_count() or 1) // CORES_PER_PART)
            with ThreadPoolExecutor(together) as pool:
                for _ in pool.map(lambda part: self._one(part, Path(folder)), [p for p in parts if not p.is_timed]):
                    self._write()
            for part in (part for part in parts if part.is_timed):
                self._one(part, Path(folder))
                self._write()
        self._write()
        sys.stdout.write(
            "\n" + as_text(self.document()) + f"\nin {self._out}: gpu-results.json, gpu-results.txt, logs/\n"
        )
        return 1 if any(found["verdict"] == FAILED for found in self._found) else 0

    def document(self) -> dict[str, Any]:
        """Everything, as it is written to `gpu-results.json`."""
        order = {part.name: number for number, part in enumerate(PARTS)}
        return {
            "when": self._when,
            "is_rehearsal": self._is_rehearsal,
            "device": self._device,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "machine": self._machine,
            "parts": sorted(self._found, key=lambda found: order[found["part"]]),
        }

    def _one(self, part: Part, folder: Path) -> None:
        lines, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
        bound_s = min(part.rehearsal_s if self._is_rehearsal else part.bound_s, self._deadline_s - time.monotonic())
        if bound_s < 1:
            self._found.append(
                {"part": part.name, "check": "the whole part", "verdict": SKIPPED, "text": "no time was left for it"}
            )
            return
        words = [
            sys.executable,
            "-m",
            "bench.gpu.part",
            f"{part.package}.{part.name}",
            "--device",
            self._device,
            "--lines",
            str(lines),
        ]
        words += ["--seconds", f"{bound_s:.1f}"]
        words += ["--rehearse"] if self._is_rehearsal else []
        started_s, problem = time.monotonic(), ""
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                if process.wait(bound_s) != 0:
                    problem = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                problem = f"had not ended after {bound_s:.0f} s"
            with contextlib.suppress(ProcessLookupError):  # the part, and ranks that it has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told = read_lines(lines)
        if problem:
            last = log.read_bytes()[-LAST_WORDS:].decode(errors="replace")
            told.append(
                {
                    "part": part.name,
                    "check": "the whole part",
                    "verdict": FAILED,
                    "text": f"{problem}; its last words: {last}",
                }
            )
        self._found += told
        kept = self._out / "logs"
        kept.mkdir(exist_ok=True)
        (kept / f"{part.name}.log").write_bytes(log.read_bytes())
        counts = {
            verdict: sum(one["verdict"] == verdict for one in told) for verdict in ("passed", "failed", "skipped")
        }
        sys.stdout.write(f"{part.name}: {counts} in {time.monotonic() - started_s:.1f} s {problem}\n")
        sys.stdout.flush()

    def _write(self) -> None:
        document = self.document()
        (self._out / "gpu-results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (self._out / "gpu-results.txt").write_text(as_text(document), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
