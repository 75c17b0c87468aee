"""Whom does a rank tell what of the leases that it has, and when does it forget them? Without endpoints, loads and sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.session.world import LEASE, LIFE, REMOTE, SLOT, World, make_world, meet, seal

from kvreshard.model.changed import replace
from kvreshard.model.tables import Request
from kvreshard.session.commands import Load, Release, RemoteEngine, RemoteLease, Renew
from kvreshard.session.notes import Heartbeat, Note, Report, read_note
from kvreshard.session.peer import Peer
from kvreshard.session.remote_leases import RELEASE_PATIENCE_S, RemoteLeases
from kvreshard.transport.base import TransportError

OTHER = RemoteLease("s", SLOT + 1, 0xDEF)
ABSENT = RemoteEngine("prefill", LIFE, replace(REMOTE.address, port=2))
NOTHING = Request({}, {}, {}, {})


class Told:
    """A remote_leases on rank 0 of an engine of two, and what it tells its source of one rank."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint = world.dst.endpoints[0]
        transport = world.dst.transports[0]
        assert endpoint._me is not None
        self.world, self.me = world, endpoint._me
        self.notes: list[Note | None] = []
        monkeypatch.setattr(transport, "notify", lambda peer, payload: self.notes.append(read_note(payload)))
        self.remote_leases = RemoteLeases(transport, endpoint._peers, usual_s=5.0)

    def meet(self) -> Peer:
        meeting = self.world.dst.endpoints[0]._peers.get(self.me, REMOTE)
        meet(self.world)
        return meeting.result()

    def load(self, name: str = "d", lease: RemoteLease = LEASE, *, begin: bool = True) -> Load:
        load = Load(name, REMOTE, lease, NOTHING, seal(NOTHING, lease), gives_back=True)
        if begin:
            self.remote_leases.begin(load)
        return load

    def end(self, load: Load, peer: Peer | None, *, is_good: bool = True, is_kept: bool = False) -> None:
        self.remote_leases.end(self.me, load, peer, is_good=is_good, is_kept=is_kept)

    def reports(self) -> list[tuple[str, bool]]:
        """(request, whether it went well) since the last call."""
        found = [(note.request, note.is_good) for note in self.notes if isinstance(note, Report)]
        self.notes.clear()
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(make_world(1, 2), monkeypatch)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_load_that_is_over_is_reported_with_its_word(told: Told, is_good: bool) -> None:
    peer = told.meet()
    told.end(told.load(), peer, is_good=is_good)
    assert told.notes == [Report(1, f"decode/{LIFE}", "r", LEASE.word, 0, (0, 1), is_good)]


def test_the_last_of_several_loads_reports(told: Told) -> None:
    peer = told.meet()
    first, second, other = told.load("a"), told.load("b"), told.load("c", OTHER)
    told.end(first, peer, is_good=False)
    assert told.reports() == []
    told.end(other, peer)
    assert told.reports() == [("s", True)]
    told.end(second, peer)
    assert told.reports() == [("r", True)]


def wait_for(told: Told) -> None:
    told.remote_leases.start_renewing(Renew("other", REMOTE, LEASE), told.me)


@pytest.mark.parametrize("use", [wait_for, lambda told: told.load("other")], ids=["waits", "is loaded"])
def test_a_lease_that_another_wants_is_not_given_back(told: Told, use: Callable[[Told], object]) -> None:
    peer = told.meet()
    use(told)
    told.end(told.load(), peer)
    told.end(told.load(), None)
    told.remote_leases.release(Release(REMOTE, LEASE))
    told.remote_leases.update(told.me, 100.0)
    assert (told.reports(), told.remote_leases.is_releasing) == ([], False)


@pytest.mark.parametrize("word", ["release", "cancel"])
def test_what_is_kept_goes_with_a_word_and_once(told: Told, word: str) -> None:
    told.end(told.load(), told.meet(), is_kept=True)
    assert (told.reports(), told.remote_leases.num_kept) == ([], 1)
    for _ in range(2):
        if word == "release":
            told.remote_leases.release(Release(REMOTE, OTHER))
            told.remote_leases.release(Release(REMOTE, LEASE))
        else:
            told.remote_leases.cancel("another")
            told.remote_leases.cancel("d")
    told.remote_leases.update(told.me, 100.0)
    assert told.remote_leases.num_kept == 0
    # A release is not looked up: what has been read on another rank is nothing here.
    assert told.reports() == ([("s", True), ("r", True)] if word == "release" else [("r", True)])


def test_a_release_waits_for_the_engine_and_for_its_source(told: Told) -> None:
    told.end(told.load(), None, is_good=False)
    for me in (None, told.me, told.me):
        told.remote_leases.update(me, 100.0)
        assert (told.reports(), told.remote_leases.is_releasing) == ([], True)
    meet(told.world)
    told.remote_leases.update(told.me, 100.0)
    assert (told.reports(), told.remote_leases.is_releasing) == ([("r", True)], False)


