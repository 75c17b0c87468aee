"""Caches read from a model's file alone, and their groups, against those that vLLM's own class of the model registers.

The connector, which sees those caches, must describe them as the catalog does.

The oracle is vLLM's: each model is made by its class, at its full size, on a device that holds no values
(`tests/vllm/families`). Beside families as transformers has them by default there are those with fields that change a cache.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.families.asking import SECONDS, Answers, as_json, ask_vllm
from tests.vllm.families.caches import ORDERS, caches_of, expected_fields, tables_of
from tests.vllm.families.configs import CASES, DECLARING, PREDICTING, read_config

from kvreshard.catalog import read_model
from kvreshard.catalog.spec import EngineSpec

REPOSITORY = Path(__file__).parents[2]
# The catalog's own files, but those whose class wants pictures, a GPU, or experts that its CPU build does not have.
FILES = tuple(
    REPOSITORY / "src/kvreshard/catalog/configs" / f"{name}.json"
    for name in ("deepseek-v3", "deepseek-v3.2", "falcon-h1-34b", "gqa-mla-draft", "granite-4-h-small", "jamba-1.5-mini",
                 "llama-3.1-70b", "llama-3.1-8b", "qwen3-32b", "qwen3-next-80b-a3b")
)  # fmt: skip

# (ranks, which of them, draft tokens). What vLLM cannot divide so, it refuses; what is written here is all that it says then.
ENGINES = ((1, 0, 0), (4, 3, 0), (8, 5, 0), (1, 0, 2), (8, 5, 2))
REFUSALS = (
    "must be divisible by tensor parallel size",
    "must be divisible by tensor-parallel world size",
    "does not divide num_groups",
    "must divide num heads",
    "supports tp_size <= num_kv_heads",
)


@dataclass(frozen=True)
class Engine:
    """An engine of which one rank is looked at, and the files that it is asked about."""

    spec: EngineSpec
    rank: int

    @functools.cached_property
    def configs(self) -> dict[str, dict[str, Any]]:
        if self.spec.spec:
            return {case: read_config(case, num_predicting=1) for case in PREDICTING}
        return {case: read_config(case) for case in CASES} | {path.name: json.loads(path.read_text()) for path in FILES}


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: "tp{0}-drafts{2}".format(*engine))
def engine(request: pytest.FixtureRequest) -> Engine:
    """One of `ENGINES`."""
    tp_size, tp_rank, num_drafts = request.param
    return Engine(EngineSpec(tp_size, spec=num_drafts), tp_rank)


@pytest.fixture(scope="module")
def answers(engine: Engine) -> Answers:
    """What vLLM says of every case, or why it says nothing."""
    return ask_vllm(engine.configs.items(), engine.spec, engine.rank)


@pytest.mark.timeout(SECONDS)
def test_families_are_read_as_their_classes_cache(answers: Answers, engine: Engine) -> None:
    for case, raw in engine.configs.items():
        said, error = answers[case]
        if said is None:
            assert engine.spec.tp > 1, (case, error)
            assert any(refusal in str(error) for refusal in REFUSALS), (case, error)
            continue
        model = read_model(case, raw)
        assert as_json(caches_of(model, engine.spec, engine.rank)) == said["caches"], case
        for order in orders_of(said):
            assert as_json(tables_of(model, engine.spec, order)) == said["tables"][order], case


@pytest.mark.timeout(SECONDS)
def test_the_connector_describes_families_as_the_catalog_does(answers: Answers, engine: Engine) -> None:
    """Also where a rank shows fewer heads or groups than it can tell the model's from. Of fp8 caches the connector also knows the scales."""
    for case, (said, _) in answers.items():
        if said is not None and case not in DECLARING:
            model = read_model(case, engine.configs[case])
            fields = expected_fields(model, engine.spec, engine.rank, orders_of(said)[0])
            assert as_json(fields) == said["fields"], case


@pytest.mark.timeout(SECONDS)
def test_the_oracle_tells_models_apart(answers: Answers, engine: Engine) -> None:
    """Most can be divided so; cases that differ in one field have other caches, the two orders other tables; none is empty."""
    said = {case: answer for case, (answer, _) in answers.items() if answer is not None}
    assert len(answers) == len(engine.configs)
    assert len(said) > len(answers) * (0.8 if engine.spec.tp > 1 else 0.999)
    assert all(answer["caches"] and answer["tables"]["BLHNC"] for answer in said.values())
    one_order = {case for case, answer in said.items() if len(orders_of(answer)) == 1}
    assert {case.split()[0] for case in one_order} <= {"deepseek_v41", "glm5_next_text", "qwen4_exp_text"}
    if engine.spec.spec:
        assert said["glm4_moe"]["fields"][-1] != said["glm4_moe"]["fields"][0]  # an engine may lack what predicts
        return
    for case, other in (
        ("gemma4_text", "gemma4_text unequal"),
        ("glm_moe_dsa", "glm_moe_dsa pattern"),
        ("qwen3_next", "qwen3_next modelopt"),
    ):
        assert said[case]["caches"] != said[other]["caches"]
    first, second = (said["gemma4_text unequal"]["tables"][order] for order in ORDERS)
    assert first != second


def orders_of(said: dict[str, Any]) -> list[str]:
    """Orders in which vLLM can have the model; those of rings only as their backends ask for them (`supported_kv_cache_layouts`)."""
    has_rings = any(cache[0] == "ring" for cache in said["caches"])
    return [
        order for order in ORDERS if said["tables"][order] is not None and not (has_rings and order.startswith("L"))
    ]
