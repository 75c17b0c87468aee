"""The names under which vLLM finds the connector, and what it does by each of them."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm import plugins
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kvreshard.session.commands import Results
from kvreshard.vllm import plugin, versions
from kvreshard.vllm.connector import ReshardConnector
from kvreshard.vllm.metrics import ReshardPromMetrics, ReshardStats

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
MODULE = "kvreshard.vllm"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's registry without our names, restored afterwards."""
    own = {name: loader for name, loader in KVConnectorFactory._registry.items() if name not in plugin.NAMES}
    monkeypatch.setattr(KVConnectorFactory, "_registry", own)
    plugin._warn.cache_clear()
    yield own
    plugin._warn.cache_clear()


def find(name: str, module: str | None = None) -> type:
    config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module)
    found: type = KVConnectorFactory.get_connector_class(config)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvreshard")]


def test_vllm_finds_the_connectors_by_name_alone(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through vLLM's own loader, with the entry point that pyproject.toml has, twice, and with the module path as well."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    group = plugins.DEFAULT_PLUGINS_GROUP
    found = [
        importlib.metadata.EntryPoint(name, value, group) for name, value in project["entry-points"][group].items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    assert "ReshardConnector" not in registry
    with caplog.at_level(logging.INFO, "kvreshard"):
        for _ in range(3):
            monkeypatch.setattr(plugins, "plugins_loaded", False)
            plugins.load_general_plugins()
            assert find("ReshardConnector") is find("ReshardConnector", MODULE) is ReshardConnector
            assert find("ShadowConnector").__name__ == "ShadowConnector"
    assert not lines(caplog)


def test_registering_imports_no_connector(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("kvreshard.vllm.") and name != "kvreshard.vllm.plugin"
    ]:
        monkeypatch.delitem(sys.modules, name)
    plugin.register()
    assert set(plugin.NAMES) <= set(registry)
    assert "kvreshard.vllm.connector" not in sys.modules


def test_a_version_that_is_not_supported_is_refused_where_the_connector_is_used(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "find_version", lambda: "0.99.0")
    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    with caplog.at_level(logging.INFO, "kvreshard"):
        plugin.register()
    assert not lines(caplog)
    for name, module in (("ReshardConnector", None), ("ReshardConnector", MODULE), ("NixlConnector", MODULE)):
        with pytest.raises(ImportError, match=r"this is 0\.99\.0.*KVRESHARD_UNTESTED_VLLM=1"):
            find(name, module)
    assert find("NixlConnector") is NixlConnector


@pytest.mark.parametrize("factory", [None, SimpleNamespace(), SimpleNamespace(_registry=None)])
def test_a_vllm_without_such_a_registry_is_left_alone(
    factory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = None if factory is None else SimpleNamespace(KVConnectorFactory=factory)
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", module)
    with caplog.at_level(logging.INFO, "kvreshard"):
        plugin.register()
    assert not lines(caplog)


def test_a_name_that_another_package_has_stays_that_packages_and_one_line_names_both(
    registry: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    KVConnectorFactory.register_connector("ReshardConnector", "someone.else", "ReshardConnector")
    with caplog.at_level(logging.INFO, "kvreshard"):
        for _ in range(3):
            plugin.register()
        assert find("ReshardConnector", MODULE) is ReshardConnector
    (line,) = lines(caplog)
    assert "ReshardConnector is registered for someone.else" in line
    assert '"kv_connector_module_path":"kvreshard.vllm"' in line
    assert find("ShadowConnector").__name__ == "ShadowConnector"


@pytest.mark.parametrize("loader", [lambda: ReshardConnector, len, ReshardConnector])
def test_a_loader_of_another_form_is_named_as_far_as_it_can_be(
    registry: dict[str, Any], loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry["ReshardConnector"] = loader
    with caplog.at_level(logging.INFO, "kvreshard"):
        plugin.register()
    # Our own class needs no line, whoever registered it.
    assert len(lines(caplog)) == (loader is not ReshardConnector)


def test_the_name_nixl_connector_is_the_same_class_and_only_with_the_module_path() -> None:
    assert find("NixlConnector", MODULE) is find("ReshardConnector", MODULE) is ReshardConnector
    assert find("NixlConnector") is NixlConnector
    assert KVConnectorFactory.get_connector_class_by_name("NixlConnector") is NixlConnector
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_connector_module_path=MODULE)
    assert KVConnectorFactory.supports_hma_config(config)
    with pytest.raises(AttributeError, match=r"Class NixlPushConnector not found in kvreshard\.vllm"):
        find("NixlPushConnector", MODULE)


def multi() -> Any:
    """A MultiConnector with ours under NixlConnector's name, and a cache behind it."""
    children = [
        {"kv_connector": "NixlConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_both"},
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    ]
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    return SimpleNamespace(kv_transfer_config=config, model_config=SimpleNamespace(use_mla=False))


def test_under_that_name_the_statistics_reach_our_own_metrics() -> None:
    """vLLM's frontend makes statistics anew by the name of the class that counted, and observes them under the name of the class."""
    registry = CollectorRegistry()
    types = {
        kind: lambda *words, kind=kind, **more: kind(*words, **more, registry=registry)
        for kind in (Counter, Gauge, Histogram)
    }
    prometheus = MultiConnector.build_prom_metrics(multi(), types, ["engine"], {0: ["0"]})
    assert {name: type(found) for name, found in prometheus._prom_metrics.items()} == {
        "ReshardConnector": ReshardPromMetrics
    }
    stats = ReshardStats()
    stats.note(Results(checks={"a": "equal"}))
    child = object.__new__(ReshardConnector)
    child._side = SimpleNamespace(take_stats=stats.take)
    both = SimpleNamespace(_connectors=[child])
    counted = MultiConnector.get_kv_connector_stats(both)
    sent = {name: one.data for name, one in counted.data.items()}
    made = MultiConnector.build_kv_connector_stats(sent)
    assert isinstance(made["ReshardConnector"], ReshardStats)
    prometheus.observe(sent, 0)
    assert registry.get_sample_value("kvreshard_digest_checks_total", {"engine": "0", "result": "equal"}) == 1.0
    assert "ReshardConnector" in str(made.reduce())


def test_under_that_name_vllm_gives_the_children_one_layout_and_hybrid_models() -> None:
    assert MultiConnector.get_required_kvcache_layout(multi()) == "LBHNC"
    assert MultiConnector.all_children_support_hma(
        KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "connectors": [
                    {"kv_connector": "NixlConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
                ]
            },
        )
    )
