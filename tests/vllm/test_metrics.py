"""Are comparisons with the source counted by how they ended, and told in the log line?"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvreshard.session.orders import Failure, Results
from kvreshard.vllm.metrics import COUNTERS, ReshardStats

pytestmark = pytest.mark.vllm


def test_digest_checks_are_counted_by_result() -> None:
    stats = ReshardStats()
    stats.note(Results(checks={"a": "equal", "b": "equal", "c": "different"}, failed={"c": Failure("digest", "wrong")}))
    other = ReshardStats()
    other.note(Results(checks={"a": "skipped"}))
    counts = stats.aggregate(other).data["counts"]
    assert counts["digest_checks"] == {"equal": 2, "different": 1, "skipped": 1}
    assert counts["failures"] == {"digest": 1}
    assert stats.reduce()["Digest checks (equal)"] == 2
    assert COUNTERS["digest_checks"][1] == "result"
