"""How does a rank get to know an engine that it reads from, once, in the background?

1. Ask the engine's listener for its card; it must be the incarnation that was named.
2. Compare facts, decode the layout, compile and prove this rank's route.
3. Make the source ranks that it reads from, or reports to, known to the transport.
4. Tell the other side how it went.

The outcome is a `Peer` or an error that names what differs; both are kept, an error for a while only, so that requests do not
ask again one by one. A life of an engine is one peer, at whatever address it was asked.

A peer is forgotten when a transfer with it has failed, when nothing was read from it for `peer_ttl_s`, and when it is doubted (a load did
not end in time, or another life of the engine has answered) and its listener is not there any more. One that is there is kept, since
other loads read from it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvreshard.model import EngineLayout, KvReshardError, LayoutMismatch
from kvreshard.plan.kept import Kept
from kvreshard.plan.route import Route, compile_route
from kvreshard.session import notes
from kvreshard.session.card import EngineCard, check_facts
from kvreshard.session.handshake import HandshakeError, fetch_card, tell_outcome
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.mover import Mover
from kvreshard.session.orders import EndpointOptions, RemoteEngine, RemoteLease
from kvreshard.session.pull import LeaseProof
from kvreshard.session.staging import Staging
from kvreshard.transport.base import Transport, TransportError
from kvreshard.transport.local import LocalMemory

logger = logging.getLogger(__name__)

# A meeting waits for its peer, which may not be there, and those of a fleet that is down must not keep others waiting. A thread is
# made when none is free; each holds some five file descriptors while it asks.
MAX_MEETINGS_AT_ONCE = 64
SWEEP_S = 60.0
MAX_REFUSED = 16
MAX_WARNED = 1000


@dataclass(frozen=True, eq=False)
class Peer:
    """A source engine that this rank can read from."""

    remote: RemoteEngine
    card: EngineCard
    layout: EngineLayout
    route: Route
    mover: Mover

    def lease_proof(self, lease: RemoteLease, scratch_address: int) -> LeaseProof:
        """Where the words of a lease stand. Raises LayoutMismatch for a slot that a source rank does not have."""
        addresses = {}
        for rank in self.route.src_ranks:
            card = self.card.rank_by_number[rank]
            if not 0 <= lease.slot < card.lease_slots:
                raise LayoutMismatch(
                    f"request '{lease.request}' of engine '{self.remote.engine}': lease slot {lease.slot}, but rank {rank} "
                    f"has {card.lease_slots}; were the kv_transfer_params changed on their way?"
                )
            addresses[rank] = card.lease_address + lease.slot * WORD_BYTES
        return LeaseProof(lease.word, addresses, scratch_address)

    @property
    def note_version(self) -> int:
        """The newest version of notes that both sides know."""
        return min(notes.VERSION, self.card.reads_notes)

    @property
    def told_ranks(self) -> tuple[int, ...]:
        """Source ranks that hear from this rank."""
        mine = self.route.dst_rank
        return tuple(rank for rank, reporters in self.route.reporters.items() if mine in reporters)


@dataclass(frozen=True)
class Self:
    """This rank: its engine's card and layout, its memory and what it moves bytes with.

    `refused`: cards of engines that could not be worked with, for the record of a failed load. `kept`: what the routes from all of
    its sources keep.
    """

    card: EngineCard
    layout: EngineLayout
    rank: int
    transport: Transport
    memory: LocalMemory
    staging: Staging | None
    refused: dict[RemoteEngine, EngineCard] = field(default_factory=dict, compare=False)
    kept: Kept = field(default_factory=Kept, compare=False)

    @property
    def name(self) -> tuple[str, str]:
        """The engine and its incarnation."""
        return self.card.engine, self.card.incarnation


class Peers:
    """The engines that this rank knows, or is getting to know. Used from one thread; meetings run on others."""

    def __init__(
        self,
        options: EndpointOptions,
        clock: Callable[[], float],
        wake: Callable[[], None],
        meet: Callable[[Self, RemoteEngine, EndpointOptions], Peer] | None = None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._wake = wake
        self._meet = meet or meet_engine
        self._known: dict[RemoteEngine, Future[Peer]] = {}
        self._failed_s: dict[RemoteEngine, float] = {}
        self._used_s: dict[RemoteEngine, float] = {}
        self._swept_s = clock()
        self._doubted: set[Peer] = set()
        self._followed: set[tuple[RemoteEngine, RemoteEngine]] = set()
        self._warned: set[tuple[str, str]] = set()
        self._gone: queue.SimpleQueue[tuple[Peer, bool]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(MAX_MEETINGS_AT_ONCE, thread_name_prefix="kvreshard-meet")

    @property
    def num_known(self) -> int:
        """Engines that are known, or were asked in vain not long ago."""
        return len(self._known)

    def get(self, me: Self, remote: RemoteEngine) -> Future[Peer]:
        """The peer, now or later; its exception says why there is none."""
        remote = self._as_known(remote)
        self._used_s[remote] = self._clock()
        found = self._known.get(remote)
        failed_s = self._failed_s.get(remote)
        if found is not None and (failed_s is None or self._clock() < failed_s + self._options.retry_s):
            if found.done() and found.exception() is None:
                self._doubt_former(me, remote)
            return found
        self._failed_s.pop(remote, None)
        future = self._pool.submit(self._meet, me, remote, self._options)
        self._known[remote] = future
        future.add_done_callback(lambda done: self._note(remote, done))
        return future

    def met(self, remote: RemoteEngine) -> Peer | None:
        """The peer if it is known already."""
        remote = self._as_known(remote)
        peer = self._find(remote)
        if peer is not None:
            self._used_s[remote] = self._clock()
        return peer

    def forget(self, remote: RemoteEngine, peer: Peer | None = None) -> None:
        """Drop a peer that has failed; the next request meets it anew. With `peer`, only if it is still that one.

        A meeting under way stays known: whoever forgot it could not disconnect what it will have connected, and the transport
        would refuse the same peer for ever after.
        """
        remote = self._as_known(remote)
        future = self._known.get(remote)
        if future is None or not future.done():
            return
        found = self._find(remote)
        if peer is not None and found is not peer:
            return
        del self._known[remote]
        self._failed_s.pop(remote, None)
        self._used_s.pop(remote, None)
        self._followed = {pair for pair in self._followed if remote not in pair}
        if found is not None:
            disconnect(found)

    def doubt(self, me: Self, peer: Peer) -> None:
        """Ask whether a peer is still there; one that is not is forgotten in a later `sweep`."""
        if peer in self._doubted:
            return
        self._doubted.add(peer)
        asked = self._pool.submit(fetch_life, me, peer.remote, self._options)
        asked.add_done_callback(lambda done: self._heard(peer, done))

    def sweep(self, in_use: Collection[Peer]) -> None:
        """Forget the peers that are gone, and now and then those that nobody has asked for in a long time, unless loads use them."""
        with contextlib.suppress(queue.Empty):
            while True:
                peer, is_there = self._gone.get_nowait()
                self._doubted.remove(peer)
                if not is_there:
                    logger.warning("engine %s is not there any more: its routes are dropped", peer.remote.engine)
                    self.forget(peer.remote, peer)
        now_s = self._clock()
        if now_s < self._swept_s + SWEEP_S:
            return
        self._swept_s = now_s
        for remote, used_s in list(self._used_s.items()):
            found = self._find(remote)
            kept_s = self._options.retry_s if found is None else self._options.peer_ttl_s
            if now_s >= used_s + kept_s and found not in in_use:
                self.forget(remote)

    def close(self) -> None:
        """Wait for meetings under way; the transport forgets the peers when it is closed."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _as_known(self, remote: RemoteEngine) -> RemoteEngine:
        """The reference under which this life of the engine was met: it may have been named by another address.

        One that is being met elsewhere is asked here all the same: that address may be wrong.
        """
        for known in self._known:
            if (known.engine, known.incarnation) == (remote.engine, remote.incarnation) and self._find(known):
                return known
        return remote

    def _doubt_former(self, me: Self, remote: RemoteEngine) -> None:
        """Other lives of an engine that has answered: most likely it has restarted, but two engines may have been given one name.

        Only once the new one has answered: a reference to a life that is gone, or that never was, must not end the routes of the
        one that is there.
        """
        for other in list(self._known):
            is_former = other.engine == remote.engine and other.incarnation != remote.incarnation
            peer = self._find(other) if is_former and (remote, other) not in self._followed else None
            if peer is not None:
                self._followed.add((remote, other))
                self.doubt(me, peer)

    def _find(self, remote: RemoteEngine) -> Peer | None:
        future = self._known.get(remote)
        return future.result() if future is not None and future.done() and future.exception() is None else None

    def _heard(self, peer: Peer, asked: Future[EngineCard]) -> None:
        if not asked.cancelled():
            self._gone.put((peer, asked.exception() is None))
            self._wake()

    def _note(self, remote: RemoteEngine, done: Future[Peer]) -> None:
        if not done.cancelled() and done.exception() is not None:
            self._failed_s[remote] = self._clock()
        elif not done.cancelled():
            self._warn(remote, done.result().route.warnings)
        self._wake()

    def _warn(self, remote: RemoteEngine, warnings: Sequence[str]) -> None:
        """Once per engine and warning, however often it is met anew."""
        for warning in warnings:
            if (remote.engine, warning) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((remote.engine, warning))
                logger.warning("engine %s: %s", remote.engine, warning)


