"""No interleaving serves wrong bytes, writes pages that were given back, loses a request, or keeps a lease for ever.

Two requests between two engines: real endpoints of every rank, a network and a clock that the machine turns. What it may do in
any order: let a request be granted, offered, revoked, loaded, aborted; turn one rank's loop; let the network settle one transfer,
early, late, badly, in part or never; lose and repeat notifications; let seconds pass; let the source engine vanish.

The schedulers are played as vLLM plays them: pages that a side gives back are used for something else at once, so that a read
of freed pages brings other bytes, and a write to pages that were given back is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.faulty_memory import Fault
from tests.pairs.small import GROUP
from tests.unit.session.world import REMOTE, SLOT, Side, World, make_world, meet, seal

from kvreshard.model import EngineLayout
from kvreshard.model.tables import PageTable, Request
from kvreshard.session.commands import (
    Acquire,
    Cancel,
    EndpointOptions,
    Failure,
    Load,
    Publish,
    Release,
    Renew,
    Results,
    Revoke,
)
from kvreshard.session.lease import Lease
from kvreshard.testing.oracle import oracle_transfer

NUM_TOKENS = 21
LEASE_S = 30.0
OPTIONS = EndpointOptions(load_timeout_s=60.0, settle_timeout_s=10.0, heartbeat_s=5.0, retry_s=5.0)
SRC_PAGES = {"a": [1, 2, 3, 4, 5, 6], "b": [11, 12, 13, 14, 15, 16]}
DST_PAGES = {"a": [2, 3, 4, 5], "b": [12, 13, 14, 15]}
NEVER = 10**6
QUIET_TURNS = 6
TRIED: Counter[str] = Counter()

Spans = list[tuple[tuple[int, str], int, int]]


def some(source: str = "", reading: str = "") -> Callable[[Sessions], bool]:
    """A rule for machines that have a request in that state."""
    return lambda machine: bool(machine.names(source, reading))


@dataclass
class Life:
    """One request, as both schedulers see it."""

    name: str
    number: int = 0
    source: str = "absent"  # granted, offered, absent
    reading: str = "idle"  # loading, loaded, idle, quarantined
    freed_ranks: set[int] = field(default_factory=set)
    ended_ranks: dict[int, Failure | None] = field(default_factory=dict)
    kept_ranks: set[int] = field(default_factory=set)
    expected: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    lease: Lease | None = None
    load_id: str = ""

    @property
    def source_id(self) -> str:
        return f"p-{self.name}{self.number}"


class Sessions(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        src_tp=st.sampled_from([1, 2, 4]),
        dst_tp=st.sampled_from([1, 2]),
        seed=st.integers(0, 2**32 - 1),
        begun=st.sampled_from(["", "a", "a", "ab"]),
    )
    def start(self, src_tp: int, dst_tp: int, seed: int, begun: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.world: World = make_world(src_tp, dst_tp, OPTIONS)
        self.lives = {name: Life(name) for name in "ab"}
        self.is_source_there = True
        self.sentinels: dict[str, list[np.ndarray]] = {}
        for side in (self.world.src, self.world.dst):
            for content in side.memory.values():
                content[:] = self.rng.integers(0, 256, content.size, dtype=np.uint8)
        for name in self.lives:
            self._give_back(name)
            self._grant(name)
            self._offer(name)
        self.turn_all(1)
        # Otherwise half of the histories have no load at all.
        for name in begun:
            self._load(name, watched=bool(seed % 2))

    # What the source engine does

    def names(self, source: str = "", reading: str = "") -> list[str]:
        """Requests in that state; on the source's side, as long as it is there."""
        if source and not self.is_source_there:
            return []
        lives = self.lives.values()
        return [life.name for life in lives if source in ("", life.source) and reading in ("", life.reading)]

    @precondition(some("absent"))
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        self._grant(data.draw(st.sampled_from(self.names("absent"))))

    def _grant(self, name: str) -> None:
        life = self.lives[name]
        life.number += 1
        self._scribble(self.world.src, SRC_PAGES[name])
        life.lease = Lease(life.source_id, SLOT + "ab".index(name), int(self.rng.integers(1, 2**63)))
        life.source, life.freed_ranks = "granted", set()
        self._tell(self.world.src, Acquire(life.lease))

    @precondition(some("granted"))
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        self._offer(data.draw(st.sampled_from(self.names("granted"))))

    def _offer(self, name: str) -> None:
        life = self.lives[name]
        life.source = "offered"
        self._tell(self.world.src, Publish(life.source_id, LEASE_S))

    @precondition(some("granted"))
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        """Aborted before it was offered: nobody was told of it, and its pages are used for something else at once."""
        life = self.lives[data.draw(st.sampled_from(self.names("granted")))]
        life.source = "absent"
        self._tell(self.world.src, Revoke(life.lease))
        self._scribble(self.world.src, SRC_PAGES[life.name])

    @precondition(lambda self: self.is_source_there and self.names(reading="loading"))
    @rule(chance=st.integers(0, 5))
    def vanish(self, chance: int) -> None:
        """The source engine dies, now and then; its memory is somebody else's soon."""
        if chance:
            return
        self.is_source_there = False
        for transport in self.world.src.transports.values():
            transport.close()
        for name, life in self.lives.items():
            life.source = "absent"
            self._scribble(self.world.src, SRC_PAGES[name])

    # What the destination engine does

    @precondition(some("offered", "idle"))
    @rule(data=st.data(), watched=st.booleans())
    def load(self, data: st.DataObject, watched: bool) -> None:
        self._load(data.draw(st.sampled_from(self.names("offered", "idle"))), watched)

    def _load(self, name: str, watched: bool) -> None:
        life = self.lives[name]
        assert life.lease is not None
        self.sentinels.pop(name)
        self._scribble(self.world.dst, DST_PAGES[name])
        wanted = self._request(name)
        src, dst = self.world.src, self.world.dst
        life.expected = dict(oracle_transfer(src.layout, dst.layout, src.memory, dst.memory, wanted))
        life.reading, life.ended_ranks, life.load_id = "loading", {}, f"d-{life.source_id}"
        TRIED["loads"] += 1
        if watched:
            self._tell(dst, Renew(life.load_id, REMOTE, life.lease))
        self._tell(dst, Load(life.load_id, REMOTE, life.lease, wanted, seal(wanted, life.lease), gives_back=True))

    @precondition(some("offered", "idle"))
    @rule(data=st.data(), chance=st.integers(0, 3))
    def release(self, data: st.DataObject, chance: int) -> None:
        """Aborted before it had blocks, now and then."""
        life = self.lives[data.draw(st.sampled_from(self.names("offered", "idle")))]
        if not chance and life.lease is not None:
            self._tell(self.world.dst, Release(REMOTE, life.lease))

    @precondition(some(reading="loading"))
    @rule(data=st.data(), chance=st.integers(0, 2))
    def abort(self, data: st.DataObject, chance: int) -> None:
        life = self.lives[data.draw(st.sampled_from(self.names(reading="loading")))]
        if not chance:
            self._tell(self.world.dst, Cancel(life.load_id))

    @precondition(some(reading="loaded"))
    @rule(data=st.data())
    def use_and_finish(self, data: st.DataObject) -> None:
        """The loaded pages are read by decode steps, then given back."""
        life = self.lives[data.draw(st.sampled_from(self.names(reading="loaded")))]
        life.reading = "idle"
        self._give_back(life.name)

    # What the machine does

    @rule(rank=st.integers(0, 3), on_source=st.booleans())
    def turn(self, rank: int, on_source: bool) -> None:
        side = self.world.src if on_source else self.world.dst
        if on_source and not self.is_source_there:
            return
        ranks = sorted(side.endpoints)
        side.endpoints[ranks[rank % len(ranks)]].turn()
        self._collect()

    @rule(times=st.integers(1, 3))
    def turn_all(self, times: int) -> None:
        for _ in range(times):
            for side in (self.world.src, self.world.dst) if self.is_source_there else (self.world.dst,):
                side.turn(1)
            self._collect()

    @precondition(lambda self: self.world.met)
    @rule()
    def meet(self) -> None:
        if self.is_source_there:
            meet(self.world)
        else:
            self.world.meeting_error[:] = [ConnectionError("nobody is there")]
            meet(self.world)

    @rule(
        fault=st.sampled_from(
            [
                Fault(),
                Fault(delay_steps=1),
                Fault(delay_steps=2),
                Fault(delay_steps=2, fail_after_copies=1),
                Fault(fail_after_copies=0),
                Fault(delay_steps=NEVER),
                Fault(delay_steps=300),
            ]
        )
    )
    def weather(self, fault: Fault) -> None:
        """What happens to what is posted from now on."""
        self.world.faults[-1] = fault

    @precondition(lambda self: self.world.fabric.num_pending)
    @rule(count=st.integers(1, 4))
    def settle(self, count: int) -> None:
        self.world.fabric.step(count)

    @rule(seconds=st.sampled_from([0.5, 6.0, 12.0, 31.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now_s += seconds

    @precondition(lambda self: self.is_source_there and self.names(reading="loading"))
    @rule()
    def leases_run_out(self) -> None:
        """In the middle of a load; the source finds out before the destination does anything."""
        self.world.wait(LEASE_S + 1.0, self.world.src)
        self._collect()

    # What must hold

    @invariant()
    def pages_given_back_are_left_alone(self) -> None:
        for name, expected in getattr(self, "sentinels", {}).items():
            for before, now in zip(expected, self._pages(self.world.dst, DST_PAGES[name]), strict=True):
                assert np.array_equal(before, now), f"pages of '{name}' were written after they had been given back"

    def teardown(self) -> None:
        """Good weather and time enough: everything ends, exactly once, and every page comes back or is quarantined."""
        if not hasattr(self, "world"):
            return
        TRIED["machines"] += 1
        self.world.faults[-1] = Fault()
        sides = (self.world.src, self.world.dst) if self.is_source_there else (self.world.dst,)
        for seconds in (0.0, 61.0, 11.0, 0.0, 31.0, 31.0):
            self.world.wait(seconds, *sides)
            for _ in range(QUIET_TURNS):
                self.meet()
                self.world.fabric.step(20)
                for side in sides:
                    side.turn(1)
                self._collect()
                self.pages_given_back_are_left_alone()
        for name, life in self.lives.items():
            assert life.reading != "loading", f"load '{name}' never ended"
            assert life.source in ("absent", "granted"), f"lease '{name}' never ended"
        self.world.close()

    # The schedulers

    def _collect(self) -> None:
        if self.is_source_there:
            self._collect_from_source()
        for rank, endpoint in self.world.dst.endpoints.items():
            self._collect_from_reader(rank, endpoint.collect())
        for life in self.lives.values():
            if life.reading == "loading" and set(life.ended_ranks) == set(self.world.dst.endpoints):
                self._end(life)
            if life.reading == "quarantined" and not life.kept_ranks:
                life.reading = "idle"
                self._give_back(life.name)

    def _collect_from_source(self) -> None:
        for rank, endpoint in self.world.src.endpoints.items():
            for request in endpoint.collect().freed:
                life = next(life for life in self.lives.values() if life.source_id == request)
                assert life.source == "offered", f"freed while {life.source}"
                assert rank not in life.freed_ranks, "freed twice"
                life.freed_ranks.add(rank)
        for name, life in self.lives.items():
            if life.source == "offered" and life.freed_ranks == set(self.world.src.endpoints):
                life.source = "absent"
                self._scribble(self.world.src, SRC_PAGES[name])

    def _collect_from_reader(self, rank: int, results: Results) -> None:
        assert not set(results.received) & set(results.failed)
        loads = {life.load_id: life for life in self.lives.values()}
        for request in [*results.received, *results.failed]:
            life = loads[request]
            assert life.reading == "loading", f"ended while {life.reading}"
            assert rank not in life.ended_ranks, "ended twice"
            life.ended_ranks[rank] = failure = results.failed.get(request)
            if failure is not None and failure.is_quarantined:
                life.kept_ranks.add(rank)
        for request in results.settled:
            assert rank in loads[request].kept_ranks, "settled without having been given up"
            loads[request].kept_ranks.discard(rank)

    def _end(self, life: Life) -> None:
        """All ranks have said how it ended; vLLM serves it only if all went well."""
        TRIED["ended"] += 1
        failures = [failure for failure in life.ended_ranks.values() if failure is not None]
        if not failures:
            life.reading = "loaded"
            self._check(life)
        elif any(failure.is_quarantined for failure in failures):
            life.reading = "quarantined"
        else:
            life.reading = "idle"
            self._give_back(life.name)

    def _check(self, life: Life) -> None:
        side, pages = self.world.dst, DST_PAGES[life.name]
        for place, start, stop in _spans(side.layout, pages):
            wrong = np.flatnonzero(side.memory[place][start:stop] != life.expected[place][start:stop])
            assert not wrong.size, f"load '{life.name}' was served with {wrong.size} wrong bytes on rank {place[0]}"

    def _give_back(self, name: str) -> None:
        self._scribble(self.world.dst, DST_PAGES[name])
        self.sentinels[name] = [content.copy() for content in self._pages(self.world.dst, DST_PAGES[name])]

    def _scribble(self, side: Side, pages: list[int]) -> None:
        for content in self._pages(side, pages):
            content[:] = self.rng.integers(0, 256, content.size, dtype=np.uint8)

    @staticmethod
    def _pages(side: Side, pages: list[int]) -> Iterator[np.ndarray]:
        for place, start, stop in _spans(side.layout, pages):
            yield side.memory[place][start:stop]

    def _request(self, name: str) -> Request:
        src, dst = PageTable(SRC_PAGES[name], NUM_TOKENS), PageTable(DST_PAGES[name], NUM_TOKENS)
        return Request(
            {GROUP: src}, {GROUP: dst}, {GROUP: [(0, NUM_TOKENS)]}, {GROUP: np.array(DST_PAGES[name], np.int64)}
        )

    @staticmethod
    def _tell(side: Side, order: object) -> None:
        for endpoint in side.endpoints.values():
            endpoint.submit(order)


def _spans(layout: EngineLayout, pages: list[int]) -> Spans:
    """The bytes of these pages: ((rank, region), start, stop)."""
    return [
        ((rank.rank, slab.region), start, start + slab.page_bytes)
        for rank in layout.ranks
        for slab in rank.slabs
        for page in pages
        for start in [slab.offset_bytes + page * slab.page_stride_bytes]
    ]


@pytest.fixture(autouse=True)
def _tell(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """How much was tried, for `tests.reliability`; and that it was not nothing."""
    TRIED.clear()
    yield
    for name, count in TRIED.items():
        record_property(name, count)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=100)
