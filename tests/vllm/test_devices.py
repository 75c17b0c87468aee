"""What a rank does for its caches' devices: entering them, waiting for them, warning about an unused host buffer."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch

from kvreshard.transport.device import enter_device
from kvreshard.vllm import worker
from kvreshard.vllm.connector import ReshardConnector
from kvreshard.vllm.describe.model_config import has_draft
from kvreshard.vllm.options import read_options
from kvreshard.vllm.step_metadata import ReshardMetadata
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm


DEVICES = [(), ("cuda:3",), ("cuda:0", "cuda:1")]


@pytest.mark.parametrize("devices", DEVICES)
def test_a_thread_enters_the_devices_of_its_caches(devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(worker, "enter_device", found.append)
    side = WorkerSide(None, None, "engine", read_options({}))
    side._devices = devices
    side._enter_devices()
    assert tuple(found) == devices


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda:3", ["index cuda:3", "context cuda:3"])])
def test_to_enter_a_device_makes_a_context_there(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: found.append(f"index {device}"))
    monkeypatch.setattr(torch, "zeros", lambda count, device: found.append(f"context {device}"))
    enter_device(device)
    assert found == expected


@pytest.mark.parametrize("devices", DEVICES)
def test_a_step_waits_for_the_devices_of_its_caches(devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: found.append(str(device)))
    side = WorkerSide(None, None, "engine", read_options({}))
    side._devices = devices
    side.wait_for_draft()
    assert tuple(found) == devices


@pytest.mark.parametrize("metadata", [ReshardMetadata(), ReshardMetadata(waits_for_draft=True), None])
def test_the_end_of_a_step_waits_if_it_is_told_to(metadata: ReshardMetadata | None) -> None:
    waited: list[bool] = []
    connector = ReshardConnector.__new__(ReshardConnector)
    connector._worker = SimpleNamespace(end_step=lambda: None, wait_for_draft=lambda: waited.append(True))
    connector._connector_metadata = metadata
    connector.wait_for_save()
    assert waited == ([True] if metadata is not None and metadata.waits_for_draft else [])


@pytest.mark.parametrize(
    ("buffer", "devices", "is_told"),
    [("cpu", (), False), ("cuda", ("cuda:0",), False), ("cpu", ("cuda:0",), True)],
)
def test_a_host_buffer_that_is_not_used_is_told(
    buffer: str, devices: tuple[str, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_buffer_device=buffer))
    side = WorkerSide(config, None, "engine", read_options({}))
    side._devices = devices
    with caplog.at_level(logging.WARNING, logger="kvreshard"):
        side._warn_of_host_buffer()
    assert [record.message for record in caplog.records] == (
        ["kv_buffer_device cpu is ignored: caches are read from and into cuda:0; leave it out"] if is_told else []
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [(None, False), ("ngram", False), ("suffix", False), ("mtp", True), ("eagle3", True), ("draft_model", True)],
)
def test_who_has_a_draft(method: str | None, expected: bool) -> None:
    speculative = None if method is None else SimpleNamespace(method=method)
    assert has_draft(SimpleNamespace(speculative_config=speculative)) is expected
