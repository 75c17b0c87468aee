"""Does the shadow leave NixlConnector alone, and does it see where that one goes wrong?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.compare import compare
from tests.e2e.engine import EngineSpec, Output
from tests.e2e.engines import Nursery
from tests.e2e.prompts import ladder, prompt
from tests.e2e.router import route

PATIENCE_S = 60.0


def reports(file: Path, num_requests: int, num_ranks: int) -> list[dict[str, Any]]:
    """What every rank wrote of every request."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= num_requests * num_ranks or time.monotonic() > deadline:
            return [json.loads(line) for line in lines]
        time.sleep(0.1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "prefill", "decode", "expected"),
    [
        pytest.param("llama", {"tp": 1}, {"tp": 2}, {"same", "more"}, marks=pytest.mark.e2e_ci),
        ("llama", {"block_size": 64}, {"block_size": 128}, {"differs", "missing", "more", "same"}),
        ("gemma4", {"tp": 2}, {"tp": 1}, {"same", "more"}),
        # Of a prompt of one token nothing is loaded here; NixlConnector loads it.
        ("gemma4", {"tp": 1}, {"tp": 4}, {"differs", "more"}),
        ("qwen3", {"tp": 4}, {"tp": 2}, {"refused there"}),
        # A prompt of one token has no state to resume from here; NixlConnector loads it.
        ("granite-hybrid", {"tp": 1}, {"tp": 2}, {"differs", "refused here"}),
        ("deepseek-v2", {"tp": 2}, {"tp": 1}, {"same", "more"}),
    ],
)
def test_what_the_shadow_sees(
    model: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    expected: set[str],
    nursery: Nursery,
    tmp_path: Path,
) -> None:
    nursery.stop_all()
    file = tmp_path / "shadow.jsonl"
    linked: dict[str, Any] = {
        "connector": "ShadowConnector",
        "extra": (("shadow_report_file", str(file)),),
        # NixlConnector wants it; on CPUs vLLM sets it by the connector's name.
        "environment": (("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),),
    }
    source = nursery.engine(EngineSpec(model, role="kv_producer", **prefill, **linked))
    target = nursery.engine(EngineSpec(model, role="kv_consumer", **decode, **linked))
    prompts = ladder(128, seed=5)
    answers = route(source, target, prompts)
    found = reports(file, len(prompts), target.spec.tp)
    assert "it stops comparing" not in target.log.read_text() + source.log.read_text()
    assert found, target.last_words()
    assert {report["verdict"] for report in found} <= expected, found[:3]
    # All but the last token are loaded here; a state stands there on both sides.
    agreeing = [r for r in found if r.get("their_tokens", 0) - r.get("num_tokens", 0) in (0, 1)]
    assert len(agreeing) == len(found), found
    if "same" in expected and "differs" not in expected:
        check_text(nursery, model, [answer.decode for answer in answers])
        assert len(found) == len(prompts) * target.spec.tp
        loaded = [report for report in found if report.get("num_tokens")]
        assert all(report["same_bytes"] == report["num_bytes"] > 0 for report in loaded)
        assert len(loaded) == (len(prompts) - 1) * target.spec.tp  # one prompt is one token
    elif "differs" in expected:
        assert any(report["verdict"] == "differs" and report["elsewhere_bytes"] > 0 for report in found)


@pytest.mark.timeout(600)
def test_a_page_that_the_last_token_still_looks_at_is_missed(nursery: Nursery, tmp_path: Path) -> None:
    """A window of 160 tokens and pages of 128: after 287 tokens the first page is gone, and the last of them looks at it."""
    nursery.stop_all()
    file = tmp_path / "shadow.jsonl"
    linked: dict[str, Any] = {"connector": "ShadowConnector", "extra": (("shadow_report_file", str(file)),)}
    source = nursery.engine(EngineSpec("gemma3", role="kv_producer", **linked))
    target = nursery.engine(EngineSpec("gemma3", role="kv_consumer", **linked))
    route(source, target, [prompt(length, 5) for length in (286, 287, 288)])
    found = reports(file, 3, 1)
    verdicts = {report["their_tokens"]: report["verdict"] for report in found}
    assert verdicts.keys() == {286, 287, 288}
    assert verdicts.pop(287) == "missing"
    assert set(verdicts.values()) <= {"same", "more"}
    assert any("token 286 attends to token 127" in report.get("reason", "") for report in found)


def check_text(nursery: Nursery, model: str, outputs: list[Output]) -> None:
    difference = compare(nursery.engine(EngineSpec(model)).generate(ladder(128, seed=5)), outputs)
    assert difference.answered, str(difference)
    assert not difference.wrong_tokens, str(difference)
