"""How long, from which seed, and what came out?

python -m tests.soak --seconds 120 [--seed S] [--json FILE] [--log FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.run import Soak


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Requests and faults, for some time.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--log", type=Path, help="where the engines' warnings go; default: a temporary file")
    options = parser.parse_args(arguments)
    log = options.log or Path(tempfile.mkstemp(prefix="kvreshard-soak-", suffix=".log")[1])
    print(f"seed {options.seed}, {options.seconds:g} s, engines' log: {log}", flush=True)
    started_s = time.monotonic()
    tally = Soak(options.seconds, options.seed, log).run()
    print("\n".join(tally.lines()))
    print(f"{time.monotonic() - started_s:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(tally.report(), indent=1) + "\n")
    return 1 if tally.defects or tally.lost or tally.wrong_requests else 0


if __name__ == "__main__":
    sys.exit(main())
