"""Is an engine refused at start that could not exchange caches rightly, with the remedy?"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import World
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state

import kvreshard
from kvreshard.model import LayoutError
from kvreshard.vllm import connector
from kvreshard.vllm.options import Options
from kvreshard.vllm.start_check import check_outer_role, check_start

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("pcp", "dcp", "role", "sleeps", "refusal"),
    [
        (2, 1, "kv_consumer", False, "prefill context parallel size 2 with kv_role kv_consumer.*kv_producer"),
        (2, 1, "kv_both", False, "prefill context parallel size 2 with kv_role kv_both"),
        (2, 1, "kv_producer", False, None),
        (2, 2, "kv_consumer", False, None),
        (1, 1, "kv_consumer", False, None),
        (1, 1, "kv_producer", True, "without --enable-sleep-mode"),
    ],
)
def test_what_is_refused(pcp: int, dcp: int, role: str, sleeps: bool, refusal: str | None) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp),
        kv_transfer_config=KVTransferConfig(kv_connector="x", kv_role=role),
    )
    if refusal is None:
        check_start(config)
        return
    with pytest.raises(LayoutError, match=refusal):
        check_start(config)


@pytest.mark.parametrize(
    ("outer", "role", "is_refused"),
    [
        ("kv_producer", "kv_consumer", True),
        ("kv_producer", "kv_both", True),
        ("kv_producer", "kv_producer", False),
        ("kv_consumer", "kv_both", False),
        ("kv_both", "kv_consumer", False),
        (None, "kv_consumer", False),
    ],
)
def test_a_child_loads_only_where_the_outer_role_does(
    outer: str | None, role: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = None
    if outer is not None:
        config = KVTransferConfig(kv_connector="MultiConnector", kv_role=outer)
        around = SimpleNamespace(_kv_transfer_config=config)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", around)
    config = KVTransferConfig(kv_connector="ReshardConnector", kv_role=role)
    if not is_refused:
        check_outer_role(config)
        return
    with pytest.raises(LayoutError, match=f"kv_role {role}, and MultiConnector around it kv_producer.*set the outer"):
        check_outer_role(config)


def test_the_first_line_says_version_backend_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(connector.logger, "info", lambda text, *words: said.append(text % words))
    world = World({"p": Shape(MODELS[0].layers(16, 0), role="kv_producer", lease_s=7.0)}, base_config(), 0)
    world.close()
    params = Options().nixl.params
    assert said == [
        f"kvreshard {kvreshard.__version__}: engine p, kv_role kv_producer, NIXL backend UCX {params}, options: kv_lease_duration=7.0"
    ]
