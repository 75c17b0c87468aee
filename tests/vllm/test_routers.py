"""What routers do with `kv_transfer_params`, replayed leg by leg between two engines, each of them `kv_both` (docs/reference/routers.md).

Engines without kernels (`simulation/`): vLLM's own schedulers with this connector. Where Dynamo's package is installed, its own code runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.e2e.router import PREFILL_PARAMS
from tests.vllm.test_forged_params import NUM_TOKENS, Fleet
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams

pytestmark = pytest.mark.vllm
Params = dict[str, Any]


def by_go(params: Params) -> Params:
    """Through Go's `map[string]any`: every number a double, keys in order, whole doubles below 10^21 written as whole numbers."""

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: written(part) for name, part in value.items()}
        if isinstance(value, list):
            return [written(part) for part in value]
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value

    read = json.loads(json.dumps(params), parse_int=float)
    found: Params = json.loads(json.dumps(written(read), sort_keys=True))
    return found


def by_json(params: Params) -> Params:
    found: Params = json.loads(json.dumps(params))
    return found


def with_host_of_prefill(params: Params) -> Params:
    return {**by_json(params), "remote_host": "prefill-0.prefill.svc.cluster.local"}


@dataclass(frozen=True)
class Router:
    """`place`: repository, commit or version, and file. `adds`: to the prefill leg. `decode`: from the answer to the decode leg."""

    place: str
    decode: Callable[[Params], Params] = by_json
    adds: Mapping[str, Any] = field(default_factory=dict)
    request: str = ""


ROUTERS = {
    "llm-d-routing-sidecar": Router("llm-d/llm-d-routing-sidecar 78051b8 internal/proxy/connector_nixlv2.go", by_go),
    "llm-d-router": Router("llm-d/llm-d-router ebab687 pkg/sidecar/proxy/connector_nixlv2.go", by_go),
    "llm-d-router, p2p source": Router(
        "llm-d/llm-d-router ebab687 pkg/sidecar/proxy/connector_p2p.go",
        by_go,
        {"remote_kv_source": {"kv_request_id": "6f0b", "remote_host": "10.0.0.9", "remote_port": 7777}},
    ),
    "vLLM's toy proxy": Router("vllm-project/vllm 030ea52 tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"),
    "production-stack": Router(
        "vllm-project/production-stack a6c01db src/vllm_router/services/request_service/request.py",
        with_host_of_prefill,
    ),
    "vllm-router": Router(
        "vllm-project/router 079da2e src/routers/http/vllm_pd_router.rs",
        request="cmpl-___prefill_addr_10.0.0.1:20001___decode_addr_10.0.0.2:20002_" + "5f" * 16 + "-0-1a2b3c4d",
    ),
    "Dynamo": Router("ai-dynamo 1.6.1 dynamo/vllm/kv_connector_protocols.py, NixlConnectorProtocol", dict),
}


def check_loads(fleet: Fleet, prefill: Params, decode: Callable[[Params], Params], request: str = "") -> None:
    """A prefill with these parameters, and a decode with those that the router makes of the answer: everything is loaded, nothing stays."""
    tokens = [(i * 11) % 256 for i in range(NUM_TOKENS)]
    answer = fleet.ask("p", tokens, prefill, request)
    assert answer.params is not None
    assert str(answer.reason) == "length"
    posted = len(fleet.posted)
    loaded = fleet.ask("d", tokens, decode(answer.params), request)
    assert str(loaded.reason) == "length"
    assert len(fleet.posted) > posted
    assert fleet.fallbacks == []
    assert fleet.failures == {}
    producer = fleet.world.by_name["p"].connector._scheduler._producer
    for _ in range(100):
        fleet.world.clock.now_s += 0.02
        fleet.world.route_and_meet()
        for one in fleet.world.by_name.values():
            one.advance()
            one.turn()
        fleet.world.fabric.step()
        if not len(producer.leases):
            break
    assert len(producer.leases) == 0, "the prefill's blocks are not released"


@pytest.mark.parametrize("name", ROUTERS)
def test_a_routers_two_legs_load_the_whole_prompt_between_engines_that_are_both(name: str) -> None:
    router = ROUTERS[name]
    fleet = Fleet("kv_both", "kv_both")
    try:
        check_loads(fleet, {**PREFILL_PARAMS, **router.adds}, router.decode, router.request)
    finally:
        fleet.world.close()


def test_the_page_names_every_router_with_its_version() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/routers.md").read_text(encoding="utf-8")
    for router in ROUTERS.values():
        project, version, *_ = router.place.split(" ")
        assert any(project in line and version in line for line in page.splitlines()), router.place


def configured(name: str, **more: Any) -> Any:
    """An engine's configuration, as Dynamo reads it."""
    return SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_connector=name, kv_role="kv_both", **more))


def test_dynamos_own_protocol_takes_us_for_nixl_connector() -> None:
    protocols = pytest.importorskip("dynamo.vllm.kv_connector_protocols", exc_type=ImportError)
    drop_in = configured("NixlConnector", kv_connector_module_path="kvreshard.vllm")
    wrapped = configured(
        "MultiConnector",
        kv_connector_extra_config={
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvreshard.vllm", "kv_role": "kv_both"}
            ]
        },
    )
    for config in (drop_in, wrapped):
        protocol = protocols.make_kv_connector_protocol(config)
        assert type(protocol) is protocols.NixlConnectorProtocol
        assert protocol.prefill_request_kv_transfer_params() == PREFILL_PARAMS
        fleet = Fleet("kv_both", "kv_both")
        try:
            check_loads(
                fleet,
                protocol.prefill_request_kv_transfer_params(),
                lambda params, protocol=protocol: protocol.decode_request_kv_transfer_params(
                    SimpleNamespace(kv_transfer_params=params)
                ),
            )
        finally:
            fleet.world.close()
    with pytest.raises(ValueError, match="Unsupported kv_connector='ReshardConnector'"):
        protocols.make_kv_connector_protocol(configured("ReshardConnector"))


def test_dynamos_own_handlers_carry_the_parameters_unchanged() -> None:
    """The steps of its prefill and decode handlers that touch the parameters, called as the handlers call them."""
    handlers = pytest.importorskip("dynamo.vllm.handlers", exc_type=ImportError)
    handler = object.__new__(handlers.PrefillWorkerHandler)
    handler.engine_client = SimpleNamespace(
        vllm_config=configured("NixlConnector", kv_connector_module_path="kvreshard.vllm")
    )
    handler._multimodal_request_processor = SimpleNamespace(build_prefill_handoff=lambda **parts: None)
    sampling = SamplingParams(max_tokens=1)
    protocol = handler._prefill_kv_protocol(False, sampling)

    def to_decode(params: Params) -> Params:
        result = SimpleNamespace(kv_transfer_params=params, prompt_token_ids=[1])
        handoff = handler._prefill_disaggregated_params(protocol, result, None, None)
        travelled = json.loads(json.dumps({"disaggregated_params": handoff}))
        asked = SamplingParams(max_tokens=1)
        handlers._update_kv_transfer_params(asked, travelled["disaggregated_params"]["kv_transfer_params"])
        found: Params = asked.extra_args["kv_transfer_params"]
        return found

    fleet = Fleet("kv_both", "kv_both")
    try:
        check_loads(fleet, sampling.extra_args["kv_transfer_params"], to_decode)
    finally:
        fleet.world.close()
