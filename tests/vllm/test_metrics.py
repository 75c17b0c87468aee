"""Are comparisons with the source counted by how they ended, and told in the log line? Beside another connector too?"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import kvreshard.vllm
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


def test_calls_that_do_not_come_back_are_counted_by_name() -> None:
    stats = ReshardStats()
    stats.note(Results(stuck=["start"]))
    assert stats.data["counts"]["stuck_calls"] == {"start": 1}
    assert stats.reduce()["Stuck calls (start)"] == 1
    assert COUNTERS["stuck_calls"][1] == "call"


def test_multi_connector_finds_our_statistics_by_our_name() -> None:
    """vLLM's frontend makes them anew from what travelled, and ends if it does not know the name."""
    stats = ReshardStats()
    stats.note(Results(checks={"a": "equal"}))
    for name in ("ReshardConnector", "ShadowConnector", "ReshardConnector"):
        ours = getattr(kvreshard.vllm, name)
        assert KVConnectorFactory.get_connector_class_by_name(name) is ours
    found = MultiConnector.build_kv_connector_stats({"ReshardConnector": stats.data})
    assert found is not None
    assert found["ReshardConnector"].data == stats.data
