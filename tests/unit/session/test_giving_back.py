"""When does a source get its pages back: from a load, a release, a cancel, or from none of them because others still read?

Two engines of several ranks in one process, as in `test_endpoint`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.faulty_memory import Fault, FaultyFabric, FaultyTransport
from tests.unit.session.world import (
    KEY,
    LEASE,
    REMOTE,
    SLOT,
    WORD,
    ScriptedPeers,
    World,
    collect,
    meet,
    order_load,
)

from kvreshard.model import LayoutMismatch
from kvreshard.session.commands import Cancel, Release, RemoteEngine, Renew, StopRenewing
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.lease import FREE, Lease
from kvreshard.session.notes import Report, read_note
from kvreshard.session.remote_leases import MAX_REFUSED, RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.transport.base import TransportError


def test_a_release_frees_the_source_without_a_load(world: World) -> None:
    world.acquire_and_publish()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Release(REMOTE, LEASE))
    world.turn()
    assert collect(world.src)[2] == set()
    meet(world)
    world.turn()
    assert (collect(world.src)[2], collect(world.dst)) == ({"r"}, (set(), {}, set()))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_source_that_is_not_given_back_by_its_load_waits_for_a_release(world: World, is_cancelled: bool) -> None:
    """Of the scheduler, which knows who else wants it. A cancellation that comes too late changes nothing."""
    world.acquire_and_publish()
    order_load(world, "d", gives_back=False)
    world.turn()
    meet(world)
    world.turn()
    assert collect(world.dst)[0] == {"d"}
    for command in [*([Cancel("d")] if is_cancelled else []), Release(REMOTE, LEASE)]:
        assert (collect(world.src)[2], world.words()) == (set(), {WORD})
        for endpoint in world.dst.endpoints.values():
            endpoint.submit(command)
        world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})
    assert not any(endpoint._remote_leases._sources for endpoint in world.dst.endpoints.values())


@pytest.mark.parametrize("is_met", [False, True])
def test_a_load_that_fails_leaves_its_source_to_others_of_its_engine(world: World, is_met: bool) -> None:
    world.acquire_and_publish()
    world.faults[-1] = Fault(delay_steps=2)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Renew("other", REMOTE, LEASE))
    order_load(world)
    world.turn()
    if is_met:
        meet(world)
        world.turn()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
        endpoint.submit(Release(REMOTE, LEASE))
    world.turn()
    meet(world)
    for _ in range(4):
        world.fabric.step()
        world.turn()
    assert (collect(world.dst)[1]["d"].kind, collect(world.src)[2]) == ("cancelled", set())
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(StopRenewing("other"))
        endpoint.submit(Release(REMOTE, LEASE))
    world.turn()
    assert collect(world.src)[2] == {"r"}


def test_an_engine_that_was_to_read_from_itself_ends_its_own_leases(world: World) -> None:
    """No rank meets itself for it; a lease with another word, or of another life, stays."""
    world.acquire_and_publish()
    for remote, lease in (
        (REMOTE, Lease("r", SLOT, WORD + 1)),
        (RemoteEngine("prefill", "another life", REMOTE.address), LEASE),
        (REMOTE, LEASE),
    ):
        assert world.words() == {WORD}
        for endpoint in world.src.endpoints.values():
            endpoint.submit(Release(remote, lease))
        world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})
    assert world.met  # the other life is asked for, by its listener


def test_a_load_that_was_given_up_before_its_source_was_met_frees_the_source(world: World) -> None:
    world.acquire_and_publish()
    order_load(world)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    world.turn()
    assert collect(world.dst)[1]["d"].kind == "cancelled"
    assert collect(world.src)[2] == set()
    meet(world)
    world.turn()
    assert collect(world.src)[2] == {"r"}
    assert world.words() == {FREE}


@pytest.mark.parametrize(
    "error", [LayoutMismatch("heads are 8 and 7"), HandshakeError("nobody is there"), TransportError("no")]
)
def test_a_source_that_cannot_be_read_from_gets_its_pages_back_if_it_has_been_met(
    world: World, error: Exception
) -> None:
    """Each load of a pair that does not fit fails, and nobody else will read its pages."""
    is_told = isinstance(error, LayoutMismatch)
    world.meeting_error.append(error)
    for endpoint in world.dst.endpoints.values():
        assert endpoint._me is not None
        if not isinstance(error, HandshakeError):
            endpoint._me.refused[REMOTE] = world.src.engine_metadata()
    for name in ("first", "second"):
        world.acquire_and_publish(name)
        order_load(world, name, lease=Lease(name, SLOT, WORD), gives_back=False)
        world.turn()
        meet(world)
        world.turn()
        assert set(collect(world.dst)[1]) == {name}
        assert collect(world.src)[2] == ({name} if is_told else set())
        if is_told:
            assert world.words() == {FREE}


def test_only_so_many_engines_that_cannot_be_read_from_stay_connected() -> None:
    fabric = FaultyFabric()
    sources = [FaultyTransport(fabric, f"source {number}") for number in range(MAX_REFUSED + 2)]
    mine, rank = FaultyTransport(fabric, "mine"), RankMetadata(0, b"", 0, 64, 0, 64)
    for transport in (*sources, mine):
        transport.register([])
    leases = RemoteLeases(mine, ScriptedPeers([]), ResultQueue(), 5.0)
    me: Any = SimpleNamespace(name=("me", "life"), rank=3)
    for _ in range(2):
        for number, source in enumerate(sources):
            engine_metadata = EngineMetadata(
                "",
                1,
                f"engine {number}",
                "life",
                {},
                b"",
                (replace(rank, transport_metadata=source.metadata()),),
                KEY,
                30.0,
            )
            leases._report_refused(me, engine_metadata, LEASE)
            assert len(mine._peers) <= MAX_REFUSED
            assert [read_note(note.payload) for note in source.notifications()] == [
                Report(1, "me/life", LEASE.request, LEASE.word, 3, (3,), is_good=False)
            ]