def test_a_release_whose_source_cannot_be_met_is_dropped(told: Told) -> None:
    told.world.meeting_error.append(ConnectionError("nobody is there"))
    told.remote_leases.release(Release(ABSENT, LEASE))
    told.remote_leases.update(told.me, 100.0)
    meet(told.world)
    told.remote_leases.update(told.me, 100.0)
    assert (told.notes, told.remote_leases.is_releasing) == ([], False)


def test_what_waits_and_what_is_kept_is_renewed(told: Told) -> None:
    peer = told.meet()
    told.remote_leases.start_renewing(Renew("waits", REMOTE, LEASE), told.me)
    told.remote_leases.start_renewing(Renew("again", REMOTE, LEASE), told.me)
    told.end(told.load("kept", OTHER), peer, is_kept=True)
    assert told.remote_leases.renew(told.me, 100.0) == 5.0
    assert told.notes == [Heartbeat(1, "decode", (("r", LEASE.word), ("s", OTHER.word)))]
    assert told.remote_leases.renew(told.me, 103.0) == 2.0
    told.remote_leases.stop_renewing("waits")
    told.remote_leases.stop_renewing("again")
    told.remote_leases.renew(told.me, 105.0)
    assert told.notes[1:] == [Heartbeat(1, "decode", (("s", OTHER.word),))]


def test_a_load_takes_its_watch_with_it(told: Told) -> None:
    peer = told.meet()
    told.remote_leases.start_renewing(Renew("d", REMOTE, LEASE), told.me)
    told.end(told.load("d"), peer)
    assert told.reports() == [("r", True)]
    told.remote_leases.renew(told.me, 100.0)
    assert told.notes == []


def test_a_source_is_asked_for_as_soon_as_it_is_wanted(told: Told) -> None:
    told.remote_leases.start_renewing(Renew("early", REMOTE, LEASE), None)
    assert not told.world.met
    told.remote_leases.renew(told.me, 100.0)
    assert len(told.world.met) == 1
    told.remote_leases.start_renewing(Renew("late", ABSENT, LEASE), told.me)
    assert len(told.world.met) == 2


def test_a_source_that_cannot_be_told_takes_nothing_with_it(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("closed")

    peer = told.meet()
    monkeypatch.setattr(told.world.dst.transports[0], "notify", refuse)
    told.end(told.load(), peer)
    told.remote_leases.start_renewing(Renew("waits", REMOTE, LEASE), told.me)
    assert told.remote_leases.renew(told.me, 100.0) == 5.0


def asked(told: Told) -> int:
    """Sources that are being asked, or are known."""
    return len(told.world.dst.endpoints[0]._peers.known)  # type: ignore[attr-defined]


def test_a_source_that_nobody_wants_any_more_is_not_asked_further(told: Told) -> None:
    for name, remote in (("a", REMOTE), ("b", ABSENT), ("c", ABSENT)):
        told.remote_leases.start_renewing(Renew(name, remote, LEASE), told.me)
    told.remote_leases.stop_renewing("a")
    told.remote_leases.stop_renewing("b")
    told.remote_leases.update(told.me, 100.0)
    assert asked(told) == 1
    told.remote_leases.stop_renewing("c")
    told.remote_leases.update(told.me, 100.0)
    assert asked(told) == 0


def test_what_is_to_be_given_back_asks_a_source_for_a_while(told: Told) -> None:
    """As the scheduler aborts: the request is watched no longer, and its source is given back."""
    told.remote_leases.start_renewing(Renew("a", REMOTE, LEASE), told.me)
    first = told.world.dst.endpoints[0]._peers.get(told.me, REMOTE)
    told.remote_leases.stop_renewing("a")
    told.remote_leases.release(Release(REMOTE, LEASE))
    told.remote_leases.update(told.me, 100.0)
    told.remote_leases.update(told.me, 100.0 + RELEASE_PATIENCE_S - 0.1)
    assert (told.remote_leases.is_releasing, first.cancelled()) == (True, False)
    told.remote_leases.start_renewing(Renew("b", REMOTE, OTHER), told.me)
    told.remote_leases.update(told.me, 100.0 + RELEASE_PATIENCE_S)
    assert (told.remote_leases.is_releasing, first.cancelled()) == (True, False)
    told.remote_leases.stop_renewing("b")
    told.remote_leases.release(Release(REMOTE, OTHER))
    told.remote_leases.update(told.me, 101.0 + RELEASE_PATIENCE_S)
    told.remote_leases.update(told.me, 102.0 + 2 * RELEASE_PATIENCE_S)
    assert (told.remote_leases.is_releasing, first.cancelled(), asked(told)) == (False, True, 0)
    meet(told.world)
    told.remote_leases.update(told.me, 103.0 + 2 * RELEASE_PATIENCE_S)
    assert told.notes == []


def test_a_source_that_is_met_is_given_back_whatever_it_was_waited_for(told: Told) -> None:
    told.remote_leases.release(Release(REMOTE, LEASE))
    told.remote_leases.update(told.me, 100.0)
    meet(told.world)
    told.remote_leases.release(Release(REMOTE, OTHER))
    told.remote_leases.update(told.me, 101.0 + RELEASE_PATIENCE_S)
    assert told.reports() == [("r", True), ("s", True)]
