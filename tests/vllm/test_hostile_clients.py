"""Hostile clients that our listener survives, against vLLM's own NIXL listener. For the table, and to notice when it changes.

Its thread runs one client after the other; after each it is asked as its own workers ask. A thread that has died is started anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

pytest.importorskip("vllm")

import zmq
from tests.faults.hostile import CLIENTS, Client
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

# Seen with 0.32.0. Every one of them needs no more than one connection and no knowledge of the engine. A message of ours is not among them
# (`test_one_side_only.py`).
ENDED_BY = {
    "announces_huge_containers",
    "floods_with_noise",
    "nests_deeply",
    "says_noise",
    "says_nothing_in_a_message",
    "sends_a_pickle",
    "sends_a_thousand_frames",
    "speaks_as_another_connector",
    "truncates_its_hello",
}


class InTree:
    """vLLM's listener on a free port of this machine, which hands out `payload`."""

    def __init__(self, payload: bytes = b"metadata") -> None:
        self.payload = payload
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            self.port = probe.bind_to_random_port("tcp://127.0.0.1")
        self.stop, ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=({(0, 0): payload}, ready, self.stop, "127.0.0.1", self.port),
            daemon=True,
        )
        self.thread.start()
        assert ready.wait(60)

    def answers(self) -> bool:
        """Whether an honest worker gets what it asks for, as `_nixl_handshake` asks: it waits for 5 s, then fails the request."""
        with zmq.Context() as context, context.socket(zmq.REQ) as worker:
            worker.setsockopt(zmq.LINGER, 0)
            worker.connect(f"tcp://127.0.0.1:{self.port}")
            worker.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
            for _ in range(50):
                if worker.poll(100):
                    return bool(worker.recv_multipart()[0] == self.payload)
                if not self.thread.is_alive():
                    break
        return False


@pytest.fixture
def listener() -> Iterator[InTree]:
    listener = InTree()
    yield listener
    listener.stop.set()
    listener.thread.join()


def test_an_honest_worker_is_answered(listener: InTree) -> None:
    assert listener.answers()


def test_one_message_ends_it(listener: InTree) -> None:
    """The rank of an engine that has one rank, off by one: no hostile mind is needed."""
    with Client(listener.port) as client:
        client.tell([GET_META_MSG, 0, 1])
        assert not listener.answers()
    assert not listener.thread.is_alive()


@pytest.mark.timeout(1200)
def test_what_ends_it(record_property: pytest.RecordProperty) -> None:
    ended, silenced = set(), set()
    for name, attack in CLIENTS.items():
        listener = InTree()
        with Client(listener.port) as client:
            with suppress(ConnectionError):
                attack(client)
            if not listener.answers():
                (silenced if listener.thread.is_alive() else ended).add(name)
        listener.stop.set()
        listener.thread.join(5)
    record_property("hostile clients", len(CLIENTS))
    record_property("ended_by", sorted(ended))
    record_property("silenced_by", sorted(silenced))
    print(f"vLLM's listener: of {len(CLIENTS)} clients {len(ended)} ended it: {sorted(ended)}")
    print(f"vLLM's listener: {len(silenced)} more kept the next worker waiting for too long: {sorted(silenced)}")
    assert ended >= ENDED_BY