def fetch_life(me: Self, remote: RemoteEngine, options: EndpointOptions) -> EngineCard:
    """The card of a life of an engine. Raises HandshakeError if it is not there, or another one is."""
    card = fetch_card(remote.address, me.card.engine, me.rank, options.handshake_timeout_s, options.keys)
    if (card.engine, card.incarnation) != (remote.engine, remote.incarnation):
        raise HandshakeError(
            f"at {remote.address} listens engine '{card.engine}', incarnation {card.incarnation[:12]}, not '{remote.engine}', "
            f"incarnation {remote.incarnation[:12]}: it has restarted, and what the request refers to is gone"
        )
    return card


def meet_engine(me: Self, remote: RemoteEngine, options: EndpointOptions) -> Peer:
    """Steps 1 to 4. Raises KvReshardError or TransportError."""
    card = fetch_life(me, remote, options)
    try:
        peer = _compare(me, remote, card, options)
    except (KvReshardError, TransportError) as error:
        if len(me.refused) >= MAX_REFUSED:
            me.refused.clear()
        me.refused[remote] = card
        logger.error("cannot read from engine %s at %s: %s", remote.engine, remote.address, error)
        _tell(me, remote, str(error), False, options)
        raise
    sentence = describe_route(peer.route)
    logger.info("engine %s at %s: %s", remote.engine, remote.address, sentence)
    _tell(me, remote, sentence, True, options)
    return peer


