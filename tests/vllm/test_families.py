"""Does the catalog read, from a file alone, the caches that vLLM's own class of the model registers, in the same order?

The oracle is vLLM's: each model is made by its class, at its full size, on a device that holds no values
(`tests/vllm/families`). Beside families as transformers has them by default there are those with fields that change a cache.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.families.caches import of_model
from tests.vllm.families.configs import CASES, read_config

from kvreshard.catalog import read_model

REPOSITORY = Path(__file__).parents[2]
# Of the catalog's own files, those whose class runs with text alone.
FILES = sorted(
    path
    for path in (REPOSITORY / "src/kvreshard/catalog/configs").glob("*.json")
    if path.stem in ("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "falcon-h1-34b", "gpt-oss-120b", "gqa-mla-draft",
                     "granite-4-h-small", "jamba-1.5-mini", "llama-3.1-70b", "llama-3.1-8b", "qwen3-32b", "qwen3-next-80b-a3b")
)  # fmt: skip
SECONDS = 300
QUIET = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@functools.cache
def _configs() -> dict[str, dict[str, Any]]:
    return {case: read_config(case) for case in CASES} | {path.name: json.loads(path.read_text()) for path in FILES}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[list[list[Any]] | None, str | None]]:
    """What vLLM says of every case: caches, or why there are none."""
    asked = "\n".join(json.dumps(case) for case in _configs().items())
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vllm.families"],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, **QUIET, "PYTHONPATH": str(REPOSITORY / "src")},
        timeout=SECONDS,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {name: (caches, error) for name, caches, error in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("case", [*CASES, *(path.name for path in FILES)])
def test_a_family_is_read_as_its_class_caches(
    answers: dict[str, tuple[list[list[Any]] | None, str | None]], case: str
) -> None:
    caches, error = answers[case]
    assert error is None
    assert [list(cache) for cache in of_model(read_model(case, _configs()[case]))] == caches


def test_the_oracle_tells_models_apart(answers: dict[str, tuple[list[list[Any]] | None, str | None]]) -> None:
    """Cases that differ in one field have other caches, and none is empty."""
    for case, other in (
        ("gemma4_text", "gemma4_text unequal"),
        ("glm_moe_dsa", "glm_moe_dsa pattern"),
        ("falcon", "falcon heads"),
    ):
        assert answers[case][0] != answers[other][0]
    assert all(caches for caches, _ in answers.values())
