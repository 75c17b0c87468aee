"""Whom does a rank tell what of the leases that it has, and when does it forget them? Without endpoints, loads and sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.session.world import LEASE, LIFE, REMOTE, SLOT, World, make_world, meet, seal

from kvreshard.model.changed import replace
from kvreshard.model.tables import Request
from kvreshard.session.commands import Load, Release, RemoteEngine, Renew
from kvreshard.session.lease import Lease
from kvreshard.session.notes import Heartbeat, Note, Report, read_note
from kvreshard.session.peer import Peer
from kvreshard.session.remote_leases import RELEASE_PATIENCE_S, RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.transport.base import TransportError

OTHER = Lease("s", SLOT + 1, 0xDEF)
ABSENT = RemoteEngine("prefill", LIFE, replace(REMOTE.address, port=2))
NOTHING = Request({}, {}, {}, {})


class Rank:
    """A remote_leases on rank 0 of an engine of two, and what it tells its source of one rank."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint = world.dst.endpoints[0]
        transport = world.dst.transports[0]
        assert endpoint._me is not None
        self.world, self.me = world, endpoint._me
        self.notes: list[Note | None] = []
        monkeypatch.setattr(transport, "notify", lambda peer, payload: self.notes.append(read_note(payload)))
        self.remote_leases = RemoteLeases(transport, endpoint._peers, ResultQueue(), usual_s=5.0)

    def meet(self) -> Peer:
        meeting = self.world.dst.endpoints[0]._peers.get(self.me, REMOTE)
        meet(self.world)
        return meeting.result()

    def load(self, name: str = "d", lease: Lease = LEASE, *, begin: bool = True) -> Load:
        load = Load(name, REMOTE, lease, NOTHING, seal(NOTHING, lease), gives_back=True)
        if begin:
            self.remote_leases.begin(load)
        return load

    def end(self, load: Load, peer: Peer | None, *, is_good: bool = True, is_kept: bool = False) -> None:
        self.remote_leases.end(self.me, load, peer, is_good=is_good, kept_as=load.lease if is_kept else None)

    @property
    def is_releasing(self) -> bool:
        """Whether there are leases to release whose sources are not met yet."""
        return any(source.releases for source in self.remote_leases._sources.values())

    def reports(self) -> list[tuple[str, bool]]:
        """(request, whether it went well) since the last call."""
        found = [(note.request, note.is_good) for note in self.notes if isinstance(note, Report)]
        self.notes.clear()
        return found


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(make_world(1, 2), monkeypatch)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_load_that_is_over_is_reported_with_its_word(rank: Rank, is_good: bool) -> None:
    peer = rank.meet()
    rank.end(rank.load(), peer, is_good=is_good)
    assert rank.notes == [Report(1, f"decode/{LIFE}", "r", LEASE.word, 0, (0, 1), is_good)]


def test_the_last_of_several_loads_reports(rank: Rank) -> None:
    peer = rank.meet()
    first, second, other = rank.load("a"), rank.load("b"), rank.load("c", OTHER)
    rank.end(first, peer, is_good=False)
    assert rank.reports() == []
    rank.end(other, peer)
    assert rank.reports() == [("s", True)]
    rank.end(second, peer)
    assert rank.reports() == [("r", True)]


def wait_for(rank: Rank) -> None:
    rank.remote_leases.start_renewing(Renew("other", REMOTE, LEASE), rank.me)


@pytest.mark.parametrize("use", [wait_for, lambda rank: rank.load("other")], ids=["waits", "is loaded"])
def test_a_lease_that_another_wants_is_not_given_back(rank: Rank, use: Callable[[Rank], object]) -> None:
    peer = rank.meet()
    use(rank)
    rank.end(rank.load(), peer)
    rank.end(rank.load(), None)
    rank.remote_leases.release(Release(REMOTE, LEASE))
    rank.remote_leases.update(rank.me, 100.0)
    assert (rank.reports(), rank.is_releasing) == ([], False)


