"""Does a rank meet an engine through its listener, with keys, and is engine metadata that lies refused in words?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.faulty_memory import FaultyFabric, no_fault
from tests.pairs.small import engine
from tests.unit.session.world import KIND, LIFE, OPTIONS, Clock, Side, make_side, meet_engine

from kvreshard.model import KvReshardError, WireError
from kvreshard.plan.compile import compile_route
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.engine_metadata import (
    EngineMetadata,
    RankMetadata,
    decode_engine_metadata,
    encode_engine_metadata,
)
from kvreshard.session.handshake_messages import Address, HandshakeError, HandshakeMessage
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.keys import Keys, read_keys, write_keys
from kvreshard.session.peer import LocalRank, disconnect
from kvreshard.transport.base import TransportError
from kvreshard.transport.local import HostMemory

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return read_keys(write_keys(tmp_path, "room")[1])


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    fabric = FaultyFabric()
    found = [
        make_side(Clock(), fabric, engine(name, tp=tp, kind=KIND), lambda rank: None, no_fault, OPTIONS)
        for name, tp in (("prefill", 2), ("decode", 1))
    ]
    yield found[0], found[1]
    for side in found:
        for transport in side.transports.values():
            transport.close()


def meet(dst: Side, listener: HandshakeServer, keys: Keys | None, heard: list[HandshakeMessage]) -> object:
    me = LocalRank(dst.engine_metadata(), dst.layout, 0, dst.transports[0], HostMemory(), None)
    options = EndpointOptions(handshake_timeout_s=60.0, keys=keys)
    route = meet_engine(me, RemoteEngine("prefill", LIFE, listener.address), options, lambda: heard).route
    assert all(transfer.pattern_cache is me.pattern_cache for transfer in route.transfers), "it has a bound of its own"
    return route.src_ranks


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_rank_meets_an_engine_and_says_how_it_went(sides: tuple[Side, Side], keys: Keys, has_keys: bool) -> None:
    heard: list[HandshakeMessage] = []
    used = keys if has_keys else None
    listener = HandshakeServer(LOCAL, sides[0].engine_metadata(), heard.append, keys=used)
    try:
        assert meet(sides[1], listener, used, heard) == (0, 1)
    finally:
        listener.close()
    assert [
        (handshake_message.engine, handshake_message.rank, handshake_message.is_good) for handshake_message in heard
    ] == [("decode", 0, True)]


def test_nothing_is_kept_of_a_peer_that_is_disconnected_and_all_of_another(sides: tuple[Side, Side]) -> None:
    me = LocalRank(sides[1].engine_metadata(), sides[1].layout, 0, sides[1].transports[0], HostMemory(), None)
    other = compile_route(sides[0].layout, me.layout, 0, pattern_cache=me.pattern_cache)
    of_other = len(me.pattern_cache)
    listener = HandshakeServer(LOCAL, sides[0].engine_metadata())
    try:
        peer = meet_engine(
            me, RemoteEngine("prefill", LIFE, listener.address), EndpointOptions(handshake_timeout_s=60.0)
        )
        with_peer = len(me.pattern_cache)
        with pytest.raises(TransportError):  # the transport knows these ranks already
            meet_engine(me, RemoteEngine("prefill", LIFE, listener.address), EndpointOptions(handshake_timeout_s=60.0))
        assert len(me.pattern_cache) == with_peer > of_other > 0, "of a meeting that failed"
    finally:
        listener.close()
    disconnect(peer)
    assert len(me.pattern_cache) == of_other
    other.drop_patterns()
    assert (len(me.pattern_cache), me.pattern_cache.num_bytes) == (0, 0)


@pytest.mark.parametrize(("engine_name", "life"), [("prefill", "former"), ("other", LIFE)])
def test_whoever_else_listens_there_now_is_not_read_from(sides: tuple[Side, Side], engine_name: str, life: str) -> None:
    listener = HandshakeServer(LOCAL, sides[0].engine_metadata())
    me = LocalRank(sides[1].engine_metadata(), sides[1].layout, 0, sides[1].transports[0], HostMemory(), None)
    try:
        with pytest.raises(HandshakeError, match=f"not '{engine_name}', instance id {life[:12]}: it has restarted"):
            meet_engine(
                me, RemoteEngine(engine_name, life, listener.address), EndpointOptions(handshake_timeout_s=60.0)
            )
    finally:
        listener.close()


def other_layout(engine_metadata: EngineMetadata, **changes: object) -> EngineMetadata:
    tree = msgspec.msgpack.decode(engine_metadata.layout)
    return msgspec.structs.replace(engine_metadata, layout=msgspec.msgpack.encode({**tree, **changes}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda engine_metadata: msgspec.structs.replace(engine_metadata, ranks=engine_metadata.ranks[:1]),
            r"ranks \[0, 1\] are described and \[0\] can be",
        ),
        (
            lambda engine_metadata: msgspec.structs.replace(
                engine_metadata, ranks=(*engine_metadata.ranks, engine_metadata.ranks[0])
            ),
            "every rank needs both, once",
        ),
        (
            lambda engine_metadata: other_layout(engine_metadata, engine="decode"),
            "carries the layout of engine 'decode'",
        ),
        (lambda engine_metadata: other_layout(engine_metadata, engine="a\nb"), r"at `\$\.engine`"),
        (lambda engine_metadata: msgspec.structs.replace(engine_metadata, layout=b"\xff" * 99), "not a layout"),
    ],
)
def test_metadata_that_lies_is_refused_and_reported(
    sides: tuple[Side, Side], change: Callable[[EngineMetadata], EngineMetadata], told: str
) -> None:
    heard: list[HandshakeMessage] = []
    listener = HandshakeServer(LOCAL, change(sides[0].engine_metadata()), heard.append)
    try:
        with pytest.raises(KvReshardError, match=told) as caught:
            meet(sides[1], listener, None, heard)
    finally:
        listener.close()
    assert str(caught.value).isprintable()
    assert [handshake_message.is_good for handshake_message in heard] == [False]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"key": bytes(32)}, f"names instance id {LIFE} and has the key of"),
        ({"instance_id": "former"}, "names instance id former and has the key of"),
        ({"key": b"short"}, r"length >= 32 - at `\$\.key`"),
        ({"key": bytes(33)}, r"length <= 32 - at `\$\.key`"),
    ],
)
def test_nobody_answers_in_another_engines_place_without_its_key(
    sides: tuple[Side, Side], changes: dict[str, object], told: str
) -> None:
    """Whoever may send parameters chooses who is asked: an engine of their own must not become the one that others' parameters name."""
    listener = HandshakeServer(LOCAL, msgspec.structs.replace(sides[0].engine_metadata(), **changes))
    me = LocalRank(sides[1].engine_metadata(), sides[1].layout, 0, sides[1].transports[0], HostMemory(), None)
    life = str(changes.get("instance_id", LIFE))
    try:
        with pytest.raises(HandshakeError, match=told):
            meet_engine(me, RemoteEngine("prefill", life, listener.address), EndpointOptions(handshake_timeout_s=60.0))
    finally:
        listener.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda rank: msgspec.structs.replace(rank, lease_address=-8),
        lambda rank: msgspec.structs.replace(rank, lease_address=2**63 - 8),
        lambda rank: msgspec.structs.replace(rank, lease_slots=1 << 40),
        lambda rank: msgspec.structs.replace(rank, lease_slots=0, lease_address=2**63),
    ],
)
def test_a_lease_table_outside_the_address_space_is_refused(
    sides: tuple[Side, Side], change: Callable[[RankMetadata], RankMetadata]
) -> None:
    engine_metadata = sides[0].engine_metadata()
    lying = encode_engine_metadata(
        msgspec.structs.replace(engine_metadata, ranks=(change(engine_metadata.ranks[0]), *engine_metadata.ranks[1:]))
    )
    with pytest.raises(WireError, match=r"ranks|lease table"):
        decode_engine_metadata(lying)
