"""Does the catalog read, from a file alone, the caches that vLLM's own class of the model registers, and group them alike?

And does the connector, which sees those caches, describe them as the catalog does?

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
from tests.vllm.families.caches import ORDERS, caches_of, expected_fields, tables_of
from tests.vllm.families.configs import CASES, read_config

from kvreshard.catalog import read_model
from kvreshard.kinds import Place

REPOSITORY = Path(__file__).parents[2]
# The catalog's own files, but those whose class wants pictures, a GPU, or experts that its CPU build does not have.
FILES = tuple(
    REPOSITORY / "src/kvreshard/catalog/configs" / f"{name}.json"
    for name in ("deepseek-v3", "deepseek-v3.2", "falcon-h1-34b", "gqa-mla-draft", "granite-4-h-small", "jamba-1.5-mini",
                 "llama-3.1-70b", "llama-3.1-8b", "qwen3-32b", "qwen3-next-80b-a3b")
)  # fmt: skip
SECONDS = 300
QUIET = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

# (ranks, which of them). What vLLM cannot divide so, it refuses; what is written here is all that it says then.
RANKS = ((1, 0), (4, 3), (8, 5))
REFUSALS = ("must be divisible by tensor parallel size", "does not divide num_groups", "must divide num heads")
Answers = dict[str, tuple[dict[str, Any] | None, str | None]]


@functools.cache
def _configs() -> dict[str, dict[str, Any]]:
    return {case: read_config(case) for case in CASES} | {path.name: json.loads(path.read_text()) for path in FILES}


@pytest.fixture(scope="module", params=RANKS, ids=lambda rank: f"tp{rank[0]}")
def rank(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Ranks of the engine, and which of them is looked at."""
    tp_size, tp_rank = request.param
    return tp_size, tp_rank


@pytest.fixture(scope="module")
def answers(rank: tuple[int, int]) -> Answers:
    """What vLLM says of every case, or why it says nothing."""
    asked = "\n".join(json.dumps(case) for case in _configs().items())
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vllm.families", *map(str, rank)],
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
def test_a_family_is_read_as_its_class_caches(answers: Answers, rank: tuple[int, int], case: str) -> None:
    (said, error), (tp_size, tp_rank) = answers[case], rank
    if said is None:
        assert tp_size > 1
        assert any(refusal in str(error) for refusal in REFUSALS), error
        return
    model = read_model(case, _configs()[case])
    assert [list(cache) for cache in caches_of(model, Place(tp_rank, tp_size))] == said["caches"]
    for order in ORDERS:
        assert [list(table) for table in tables_of(model, order, tp_size)] == said["tables"][order]


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("case", [*CASES, *(path.name for path in FILES)])
def test_the_connector_describes_a_family_as_the_catalog_does(
    answers: Answers, rank: tuple[int, int], case: str
) -> None:
    """Also where a rank shows fewer heads or groups than it can tell the model's from."""
    said, _ = answers[case]
    if said is not None:
        fields = expected_fields(read_model(case, _configs()[case]), *rank)
        assert json.loads(json.dumps(fields)) == said["fields"]


def test_the_oracle_tells_models_apart(answers: Answers, rank: tuple[int, int]) -> None:
    """Most can be divided so; cases that differ in one field have other caches, the two orders other tables; none is empty."""
    said = {case: answer for case, (answer, _) in answers.items() if answer is not None}
    assert len(said) > len(answers) * (0.8 if rank[0] > 1 else 0.999)
    for case, other in (("gemma4_text", "gemma4_text unequal"), ("glm_moe_dsa", "glm_moe_dsa pattern")):
        assert said[case]["caches"] != said[other]["caches"]
    first, second = (said["gemma4_text unequal"]["tables"][order] for order in ORDERS)
    assert first != second
    assert all(answer["caches"] and answer["tables"][ORDERS[0]] for answer in said.values())