def disconnect(peer: Peer) -> None:
    """Make the transport forget a peer's ranks, and keep nothing of its route."""
    peer.route.drop_kept()
    for name in peer.mover.peers.values():
        with contextlib.suppress(TransportError):
            peer.mover.transport.remove_peer(name)


def describe_route(route: Route) -> str:
    """A route in a sentence, for a log."""
    ways = [lane.choice.way for lane in route.lanes if lane.choice is not None]
    shares: dict[int, int] = {}
    for lane in route.lanes:
        shares[lane.src_rank] = shares.get(lane.src_rank, 0) + len(lane.fields)
    told = ", ".join(f"rank {rank} ({count} fields)" for rank, count in sorted(shares.items()))
    staged = sum(way == "staged" for way in ways)
    return (
        f"rank {route.dst_rank} reads {told or 'nothing'} in {len(route.lanes)} lanes, {len(route.lanes) - staged} direct and "
        f"{staged} staged" + "".join(f"; {warning}" for warning in route.warnings)
    )


def _compare(me: Self, remote: RemoteEngine, card: EngineCard, options: EndpointOptions) -> Peer:
    check_facts(me.card, card, options.allow_mismatch)
    layout = card.decode_layout()
    route = compile_route(layout, me.layout, me.rank, cost=options.cost, kept=me.kept)
    needed = {*route.src_ranks, *(rank for rank, reporters in route.reporters.items() if me.rank in reporters)}
    names = {rank: f"{remote.engine}/{remote.incarnation}/{rank}" for rank in sorted(needed)}
    cards = card.rank_by_number
    try:
        me.transport.add_peers({name: cards[rank].metadata for rank, name in names.items()})
    except TransportError:
        route.drop_kept()
        raise
    return Peer(remote, card, layout, route, Mover(me.transport, me.memory, names, me.staging))


def _tell(me: Self, remote: RemoteEngine, text: str, is_good: bool, options: EndpointOptions) -> None:
    """A courtesy: whatever goes wrong with it, the meeting has ended as it has."""
    try:
        tell_outcome(remote.address, me.card.engine, me.rank, text, is_good, options.handshake_timeout_s, options.keys)
    except HandshakeError as error:
        logger.debug("engine %s was not told how the meeting went: %s", remote.engine, error)
    except Exception:
        logger.exception("engine %s was not told how the meeting went", remote.engine)
