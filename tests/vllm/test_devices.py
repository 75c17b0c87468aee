"""Which devices does the thread that talks to NIXL enter, and is an unused host buffer told?"""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.platforms import current_platform

from kvreshard.vllm import worker
from kvreshard.vllm.options import read_options
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("devices", "entered"),
    [({"cpu"}, []), ({"cuda:3"}, ["cuda:3"]), ({"cuda:1", "cpu", "cuda:0"}, ["cuda:0", "cuda:1"])],
)
def test_a_thread_enters_the_devices_of_its_caches(
    devices: set[str], entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(current_platform, "set_device", lambda device: found.append(str(device)), raising=False)
    worker._enter(devices)
    assert found == entered


@pytest.mark.parametrize(
    ("buffer", "devices", "is_told"),
    [("cpu", {"cpu"}, False), ("cuda", {"cuda:0"}, False), ("cpu", {"cuda:0"}, True)],
)
def test_a_host_buffer_that_is_not_used_is_told(
    buffer: str, devices: set[str], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device=buffer))
    side = WorkerSide(config, None, "engine", read_options({}))
    with caplog.at_level(logging.WARNING, logger="kvreshard"):
        side._tell_unused_buffer(devices)
    assert [record.message for record in caplog.records] == (
        ["kvreshard: kv_buffer_device is cpu, and is not used: caches are read from and into cuda:0; leave it out"]
        if is_told
        else []
    )
