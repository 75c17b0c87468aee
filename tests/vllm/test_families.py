"""Does the catalog read, from a file alone, the caches that vLLM's own class of the model registers, and group them alike?

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
from tests.vllm.families.caches import ORDERS, caches_of, tables_of
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


Answers = dict[str, tuple[dict[str, Any] | None, str | None]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What vLLM says of every case, or why it says nothing."""
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
    return {name: (said, error) for name, said, error in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("case", [*CASES, *(path.name for path in FILES)])
def test_a_family_is_read_as_its_class_caches(answers: Answers, case: str) -> None:
    said, error = answers[case]
    assert error is None
    assert said is not None
    model = read_model(case, _configs()[case])
    assert [list(cache) for cache in caches_of(model)] == said["caches"]
    for order in ORDERS:
        assert [list(table) for table in tables_of(model, order)] == said["tables"][order]


def test_the_oracle_tells_models_apart(answers: Answers) -> None:
    """Cases that differ in one field have other caches, the two orders other tables, and none is empty."""
    said = {case: answer for case, (answer, _) in answers.items() if answer is not None}
    for case, other in (
        ("gemma4_text", "gemma4_text unequal"),
        ("glm_moe_dsa", "glm_moe_dsa pattern"),
        ("falcon", "falcon heads"),
    ):
        assert said[case]["caches"] != said[other]["caches"]
    first, second = (said["gemma4_text unequal"]["tables"][order] for order in ORDERS)
    assert first != second
    assert all(answer["caches"] and answer["tables"][ORDERS[0]] for answer in said.values())