def test_what_is_kept_goes_with_a_release_and_once(rank: Rank) -> None:
    rank.end(rank.load(), rank.meet(), is_kept=True)
    assert rank.reports() == []
    assert [list(source.loaded) for source in rank.remote_leases._sources.values()] == [[LEASE]]
    for _ in range(2):
        rank.remote_leases.release(Release(REMOTE, OTHER))
        rank.remote_leases.release(Release(REMOTE, LEASE))
    rank.remote_leases.update(rank.me, 100.0)
    assert rank.remote_leases._sources == {}
    # A release is not looked up: what has been read on another rank is nothing here.
    assert rank.reports() == [("s", True), ("r", True)]


def test_a_release_waits_for_the_engine_and_for_its_source(rank: Rank) -> None:
    rank.end(rank.load(), None, is_good=False)
    for me in (None, rank.me, rank.me):
        rank.remote_leases.update(me, 100.0)
        assert (rank.reports(), rank.is_releasing) == ([], True)
    meet(rank.world)
    rank.remote_leases.update(rank.me, 100.0)
    assert (rank.reports(), rank.is_releasing) == ([("r", True)], False)


def test_a_release_whose_source_cannot_be_met_is_dropped(rank: Rank) -> None:
    rank.world.meeting_error.append(ConnectionError("nobody is there"))
    rank.remote_leases.release(Release(ABSENT, LEASE))
    rank.remote_leases.update(rank.me, 100.0)
    meet(rank.world)
    rank.remote_leases.update(rank.me, 100.0)
    assert (rank.notes, rank.is_releasing) == ([], False)


def test_what_waits_and_what_is_kept_is_renewed(rank: Rank) -> None:
    peer = rank.meet()
    rank.remote_leases.start_renewing(Renew("waits", REMOTE, LEASE), rank.me)
    rank.remote_leases.start_renewing(Renew("again", REMOTE, LEASE), rank.me)
    rank.end(rank.load("kept", OTHER), peer, is_kept=True)
    assert rank.remote_leases.renew(rank.me, 100.0) == 5.0
    assert rank.notes == [Heartbeat(1, "decode", (("r", LEASE.word), ("s", OTHER.word)))]
    assert rank.remote_leases.renew(rank.me, 103.0) == 2.0
    rank.remote_leases.stop_renewing("waits")
    rank.remote_leases.stop_renewing("again")
    rank.remote_leases.renew(rank.me, 105.0)
    assert rank.notes[1:] == [Heartbeat(1, "decode", (("s", OTHER.word),))]


def test_a_load_takes_its_watch_with_it(rank: Rank) -> None:
    peer = rank.meet()
    rank.remote_leases.start_renewing(Renew("d", REMOTE, LEASE), rank.me)
    rank.end(rank.load("d"), peer)
    assert rank.reports() == [("r", True)]
    rank.remote_leases.renew(rank.me, 100.0)
    assert rank.notes == []


def test_a_source_is_asked_for_as_soon_as_it_is_wanted(rank: Rank) -> None:
    rank.remote_leases.start_renewing(Renew("early", REMOTE, LEASE), None)
    assert not rank.world.met
    rank.remote_leases.renew(rank.me, 100.0)
    assert len(rank.world.met) == 1
    rank.remote_leases.start_renewing(Renew("late", ABSENT, LEASE), rank.me)
    assert len(rank.world.met) == 2


def test_a_source_that_cannot_be_told_takes_nothing_with_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("closed")

    peer = rank.meet()
    monkeypatch.setattr(rank.world.dst.transports[0], "notify", refuse)
    rank.end(rank.load(), peer)
    rank.remote_leases.start_renewing(Renew("waits", REMOTE, LEASE), rank.me)
    assert rank.remote_leases.renew(rank.me, 100.0) == 5.0


def asked(rank: Rank) -> int:
    """Sources that are being asked, or are known."""
    return len(rank.world.dst.endpoints[0]._peers.known)  # type: ignore[attr-defined]


def test_a_source_that_nobody_wants_any_more_is_not_asked_further(rank: Rank) -> None:
    for name, remote in (("a", REMOTE), ("b", ABSENT), ("c", ABSENT)):
        rank.remote_leases.start_renewing(Renew(name, remote, LEASE), rank.me)
    rank.remote_leases.stop_renewing("a")
    rank.remote_leases.stop_renewing("b")
    rank.remote_leases.update(rank.me, 100.0)
    assert asked(rank) == 1
    rank.remote_leases.stop_renewing("c")
    rank.remote_leases.update(rank.me, 100.0)
    assert asked(rank) == 0


