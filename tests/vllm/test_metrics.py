"""Counters, the log line and the series of `/metrics`, also beside another connector."""

from __future__ import annotations

import re
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import World
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import kvreshard.vllm
from kvreshard.session.commands import Failure, Results
from kvreshard.session.pull import TransferStats
from kvreshard.vllm import consumer, following, loadable
from kvreshard.vllm.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    RANK_GAUGES,
    SECONDS,
    ReshardPromMetrics,
    ReshardStats,
    seconds_buckets,
)
from kvreshard.vllm.versions import find_version

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
    assert COUNTERS["stuck_calls"].label == "call"


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


def test_every_series_is_there_before_anything_happens() -> None:
    registry = CollectorRegistry()
    types = {
        kind: lambda *words, kind=kind, **more: kind(*words, **more, registry=registry)
        for kind in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"load_timeout_s": 1000}))
    ReshardPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    page = generate_latest(registry).decode()
    lines = {frozenset(re.split(r"[{},]", line)) for line in page.splitlines()}
    for engine in "01":
        for name, series in COUNTERS.items():
            for value in series.values:
                labels = {f'engine="{engine}"', *([f'{series.label}="{value}"'] if series.label else [])}
                assert frozenset({f"kvreshard_{name}_total", *labels, " 0.0"}) in lines
        assert f'kvreshard_load_seconds_bucket{{engine="{engine}",le="1250.0"}} 0.0' in page
        for name in GAUGES:
            assert f'kvreshard_{name}{{engine="{engine}"}} 0.0' in page
    parsed = {family.name: family for family in text_string_to_metric_families(page)}
    (info, _) = parsed["kvreshard_build_info"].samples
    assert info.labels == {
        "engine": "0", "version": kvreshard.__version__, "vllm": find_version(), "nixl": version("nixl"), "backend": "UCX",
    }  # fmt: skip


def test_the_page_names_every_series_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    named = {
        name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`kvreshard_(\w+)", line)
    }
    assert named == {*HISTOGRAMS, *GAUGES, *RANK_GAUGES, *(f"{name}_total" for name in COUNTERS), "build_info"}


def test_gauges_are_told_when_they_change_and_end_at_zero() -> None:
    """A world of two engines: what is held and waited for goes up, and is given back."""
    layers = MODELS[0].layers(16, 0)
    shapes = {"p": Shape(layers, blocks=80, role="kv_producer"), "d": Shape(layers, blocks=80, role="kv_consumer")}
    world = World(shapes, base_config(), 0)
    seen: dict[str, dict[str, list[int]]] = {name: {} for name in shapes}
    waits: list[float] = []
    for name, engine in world.by_name.items():
        take = engine.connector.get_kv_connector_stats

        def taken(name: str = name, take: Any = take) -> Any:
            stats = take()
            for gauge, value in (stats.data["gauges"] if stats else {}).items():
                seen[name].setdefault(gauge, []).append(value)
            waits.extend(stats.data["samples"]["wait_seconds"] if stats else [])
            return stats

        engine.connector.get_kv_connector_stats = taken
    try:
        world.run(12, ticks_between=5)
        for engine in world.by_name.values():
            engine.connector.get_kv_connector_stats()
    finally:
        world.close()
    assert len(waits) == world.num_loaded > 0
    for name, gauges in (("p", ("leases_held", "blocks_held")), ("d", ("loads_waiting", "loads_in_flight"))):
        for gauge in gauges:
            told = seen[name][gauge]
            assert max(told) > 0
            assert told[-1] == 0
            assert all(before != after for before, after in pairwise(told))
    assert max(seen["p"]["blocks_held"]) > max(seen["p"]["leases_held"])


class SetOnly(Gauge):
    """As Ray's gauges are in vLLM: they can be set, and nothing else."""

    def inc(self, amount: float = 1) -> None:
        raise AttributeError("inc")

    dec = inc


def test_changes_are_added_up_for_gauges_that_can_only_be_set() -> None:
    registry = CollectorRegistry()
    types = {
        kind: lambda *words, made=made, **more: made(*words, **more, registry=registry)
        for kind, made in ((Counter, Counter), (Gauge, SetOnly), (Histogram, Histogram))
    }
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    metrics = ReshardPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    for engine, change in ((0, 3), (1, 5), (0, -1)):
        stats = ReshardStats()
        stats.note(Results(peers_change=change))
        metrics.observe(stats.data, engine)
    assert [registry.get_sample_value("kvreshard_peers", {"engine": name}) for name in "01"] == [2, 5]


def test_ranks_tell_by_how_much_their_gauges_change() -> None:
    """They are added up over ranks and steps; one that goes back to what it was is not told."""
    stats, other = ReshardStats(), ReshardStats()
    stats.note(Results(peers_change=2, stuck_change=1))
    other.note(Results(peers_change=1))
    assert stats.aggregate(other).data["changes"] == {"peers": 3, "stuck_threads": 1}
    assert stats.take() is not None
    stats.note(Results())
    assert stats.take() is None


def test_bytes_on_the_wire_are_told_from_those_that_arrived() -> None:
    stats = ReshardStats()
    stats.note(
        Results(received={"a": TransferStats(100, 260, 5, 60, 0.0, 0.0), "b": TransferStats(40, 40, 1, 0, 0.0, 0.0)})
    )
    counts = stats.data["counts"]
    assert counts["bytes"] == {"staged": 60, "direct": 80}
    assert counts["read_bytes"] == {"staged": 220, "direct": 80}


def test_handshakes_are_counted_and_timed() -> None:
    stats = ReshardStats()
    stats.note(Results(handshakes=[(0.25, True), (3.0, False), (0.5, True)]))
    assert stats.data["counts"]["handshakes"] == {"met": 2, "failed": 1}
    assert stats.data["samples"]["handshake_seconds"] == [0.25, 3.0, 0.5]


def test_loads_that_take_as_long_as_they_may_are_told_from_longer_ones() -> None:
    assert list(SECONDS) == sorted(SECONDS)
    assert seconds_buckets(120.0)[-2:] == (120.0, 150.0)
    assert seconds_buckets(600.0)[-3:] == (120.0, 600.0, 750.0)
    assert seconds_buckets(5.0) == SECONDS


def test_every_cause_of_a_fallback_is_among_the_label_values() -> None:
    here, rest = Path(consumer.__file__).read_text(), Path(loadable.__file__).read_text()
    lost = re.findall(r'Lost\("(\w+)"', Path(following.__file__).read_text())
    causes = {*consumer.REASONS, *re.findall(r'Loadable\(0, "(.+?)"', rest), "prompt"}
    assert len(causes) > 8
    assert {*re.findall(r'_count\("fallbacks", "(.+?)"', here), *causes} == set(COUNTERS["fallbacks"].values)
    returned = re.findall(r'return "(\w+)"', here) + re.findall(r'give_up\(.+?, "(\w+)"', here)
    asked = re.findall(r'"(\w+)" if self', here) + re.findall(r'_lose\(request, "(\w+)"', here)
    assert {*returned, *lost, *asked, "pool", "ended", "unmet"} == set(consumer.REASONS)
    partial = re.findall(r'_note_partial\([^"]*?"(\w+)"', here) + re.findall(
        r'Loadable\(count, fallback, "(\w+)"', rest
    )
    assert {*partial, *causes} == set(COUNTERS["partial_loads"].values) == set(COUNTERS["tokens_not_loaded"].values)
