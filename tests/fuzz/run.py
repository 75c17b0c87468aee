"""`python -m tests.fuzz.run`: try many inputs on every target; what was tried and found, as JSON.

Without more, inputs are random changes of the kept ones (`mutate`). With `--coverage`, atheris (libFuzzer) steers by what the
inputs reach in our code; it is no dependency: `pip install atheris`. One process, one core. A finding is written to
`build/fuzz/`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.corpus import ROOT, load
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import MAX_INPUT_S, TARGETS

FOUND = Path("build/fuzz")
MAX_MEMORY_BYTES = 8 << 30
MAX_FINDINGS = 10
# A million inputs in some five minutes of a core: a route takes a thousand times as long as a note.
SHARES = {"route": 0.004, "engine_metadata": 0.06, "layout": 0.03, "layout_json": 0.03, "params": 0.13}


class TooSlow(Exception):
    """An input took longer than `MAX_INPUT_S`."""


@dataclass
class Tally:
    """What became of a target's inputs."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    """Of the process, not of the clock."""
    findings: list[str] = field(default_factory=list)


def run_random(name: str, num_inputs: int, seconds: float, seed: int) -> Tally:
    """Changes of the kept inputs, until there were so many or the time is over."""
    rng, tally, corpus = random.Random(f"{name} {seed}"), Tally(), list(load(name).values())
    outcomes: Counter[str] = Counter()
    started_s = time.monotonic()
    signal.signal(signal.SIGPROF, _raise_too_slow)
    while tally.inputs < num_inputs and time.monotonic() < started_s + seconds and len(tally.findings) < MAX_FINDINGS:
        data = mutate(rng, corpus)
        tally.inputs += 1
        began_s = time.process_time()
        # Seconds of this process, not of the clock: a busy machine is no finding.
        signal.setitimer(signal.ITIMER_PROF, MAX_INPUT_S)
        try:
            outcomes[TARGETS[name](data)] += 1
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            signal.setitimer(signal.ITIMER_PROF, 0)
            tally.findings.append(keep(name, data, error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        tally.slowest_s = max(tally.slowest_s, time.process_time() - began_s)
    tally.accepted, tally.refused = outcomes["accepted"], outcomes["refused"]
    tally.seconds = time.monotonic() - started_s
    return tally


def run_coverage(name: str, num_inputs: int, seconds: float, seed: int) -> Tally:
    """The same under atheris, in a process of its own: it ends the process when it is done."""
    (FOUND / "corpus" / name).mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.covered", name, str(FOUND / "corpus" / name), str(ROOT / name)),
            *(f"-runs={num_inputs}", f"-max_total_time={int(seconds)}", f"-seed={seed or 1}", "-max_len=8192"),
            *(
                f"-timeout={MAX_INPUT_S}",
                "-rss_limit_mb=6000",
                "-print_final_stats=1",
                f"-artifact_prefix={FOUND}/{name}-",
            ),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    counted = re.search(r"stat::number_of_executed_units:\s+(\d+)", done.stderr)
    tally = Tally(int(counted[1]) if counted else 0, seconds=time.monotonic() - started_s)
    if done.returncode:
        tally.findings.append(done.stderr[-3000:])
    return tally


def keep(name: str, data: bytes, error: Exception) -> str:
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{path}: {type(error).__name__} {str(error)[:200]} at {Path(where.filename).name}:{where.lineno}"


def _raise_too_slow(signum: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {MAX_INPUT_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="over all targets")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most, over all targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only these")
    parser.add_argument("--coverage", action="store_true", help="steered by coverage, with atheris")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)) if not options.coverage else None
    names = options.target or list(TARGETS)
    rest = (1 - sum(SHARES.get(name, 0.0) for name in names)) / max(1, sum(name not in SHARES for name in names))
    shares = {name: SHARES.get(name, rest) for name in names}
    whole = sum(shares.values())
    document: dict[str, Any] = {}
    for name in names:
        part = shares[name] / whole
        run = run_coverage if options.coverage else run_random
        tally = run(name, round(options.inputs * part), options.seconds / len(names), options.seed)
        document[name] = {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(tally).items()}
        print(name, document[name], file=sys.stderr, flush=True)
    document["total"] = {
        "inputs": sum(entry["inputs"] for entry in document.values()),
        "findings": sum(len(entry["findings"]) for entry in document.values()),
    }
    print(json.dumps(document, indent=1))
    return 1 if document["total"]["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