def test_what_is_to_be_given_back_asks_a_source_for_a_while(rank: Rank) -> None:
    """As the scheduler aborts: the request is watched no longer, and its source is given back."""
    rank.remote_leases.start_renewing(Renew("a", REMOTE, LEASE), rank.me)
    first = rank.world.dst.endpoints[0]._peers.get(rank.me, REMOTE)
    rank.remote_leases.stop_renewing("a")
    rank.remote_leases.release(Release(REMOTE, LEASE))
    rank.remote_leases.update(rank.me, 100.0)
    rank.remote_leases.update(rank.me, 100.0 + RELEASE_PATIENCE_S - 0.1)
    assert (rank.is_releasing, first.cancelled()) == (True, False)
    rank.remote_leases.start_renewing(Renew("b", REMOTE, OTHER), rank.me)
    rank.remote_leases.update(rank.me, 100.0 + RELEASE_PATIENCE_S)
    assert (rank.is_releasing, first.cancelled()) == (True, False)
    rank.remote_leases.stop_renewing("b")
    rank.remote_leases.release(Release(REMOTE, OTHER))
    rank.remote_leases.update(rank.me, 101.0 + RELEASE_PATIENCE_S)
    rank.remote_leases.update(rank.me, 102.0 + 2 * RELEASE_PATIENCE_S)
    assert (rank.is_releasing, first.cancelled(), asked(rank)) == (False, True, 0)
    meet(rank.world)
    rank.remote_leases.update(rank.me, 103.0 + 2 * RELEASE_PATIENCE_S)
    assert rank.notes == []


def test_a_source_that_is_met_is_given_back_whatever_it_was_waited_for(rank: Rank) -> None:
    rank.remote_leases.release(Release(REMOTE, LEASE))
    rank.remote_leases.update(rank.me, 100.0)
    meet(rank.world)
    rank.remote_leases.release(Release(REMOTE, OTHER))
    rank.remote_leases.update(rank.me, 101.0 + RELEASE_PATIENCE_S)
    assert rank.reports() == [("r", True), ("s", True)]


def test_two_choices_of_a_prefill_that_lost_its_pages_twice_are_released(rank: Rank) -> None:
    """Each release names the lease under which its load began; both have ended under the last one, which is released once."""
    first, second, last = (Lease("r", 1, word) for word in (1, 2, 3))
    peer = rank.meet()
    a = rank.load("a", first)
    rank.remote_leases.change(a, replace(a, lease=second))
    b = rank.load("b", second)
    for load in (a, b):
        rank.remote_leases.change(replace(load, lease=second), replace(load, lease=last))
    for load in (a, b):
        rank.remote_leases.end(rank.me, replace(load, lease=last), peer, is_good=True, kept_as=load.lease)
        assert rank.reports() == []
        rank.remote_leases.release(Release(REMOTE, load.lease))
        rank.remote_leases.update(rank.me, 100.0)
    assert rank.reports() == [("r", True)]
    assert rank.remote_leases._sources == {}


def test_a_release_goes_to_the_peer_as_it_is_met_anew(rank: Rank) -> None:
    """All in one turn: a request comes and is aborted, and the peer's connection is given up since a transfer has failed."""
    peers, peer = rank.world.dst.endpoints[0]._peers, rank.meet()
    rank.remote_leases.start_renewing(Renew("a", REMOTE, LEASE), rank.me)
    rank.remote_leases.stop_renewing("a")
    rank.remote_leases.release(Release(REMOTE, LEASE))
    peers.retire(peer)
    peers.sweep(list)
    rank.remote_leases.update(rank.me, 100.0)
    assert (rank.reports(), rank.is_releasing) == ([], True)
    meet(rank.world)
    rank.remote_leases.update(rank.me, 100.0)
    assert (rank.reports(), rank.is_releasing) == ([("r", True)], False)
