"""Ask vLLM's classes about many files at once, in a process of its own (`__main__`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvreshard.catalog.spec import EngineSpec

REPOSITORY = Path(__file__).parents[3]
SECONDS = 600
QUIET = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
Answers = dict[str, tuple[dict[str, Any] | None, str | None]]


def ask_vllm(cases: Iterable[tuple[Any, ...]], spec: EngineSpec, rank: int) -> Answers:
    """What vLLM says of every case, or why it says nothing. A case: a name, a file, perhaps a draft."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vllm.families", *map(str, (spec.tp, rank, spec.spec))],
        input="\n".join(json.dumps(case) for case in cases),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, **QUIET, "PYTHONPATH": str(REPOSITORY / "src")},
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {name: (said, error) for name, said, error in map(json.loads, ran.stdout.splitlines())}


def as_json(value: Any) -> Any:
    """The same as it comes back from the other process."""
    return json.loads(json.dumps(value))
