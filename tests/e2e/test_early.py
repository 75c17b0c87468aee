"""Is every pair of the table exact when the decode engine reads while the prompt is computed?

The prefill engines compute in chunks whose borders lie inside of pages, and so do the ordinary engines that they are compared with: sums of low
precision, and drafts at the borders of chunks, depend on them.
"""

from __future__ import annotations

import pytest
from tests.e2e.cases import CASES, EXACT, OURS, Case
from tests.e2e.engine import Engine
from tests.e2e.engines import Nursery
from tests.e2e.verdicts import measure
from tests.e2e.zoo import MODELS

from kvreshard.model.changed import replace

CHUNK_TOKENS = 72
CI = ("llama-tp1-page64-to-tp1-page128", "gemma4-tp1-to-tp4", "deepseek-v2-tp2-to-tp4")


def rows() -> list[object]:
    """Rows of one model come together, so that engines are shared."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.e2e_ci] if case.name in CI else [])
        for model in dict.fromkeys(case.model for case in CASES)
        for case in CASES
        if case.model == model
    ]


def early_bytes(engine: Engine) -> float:
    """Of all data-parallel ranks."""
    lines = [line for line in engine.get("/metrics").splitlines() if line.startswith("kvreshard_early_bytes_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", rows())
def test_row(case: Case, nursery: Nursery) -> None:
    # With an MTP draft vLLM 0.32 stands still on CPUs where a prompt has several chunks.
    if MODELS[case.model].draft != "mtp":
        chunked = replace(case.prefill, arguments=(*case.prefill.arguments, ("max_num_batched_tokens", CHUNK_TOKENS)))
        case = replace(case, prefill=chunked)
    for spec in list(nursery.engines):
        if spec.model != case.model:
            nursery.stop(spec)
    measured = measure(nursery, case, OURS, is_early=True)
    assert measured.outcome == EXACT, "\n".join(measured.details)
    assert measured.compared_bytes > 0, "no loaded page was compared"
    decode = nursery.engine(case.engine(case.decode, OURS, "kv_consumer"))
    if case.model not in ("mamba2", "mistral"):  # nothing but states and windows
        assert early_bytes(decode) > 0
