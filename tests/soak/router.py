"""Who sends requests through the engines, and what becomes of each?

Keeps some requests on their way to every decode engine: a prefill engine of its model computes and offers, then the decode engine
loads, all of it or behind a prefix. An early request goes to both engines at once, and is loaded while it is computed. Some clients go away on
the way. A request ends exactly once, or is lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.soak.decode import Ended
from tests.soak.early import PREFILL_S, REASONS, EarlyOrder
from tests.soak.follow import FollowOrder
from tests.soak.members import Member
from tests.soak.prefill import Params
from tests.soak.shapes import MAX_TOKENS, sources_of
from tests.soak.stalls import Stalls, covered_s
from tests.soak.tally import Tally

from kvreshard.session.commands import EndpointOptions
from kvreshard.session.handshake_messages import Address

OPTIONS = EndpointOptions(
    handshake_timeout_s=2.0,
    load_timeout_s=4.0,
    settle_timeout_s=1.0,
    heartbeat_s=0.3,
    retry_s=0.2,
)
# A failed request has both bounds behind it; the rest is what a busy machine of two cores may be late.
SLACK_S = 3.0
BOUND_S = OPTIONS.load_timeout_s + OPTIONS.settle_timeout_s + SLACK_S
# An early load waits for its prefill.
EARLY_BOUND_S = PREFILL_S + BOUND_S
PER_READER = 4
EARLY_SHARE = 1 / 3
# Most requests have fewer.
USUAL_TOKENS = 200
LEASE_S = 3.0
NO_ROOM_S = 0.2
# What only a fault of the source, of the reader or of what lies between may bring about.
HARMED = {"transfer", "timeout", "handshake", "unheard"}
# The way to the prefill engine, back, and to the decode engine: no work of ours, but processes must get their turn.
ROUTE_S = 20.0


@dataclass
class Flight:
    """One request on its way. `lives`: which lives of source and reader it belongs to."""

    name: str
    source: Member
    reader: Member
    lives: tuple[int, int]
    made_s: float
    fate: str
    prefix: int
    ordered_s: float | None = None
    abort_s: float | None = None
    is_early: bool = False

    @property
    def bound_s(self) -> float:
        """How long it may take from the order to load."""
        return EARLY_BOUND_S if self.is_early else BOUND_S


@dataclass
class Router:
    """All requests of a soak. `stalls`: when the machine stood still."""

    members: Mapping[str, Member]
    rng: random.Random
    tally: Tally
    stalls: Stalls
    flights: dict[str, Flight] = field(default_factory=dict)
    _last_number: int = 0

    def launch(self, now_s: float) -> None:
        """New requests where there is room."""
        busy: dict[str, int] = {}
        for flight in self.flights.values():
            busy[flight.reader.shape.name] = busy.get(flight.reader.shape.name, 0) + 1
        for reader in self.members.values():
            if reader.shape.is_prefill or not reader.is_born or busy.get(reader.shape.name, 0) >= PER_READER:
                continue
            sources = [self.members[shape.name] for shape in sources_of(reader.shape)]
            sources = [source for source in sources if source.is_born and source.has_room_s <= now_s]
            if sources:
                launch = self._launch_early if self.rng.random() < EARLY_SHARE else self._launch
                launch(self.rng.choice(sources), reader, now_s)

    def _launch(self, source: Member, reader: Member, now_s: float) -> None:
        rng = self.rng
        fate = rng.choices(("whole", "prefix", "aborted", "released", "revoked", "short"), (45, 20, 13, 4, 4, 14))[0]
        flight, num_tokens, ttl_s = self._begin(source, reader, now_s, fate)
        source.say("prefill", flight.name, num_tokens, rng.getrandbits(32), ttl_s, fate == "revoked")

    def _launch_early(self, source: Member, reader: Member, now_s: float) -> None:
        rng = self.rng
        fate = rng.choices(("whole", "prefix", "aborted", "given up", "short"), (45, 20, 13, 10, 12))[0]
        flight, num_tokens, ttl_s = self._begin(source, reader, now_s, fate, 2 * USUAL_TOKENS)
        name, transfer, seed = flight.name, f"x-{flight.name}", rng.getrandbits(32)
        flight.is_early, flight.ordered_s = True, now_s
        num_preempts = rng.choices((0, 1, 2, 3), (55, 25, 12, 8))[0]
        compute = EarlyOrder(name, transfer, num_tokens, seed, ttl_s, num_preempts, fate == "given up")
        address = Address("127.0.0.1", source.port)
        follow = FollowOrder(name, transfer, address, num_tokens, seed, flight.prefix, rng.random() < 0.8)
        for member, *words in rng.sample([(source, "compute", compute), (reader, "follow", follow)], 2):
            member.say(*words)
        if fate == "aborted":
            flight.abort_s = now_s + rng.choice((0.0, 0.002, 0.02, 0.1))

    def _begin(
        self, source: Member, reader: Member, now_s: float, fate: str, usual_tokens: int = USUAL_TOKENS
    ) -> tuple[Flight, int, float]:
        """A new request, its tokens and how long it is kept."""
        rng, self.tally.started = self.rng, self.tally.started + 1
        num_tokens = rng.randrange(1, MAX_TOKENS) if rng.random() < 0.15 else rng.randrange(1, usual_tokens)
        ttl_s = rng.uniform(0.001, 0.040) if fate == "short" else LEASE_S
        self._last_number += 1
        name = f"r{self._last_number}"
        prefix = rng.randrange(num_tokens) if fate == "prefix" else 0
        flight = Flight(name, source, reader, (source.life, reader.life), now_s, fate, prefix)
        self.flights[name] = flight
        return flight, num_tokens, ttl_s

    def hear(self, member: Member, word: str, *parts: Any) -> None:
        """What an engine says of a request."""
        if word == "offered":
            self._offered(*parts)
        elif word == "ended":
            self._ended(member, *parts)

    def _offered(self, name: str, params: Params | None) -> None:
        flight = self.flights.get(name)
        if flight is None:  # its reader has died meanwhile
            return
        if params is None:
            if flight.fate == "revoked":
                self._close(flight, "revoked")
            else:  # no room: it has not begun
                self.tally.started -= 1
                del self.flights[name]
                flight.source.has_room_s = time.monotonic() + NO_ROOM_S
            return
        if flight.fate == "released":
            flight.reader.say("release", params)
            self._close(flight, "released")
            return
        flight.ordered_s = time.monotonic()
        flight.reader.say("load", name, params, flight.prefix, self.rng.random() < 0.8)
        if flight.fate == "aborted":
            flight.abort_s = flight.ordered_s + self.rng.choice((0.0, 0.002, 0.01, 0.05))

    def _ended(self, member: Member, ended: Ended) -> None:
        flight = self.flights.pop(ended.request, None)
        if flight is None:
            self.tally.complain(f"{member.shape.name}: request {ended.request} ended twice, or was never there")
            return
        now_s = time.monotonic()
        waits_for = (flight.reader, flight.source) if flight.is_early else (flight.reader,)
        since_s = now_s - ended.seconds - SLACK_S
        own_s = ended.seconds - self._stopped_s(waits_for, since_s, now_s)
        pair = f"{flight.source.shape.name} -> {flight.reader.shape.name}"
        self.tally.note_end(pair, ended, own_s, flight.bound_s)
        if ended.kind == "prefill" and not any(reason in ended.text for reason in REASONS):
            self.tally.complain(f"{pair}: request {ended.request} ended as no prefill does: {ended.text}")
        if ended.kind in HARMED and not self._was_harmed(flight, now_s):
            self.tally.note_innocent(pair, ended)

    def _stopped_s(self, members: Iterable[Member], first_s: float, last_s: float) -> float:
        """Seconds between two moments in which one of these was stopped, or the machine stood still."""
        stops = [interval for member in members for interval in member.stops_until(last_s)]
        return covered_s([*stops, *self.stalls.until(last_s)], first_s, last_s)

    def _was_harmed(self, flight: Flight, now_s: float) -> bool:
        """Whether a fault has touched the source or the reader since a while before the request was made."""
        since_s = flight.made_s - BOUND_S
        both = flight.source, flight.reader
        has_changed = any(member.last_change_s > since_s for member in both)
        return has_changed or self._stopped_s(both, since_s, now_s) > 0

    def _close(self, flight: Flight, kind: str) -> None:
        del self.flights[flight.name]
        self.tally.note_kind(kind)

    def abort(self, now_s: float) -> None:
        """The clients whose patience is over."""
        for flight in self.flights.values():
            if flight.abort_s is not None and now_s >= flight.abort_s:
                flight.abort_s = None
                flight.reader.say("abort", flight.name)

    def died(self, member: Member) -> None:
        """The requests that an engine takes with it; those that only read from it must end by themselves."""
        for flight in list(self.flights.values()):
            if flight.reader is member:
                self._close(flight, "reader died")
            elif flight.source is member and flight.ordered_s is None:
                self._close(flight, "source died")

    def lose(self, now_s: float) -> None:
        """Requests that have not ended within every bound."""
        for flight in list(self.flights.values()):
            stopped_s = self._stopped_s((flight.source, flight.reader), flight.made_s, now_s)
            if now_s - flight.made_s - stopped_s > flight.bound_s + ROUTE_S:
                self.tally.lost += 1
                stage = "loading" if flight.ordered_s is not None else "being computed"
                self.tally.complain(f"request {flight.name} ({flight.fate}) was lost while {stage}")
                del self.flights[flight.name]
