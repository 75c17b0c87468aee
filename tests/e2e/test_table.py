"""Is every pair of the table exact with ours, and does vLLM's own connector do what the table says of it?"""

from __future__ import annotations

import pytest
from tests.e2e import results
from tests.e2e.cases import CASES, EXACT, IN_TREE, OURS, WRONG, Case
from tests.e2e.engine import RELEASE
from tests.e2e.engines import Nursery
from tests.e2e.verdicts import measure
from tests.releases import INSTALLED

CONNECTORS = {IN_TREE: "in-tree", OURS: "ours"}


def rows() -> list[object]:
    """Rows of one model and connector come together, so that engines are shared; `-m e2e_ci` picks the small part.

    Of vLLM's own connector that part is where wrong caches must be seen. Its other rows measure it, not us, and have failed by themselves.
    """
    return [
        pytest.param(
            case,
            connector,
            id=f"{case.name}-{label}",
            marks=[pytest.mark.e2e_ci] if case.ci and (connector == OURS or case.in_tree == WRONG) else [],
        )
        for model in dict.fromkeys(case.model for case in CASES)
        for connector, label in CONNECTORS.items()
        for case in CASES
        if case.model == model
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "connector"), rows())
def test_row(case: Case, connector: str, nursery: Nursery) -> None:
    mine = {case.engine(case.prefill, connector), case.engine(case.decode, connector, "kv_consumer")}
    for spec in list(nursery.engines):
        # An idle engine with vLLM's own connector takes a core.
        is_quiet = spec.connector in ("RecordConnector", OURS)
        if spec.model != case.model or not (spec in mine or is_quiet):
            nursery.stop(spec)
    measured = measure(nursery, case, connector)
    results.keep(measured.to_json())
    if connector != OURS and RELEASE != INSTALLED:
        return  # what the table says of it is about the installed release
    expected = EXACT if connector == OURS else case.in_tree
    assert measured.outcome == expected, "\n".join(measured.details)
    if expected == EXACT:
        assert measured.compared_bytes > 0, "no loaded page was compared"
