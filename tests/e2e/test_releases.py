"""Do engines of other releases of vLLM, and engines of two releases, exchange caches exactly?"""

from __future__ import annotations

import pytest
from tests import releases
from tests.e2e import results
from tests.e2e.cases import EXACT, OURS, Case
from tests.e2e.engines import Nursery
from tests.e2e.releases import rows
from tests.e2e.verdicts import measure


def parameters() -> list[object]:
    return [pytest.param(case, id=case.name, marks=[pytest.mark.e2e_ci] if case.ci else []) for case in rows()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", parameters())
def test_row(case: Case, nursery: Nursery) -> None:
    for release in (case.prefill.vllm, case.decode.vllm):
        releases.fetch(release)
    for spec in list(nursery.engines):
        if (spec.model, spec.vllm) not in {(case.model, case.prefill.vllm), (case.model, case.decode.vllm)}:
            nursery.stop(spec)
    measured = measure(nursery, case, OURS)
    results.keep({**measured.to_json(), "releases": [case.prefill.vllm, case.decode.vllm], "model": case.model})
    assert measured.outcome == EXACT, "\n".join(measured.details)
    assert measured.compared_bytes > 0, "no loaded page was compared"
