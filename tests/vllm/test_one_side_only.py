"""One engine with vLLM's own NixlConnector and one with ours: each refuses the other, and both stay alive. Both sides run their own code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.unit.session.test_handshake import engine_metadata
from tests.vllm.test_hostile_clients import InTree
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from kvreshard.session.handshake_client import fetch_engine_metadata, send_outcome
from kvreshard.session.handshake_messages import Address, HandshakeError
from kvreshard.session.handshake_server import HandshakeServer

pytestmark = pytest.mark.vllm


def handshake(port: int, *, enforces: bool) -> Any:
    """vLLM's own handshake of a decode rank, as far as it gets. Its object has what that function looks at before it refuses."""
    worker = SimpleNamespace(
        _is_csa_linear=False,
        use_host_buffer=True,
        transfer_topo=SimpleNamespace(handshake_target_ranks=lambda *sizes: [0]),
        compat_hash="cd" * 32,
        enforce_compat_hash=enforces,
    )
    return NixlBaseConnectorWorker._nixl_handshake(worker, "127.0.0.1", port, 1, "p1")


@pytest.fixture
def ours() -> Iterator[HandshakeServer]:
    listener = HandshakeServer(Address("127.0.0.1", 0), engine_metadata())
    yield listener
    listener.close()


@pytest.fixture
def in_tree() -> Iterator[InTree]:
    payload = NixlHandshakePayload(compatibility_hash="ab" * 32, agent_metadata_bytes=b"x" * 500)
    listener = InTree(msgspec.msgpack.encode(payload))
    yield listener
    listener.stop.set()
    listener.thread.join()


@pytest.mark.parametrize(
    ("enforces", "told"),
    [
        (True, "compatibility hash mismatch.*cdcd.*ReshardConnector.*kv_connector_module_path"),
        (False, "Failed to decode NixlAgentMetadata"),
    ],
)
def test_their_decode_rank_refuses_our_prefill_engine_at_once(
    ours: HandshakeServer, enforces: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvreshard"), pytest.raises(RuntimeError, match=told):
        handshake(ours.address.port, enforces=enforces)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("kvreshard")]
    for word in (str(ours.address), "vLLM's own NixlConnector", "ReshardConnector", "kv_connector_module_path"):
        assert word in line
    assert fetch_engine_metadata(ours.address, "decode", 0, 5.0).engine == "prefill"


def test_our_decode_rank_refuses_their_prefill_engine_which_lives_on(in_tree: InTree) -> None:
    address = Address("127.0.0.1", in_tree.port)
    for rank in (0, 3):
        with pytest.raises(HandshakeError) as refused:
            fetch_engine_metadata(address, "decode", rank, 10.0)
        for word in (str(address), "vLLM's own NixlConnector", "ReshardConnector", "kv_connector_module_path"):
            assert word in str(refused.value)
        send_outcome(address, "decode", rank, "a reason", False, 10.0)
    assert in_tree.answers()
    assert in_tree.thread.is_alive()
