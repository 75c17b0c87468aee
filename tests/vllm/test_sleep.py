"""What becomes of an engine whose caches lose their memory and get it back: worlds with vLLM's schedulers, and which engines may sleep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import draw
from tests.vllm.simulation.world import World
from vllm.config import KVTransferConfig

from kvreshard.model import KvReshardError
from kvreshard.model.changed import replace
from kvreshard.session.commands import Acquire, Command, Failure, RemoteEngine, Results
from kvreshard.session.engine_metadata import MAX_ENGINE_METADATA_BYTES
from kvreshard.session.handshake_client import HandshakeClient, read_engine_metadata
from kvreshard.session.handshake_messages import Address, metadata_request
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.lease import Lease
from kvreshard.vllm import ReshardConnector, idle
from kvreshard.vllm.options import read_options
from kvreshard.vllm.prompt import Prompt
from kvreshard.vllm.step_metadata import ReshardMetadata
from kvreshard.vllm.versions import release
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's clock is turned by hand."""
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)


@pytest.mark.skipif(not release().can_sleep, reason="vLLM tells no connector when an engine sleeps")
@pytest.mark.parametrize("batch", range(4))
def test_kernels_find_what_they_look_for_though_engines_sleep(batch: int, run_seed: int) -> None:
    """Aborted, paused, reset and without their memory for a while, at any moment; what comes meanwhile is answered afterwards."""
    num_lives = num_loaded = 0
    for seed in (batch, *(run_seed % 10**6 + 3000 + batch * 2 + i for i in range(2))):
        _, shapes, weather = draw(seed)
        weather = replace(weather, sleeps=0.02, pauses=0.0)
        world = World(shapes, base_config(), seed, weather)
        try:
            world.run(20)
        finally:
            world.close()
        num_lives += sum(engine._num_instances for engine in world.by_name.values()) - len(shapes)
        num_loaded += world.num_loaded
    assert num_lives > 5
    assert num_loaded > 0


def test_with_ucx_only() -> None:
    def supports(**extra: Any) -> bool:
        return ReshardConnector.supports_sleep_mode(
            KVTransferConfig(kv_connector="x", kv_role="kv_both", kv_connector_extra_config=extra)
        )

    assert supports()
    assert supports(backends=["UCX"])
    assert not supports(backend="LIBFABRIC")


class Session:
    """What a sleeping rank has of its session: what is left when that ends."""

    def __init__(self, left: Results) -> None:
        self.left, self.commands = left, list[Command]()

    def end(self) -> Results:
        return self.left

    def begin_step(self, computed: object) -> None:
        """Nothing is computed."""

    def submit(self, command: Command) -> None:
        self.commands.append(command)


def rank_with(left: Results, is_running: bool = False) -> WorkerSide:
    rank = WorkerSide(None, None, "p", read_options({}))
    rank._endpoint = Session(left)  # type: ignore[assignment]
    rank._transport = SimpleNamespace(close=lambda: None, is_running=is_running)  # type: ignore[assignment]
    return rank


def test_a_rank_tells_what_was_left_and_keeps_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that pages of a failed load can be written by nobody any more."""
    left = Results(
        freed={"a": "revoked"},
        failed={
            "b": Failure("timeout", "late", is_quarantined=True),
            "c": Failure("cancelled", "the engine is put to sleep"),
        },
    )
    rank, awake = rank_with(left), Session(Results())
    rank.unregister()
    rank.unregister()  # vLLM may say it twice
    assert rank.part is None
    told = rank.collect()
    assert (told.finished_sending, told.finished_recving, told.failed_recving) == ({"a"}, {"b", "c"}, {"b", "c"})
    assert not rank.collect().finished_sending
    meta = rank.take_metadata()
    assert meta is not None
    assert meta.quarantined == meta.settled == {("b", 0)}
    late, later = Acquire(Lease("d", 1, 2)), Acquire(Lease("e", 2, 3))
    rank.submit(ReshardMetadata([late]))
    monkeypatch.setattr(rank, "register", lambda caches: setattr(rank, "_endpoint", awake))
    rank.restore()
    rank.restore()
    rank.begin_step(ReshardMetadata([later]))
    rank.submit(ReshardMetadata([later]))
    assert awake.commands == [late, later]


def test_memory_stays_where_the_agent_does_not_close() -> None:
    """And the pages of what was being read are not used again."""
    left = Results(freed={"a": "revoked"}, failed={"b": Failure("cancelled", "the engine is put to sleep")})
    rank = rank_with(left, is_running=True)
    with pytest.raises(KvReshardError, match="their memory must stay"):
        rank.unregister()
    assert rank.collect().finished_sending == {"a"}
    meta = rank.take_metadata()
    assert meta is not None
    assert (meta.quarantined, meta.settled) == ({("b", 0)}, set())


def test_an_engine_that_wakes_up_is_another_to_its_peers_and_keeps_what_it_computes() -> None:
    _, shapes, _ = draw(0)
    world = World(shapes, base_config(), 0)
    engine = world.by_name["p"]
    scheduling = engine.connector._scheduler
    scheduling.take_metadata({}, ())
    computing = scheduling._producer.leases.acquire("r")
    published = scheduling._producer.leases.acquire("s")
    scheduling._producer.leases.publish("s", Prompt(()), 1, {}, 0)
    before, key = engine.engine_metadata.instance_id, engine.engine_metadata.key
    engine._begin_instance()
    after = engine.engine_metadata.instance_id
    assert after != before
    assert scheduling._producer._key == engine.engine_metadata.key != key
    commands = scheduling.take_metadata({}, ()).commands
    assert Acquire(computing.lease) in commands
    assert Acquire(published.lease) not in commands
    for instance, is_own in ((before, False), (after, True)):
        assert scheduling._consumer.known.is_own(RemoteEngine("p", instance, engine.address)) is is_own
    world.close()


def test_the_listener_hands_out_the_latest_metadata() -> None:
    """At the same address."""
    world = World(draw(0)[1], base_config(), 0)
    metadata = world.by_name["p"].engine_metadata
    world.by_name["p"]._begin_instance()
    other = world.by_name["p"].engine_metadata
    server, client = HandshakeServer(Address("127.0.0.1", 0), metadata), HandshakeClient()
    for expected in (metadata, other):
        server.hand_out(expected)
        reply = client.ask(server.address, metadata_request("d", 0), 5.0, MAX_ENGINE_METADATA_BYTES, None).result(5.0)
        assert read_engine_metadata(server.address, reply).instance_id == expected.instance_id
    client.close()
    server.close()
    world.close()


def test_a_rank_that_could_not_wake_up_may_be_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, calls, closed = WorkerSide(None, None, "d", read_options({})), [], []
    worker._is_asleep = True

    def register(kv_caches: object) -> None:
        calls.append(kv_caches)
        if len(calls) == 1:
            worker._transport = SimpleNamespace(close=lambda: closed.append(True))
            raise RuntimeError("out of memory")

    monkeypatch.setattr(worker, "register", register)
    with pytest.raises(RuntimeError):
        worker.restore()
    assert (closed, worker._transport) == ([True], None)  # or each attempt would leave an agent behind
    worker.submit(ReshardMetadata([Acquire(Lease("r", 0, 1))]))
    assert len(worker._commands) == 1  # kept for then
    worker.restore()
    assert (len(calls), worker._is_asleep) == (2, False)
