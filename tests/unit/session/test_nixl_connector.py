"""Is vLLM's own NixlConnector told from a peer of ours, and refused with both names? `tests/vllm/test_one_side_only.py` asks its own code."""

from __future__ import annotations

import logging

import msgspec
import pytest
import zmq
from tests.unit.session.test_handshake import LOCAL, engine_metadata

from kvreshard.session import nixl_connector
from kvreshard.session.handshake_client import fetch_engine_metadata, read_engine_metadata
from kvreshard.session.handshake_messages import HandshakeError, metadata_request, outcome_message
from kvreshard.session.handshake_server import HandshakeServer

PAYLOAD = msgspec.msgpack.encode({"compatibility_hash": "ab" * 32, "agent_metadata_bytes": b"x" * 900})


@pytest.mark.parametrize("place", [(0, 0), (3, 2**40)])
def test_what_nixl_connector_asks_is_known(place: tuple[int, int]) -> None:
    assert nixl_connector.is_request(msgspec.msgpack.encode((b"get_meta_msg", *place)))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"\x91" * 10_000,
        metadata_request("d", 0),
        *map(
            msgspec.msgpack.encode,
            (["get_meta_msg", 0, 0], [b"get_meta_msg", 0], [b"other", 0, 0], [b"get_meta_msg", 0, "0"]),
        ),
    ],
)
def test_what_others_ask_is_not(payload: bytes) -> None:
    assert not nixl_connector.is_request(payload)


def test_a_nixl_connector_gets_both_of_its_frames_and_the_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    listener = HandshakeServer(LOCAL, engine_metadata())
    try:
        with caplog.at_level(logging.WARNING), zmq.Context() as context, context.socket(zmq.REQ) as worker:
            worker.setsockopt(zmq.LINGER, 0)
            worker.connect(str(listener.address))
            for _ in range(3):
                worker.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
                assert worker.poll(5000)
                payload, clock = worker.recv_multipart()
                found = msgspec.msgpack.decode(payload)
                assert found["agent_metadata_bytes"] == b""
                assert "kv_connector_module_path" in found["compatibility_hash"]
                assert isinstance(msgspec.msgpack.decode(clock), float)
        # The first and the second time, not the third.
        assert [record.getMessage().count("vLLM's own NixlConnector") for record in caplog.records] == [1, 1]
        assert fetch_engine_metadata(listener.address, "decode", 0, 5.0).engine == "prefill"
    finally:
        listener.close()


def test_its_answer_is_refused_with_the_address_both_names_and_the_remedy() -> None:
    with pytest.raises(HandshakeError) as refused:
        read_engine_metadata(LOCAL, PAYLOAD)
    for word in (str(LOCAL), "vLLM's own NixlConnector", "ReshardConnector", "kv_connector_module_path"):
        assert word in str(refused.value)


def test_every_message_of_ours_unpacks_to_three_values_the_last_two_of_which_name_a_first_rank() -> None:
    for message in (metadata_request("d", 3), outcome_message("d", 3, "no", False)):
        _, pipeline, tensor = msgspec.msgpack.decode(message)
        assert (pipeline, tensor) == (0, 0)
