"""How does a rank get to know an engine that it reads from, once, in the background?

1. Ask the engine's listener for its engine metadata; it must be the instance id that was named.
2. Compare facts, decode the layout, compile and prove this rank's route.
3. Make the source ranks that it reads from, or reports to, known to the transport.
4. Tell the other side how it went. Nobody waits for that.

Step 1 is `handshake_client`'s: one thread for all engines. Steps 2 and 3 run on `NUM_WORKERS` threads, and only for engines that have
answered. An engine that nobody here wants any more before it has answered is not asked further (`cancel`). At most `MAX_PER_HOST` engines of
one host are asked at once, whether for a load or to give a lease back: whoever may send requests names hosts, and one that never answers must
not have all handshakes.

The outcome is a `Peer` or an error that names what differs; both are kept, an error for a while only, so that requests do not
ask again one by one. A life of an engine is one peer, at whatever address it was asked.

A peer is forgotten when a transfer with it has failed, when nothing was read from it for `peer_ttl_s`, and when it is doubted (a load did
not end in time, or another life of the engine has answered) and its listener is not there any more. One that is there is kept, since
other loads read from it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError

from kvreshard.model import KvReshardError
from kvreshard.model.logs import get_logger
from kvreshard.plan.route import Route, compile_route
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.engine_metadata import MAX_ENGINE_METADATA_BYTES, EngineMetadata, check_compatibility
from kvreshard.session.handshake_client import HandshakeClient, read_engine_metadata
from kvreshard.session.handshake_messages import MAX_MESSAGE_BYTES, HandshakeError, metadata_request, outcome_message
from kvreshard.session.mover import Mover
from kvreshard.session.peer import LocalRank, Peer, disconnect
from kvreshard.session.workers import Workers
from kvreshard.transport.base import TransportError

logger = get_logger(__name__)

# Compiling is all processor time: further threads only keep a source of a large layout from holding up the others.
NUM_WORKERS = 4
SWEEP_S = 60.0
MAX_REFUSED = 16
MAX_WARNED = 1000
# More than the engines of one machine that can start at one moment.
MAX_PER_HOST = 32


class Peers:
    """The engines that this rank knows, or is getting to know. Used from one thread; handshakes run on others.

    `connect`: steps 2 and 3, for an engine that has answered.
    """

    def __init__(
        self,
        options: EndpointOptions,
        clock: Callable[[], float],
        wake: Callable[[], None],
        connect: Callable[[LocalRank, RemoteEngine, EngineMetadata, EndpointOptions], Peer] | None = None,
    ) -> None:
        self._options = options
        self._clock = clock
        self._wake = wake
        self._connect = connect or connect_engine
        self._known: dict[RemoteEngine, Future[Peer]] = {}
        self._asked: dict[RemoteEngine, Future[bytes]] = {}
        self._num_of_host: Counter[str] = Counter()
        # Those that were met, by (engine, instance id) and by the engine's name. The lock is for both, and for the counts.
        self._lives: dict[tuple[str, str], RemoteEngine] = {}
        self._named: dict[str, frozenset[RemoteEngine]] = {}
        self._lock = threading.Lock()
        self._failed_s: dict[RemoteEngine, float] = {}
        self._used_s: dict[RemoteEngine, float] = {}
        self._swept_s = clock()
        self._doubted: set[Peer] = set()
        # Of a life that has answered, the former ones that were doubted for it.
        self._followed: dict[RemoteEngine, set[RemoteEngine]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._gone: queue.SimpleQueue[tuple[Peer, bool]] = queue.SimpleQueue()
        self._client = HandshakeClient()
        self._workers = Workers("kvreshard-compile", NUM_WORKERS)

    @property
    def num_known(self) -> int:
        """Engines that are known, or were asked in vain not long ago."""
        return len(self._known)

    @property
    def num_asking(self) -> int:
        """Engines that are being asked and have not answered."""
        return self._client.num_asking

    def get(self, me: LocalRank, remote: RemoteEngine) -> Future[Peer]:
        """The peer, now or later; its exception says why there is none."""
        remote = self._as_known(remote)
        self._used_s[remote] = self._clock()
        found = self._known.get(remote)
        failed_s = self._failed_s.get(remote)
        if found is not None and (failed_s is None or self._clock() < failed_s + self._options.retry_s):
            if self._find(remote) is not None:
                self._doubt_former(me, remote)
            return found
        self._failed_s.pop(remote, None)
        self._known[remote] = peer = Future[Peer]()
        host = remote.address.host
        if not self._count(host):
            text = f"{MAX_PER_HOST} other engines that were named at {host} have not answered; are they there?"
            self._end(remote, peer, HandshakeError(text))
            return peer
        self._asked[remote] = asked = self._ask_metadata(me, remote)
        asked.add_done_callback(lambda reply: self._on_reply(me, remote, reply, peer))
        return peer

    def met(self, remote: RemoteEngine) -> Peer | None:
        """The peer if it is known already."""
        remote = self._as_known(remote)
        peer = self._find(remote)
        if peer is not None:
            self._used_s[remote] = self._clock()
        return peer

    def cancel(self, remote: RemoteEngine) -> None:
        """Nobody here wants an engine any more: ask it no further. One that has answered is left as it is."""
        asked = self._asked.get(remote)
        if asked is not None and asked.cancel():
            self._drop(remote)

    def forget(self, remote: RemoteEngine, peer: Peer | None = None) -> None:
        """Drop a peer that has failed; the next request meets it anew. With `peer`, only if it is still that one.

        A handshake under way stays known: whoever forgot it could not disconnect what it will have connected, and the transport
        would refuse the same peer for ever after.
        """
        remote = self._as_known(remote)
        future = self._known.get(remote)
        if future is None or not future.done():
            return
        found = self._find(remote)
        if peer is not None and found is not peer:
            return
        self._drop(remote)
        if found is not None:
            disconnect(found)

    def doubt(self, me: LocalRank, peer: Peer) -> None:
        """Ask whether a peer is still there; one that is not is forgotten in a later `sweep`."""
        if peer in self._doubted:
            return
        self._doubted.add(peer)
        self._ask_metadata(me, peer.remote).add_done_callback(lambda reply: self._on_doubted(peer, reply))

    def sweep(self, in_use: Callable[[], Collection[Peer]]) -> None:
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
        self._swept_s, used = now_s, in_use()
        for remote, used_s in list(self._used_s.items()):
            found = self._find(remote)
            kept_s = self._options.retry_s if found is None else self._options.peer_ttl_s
            if now_s >= used_s + kept_s and found not in used:
                self.forget(remote)

    def close(self) -> None:
        """End all handshakes, and wait for none; the transport forgets the peers when it is closed."""
        self._workers.close()
        self._client.close()

    def _count(self, host: str) -> bool:
        """One more engine of a host is asked. False: it must not be, too many have not answered."""
        with self._lock:
            is_free = self._num_of_host[host] < MAX_PER_HOST
            self._num_of_host[host] += is_free
        return is_free

    def _discount(self, host: str) -> None:
        with self._lock:
            self._num_of_host[host] -= 1
            if not self._num_of_host[host]:
                del self._num_of_host[host]

    def _ask_metadata(self, me: LocalRank, remote: RemoteEngine) -> Future[bytes]:
        handshake_message, options = metadata_request(me.engine_metadata.engine, me.rank), self._options
        return self._client.ask(
            remote.address, handshake_message, options.handshake_timeout_s, MAX_ENGINE_METADATA_BYTES, options.keys
        )

    def _as_known(self, remote: RemoteEngine) -> RemoteEngine:
        """The reference under which this life of the engine was met: it may have been named by another address.

        One that is being met elsewhere is asked here all the same: that address may be wrong.
        """
        return self._lives.get((remote.engine, remote.instance_id), remote)

    def _doubt_former(self, me: LocalRank, remote: RemoteEngine) -> None:
        """Other lives of an engine that has answered: most likely it has restarted, but two engines may have been given one name.

        Only once the new one has answered: a reference to a life that is gone, or that never was, must not end the routes of the
        one that is there.
        """
        followed = self._followed.setdefault(remote, set())
        for other in self._named.get(remote.engine, frozenset()) - followed:
            peer = self._find(other) if other.instance_id != remote.instance_id else None
            if peer is not None:
                followed.add(other)
                self.doubt(me, peer)

    def _find(self, remote: RemoteEngine) -> Peer | None:
        future = self._known.get(remote)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def _drop(self, remote: RemoteEngine) -> None:
        """Keep nothing of a reference."""
        del self._known[remote]
        for times in (self._asked, self._failed_s, self._used_s, self._followed):
            times.pop(remote, None)
        with self._lock:
            if self._lives.get((remote.engine, remote.instance_id)) == remote:
                del self._lives[remote.engine, remote.instance_id]
            others = self._named.pop(remote.engine, frozenset()) - {remote}
            if others:
                self._named[remote.engine] = others
        for other in others:
            self._followed.get(other, set()).discard(remote)

    def _note_met(self, remote: RemoteEngine) -> None:
        with self._lock:
            self._lives[remote.engine, remote.instance_id] = remote
            self._named[remote.engine] = self._named.get(remote.engine, frozenset()) | {remote}

    # Below: on other threads.

    def _on_reply(self, me: LocalRank, remote: RemoteEngine, reply: Future[bytes], peer: Future[Peer]) -> None:
        """A listener has answered, or will not."""
        self._asked.pop(remote, None)
        self._discount(remote.address.host)
        if reply.cancelled():
            peer.cancel()
        elif (error := reply.exception()) is not None:
            self._end(remote, peer, error)
        elif not self._workers.submit(lambda: self._meet(me, remote, reply.result(), peer)):
            peer.cancel()

    def _meet(self, me: LocalRank, remote: RemoteEngine, reply: bytes, peer: Future[Peer]) -> None:
        """Steps 2 to 4."""
        try:
            engine_metadata = check_life(remote, read_engine_metadata(remote.address, reply))
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it
            self._end(remote, peer, error)
            return
        try:
            found = self._connect(me, remote, engine_metadata, self._options)
        except Exception as error:
            if len(me.refused) >= MAX_REFUSED:
                me.refused.clear()
            me.refused[remote] = engine_metadata
            is_fault = not isinstance(error, (KvReshardError, TransportError))
            logger.error(
                "cannot read from engine %s at %s: %s", remote.engine, remote.address, error, exc_info=is_fault
            )
            self._end(remote, peer, error)
            self._tell(me, remote, str(error), is_good=False)
            return
        sentence = describe_route(found.route)
        logger.info("engine %s at %s: %s", remote.engine, remote.address, sentence)
        self._note_met(remote)
        self._warn(remote, found.route.warnings)
        self._end(remote, peer, found)
        self._tell(me, remote, sentence, is_good=True)

    def _warn(self, remote: RemoteEngine, warnings: Sequence[str]) -> None:
        """Once per engine and warning, however often it is met anew."""
        for warning in warnings:
            if (remote.engine, warning) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((remote.engine, warning))
                logger.warning("engine %s: %s", remote.engine, warning)

    def _end(self, remote: RemoteEngine, peer: Future[Peer], outcome: Peer | BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Peer):
                peer.set_result(outcome)
            else:
                self._failed_s[remote] = self._clock()
                peer.set_exception(outcome)
        self._wake()

    def _tell(self, me: LocalRank, remote: RemoteEngine, text: str, *, is_good: bool) -> None:
        """A courtesy: whatever goes wrong with it, the handshake has ended as it has."""
        handshake_message, options = outcome_message(me.engine_metadata.engine, me.rank, text, is_good), self._options

        def told(answer: Future[bytes]) -> None:
            if not answer.cancelled() and answer.exception() is not None:
                logger.debug("engine %s was not told how the handshake went: %s", remote.engine, answer.exception())

        asked = self._client.ask(
            remote.address, handshake_message, options.handshake_timeout_s, MAX_MESSAGE_BYTES, options.keys
        )
        asked.add_done_callback(told)

    def _on_doubted(self, peer: Peer, reply: Future[bytes]) -> None:
        def hear() -> None:
            is_there = False
            with contextlib.suppress(Exception):  # whatever it is, it is no answer of that life
                check_life(peer.remote, read_engine_metadata(peer.remote.address, reply.result()))
                is_there = True
            self._gone.put((peer, is_there))
            self._wake()

        if not reply.cancelled():
            self._workers.submit(hear)


def check_life(remote: RemoteEngine, engine_metadata: EngineMetadata) -> EngineMetadata:
    """The engine metadata, of the life that was named. Raises HandshakeError for another."""
    if (engine_metadata.engine, engine_metadata.instance_id) != (remote.engine, remote.instance_id):
        raise HandshakeError(
            f"at {remote.address} listens engine '{engine_metadata.engine}', instance id {engine_metadata.instance_id[:12]}, not '{remote.engine}', "
            f"instance id {remote.instance_id[:12]}: it has restarted, and what the request refers to is gone"
        )
    return engine_metadata


def describe_route(route: Route) -> str:
    """A route in a sentence, for a log."""
    ways = [transfer.choice.way for transfer in route.transfers if transfer.choice is not None]
    shares: dict[int, int] = {}
    for transfer in route.transfers:
        shares[transfer.src_rank] = shares.get(transfer.src_rank, 0) + len(transfer.fields)
    told = ", ".join(f"rank {rank} ({count} fields)" for rank, count in sorted(shares.items()))
    staged = sum(way == "staged" for way in ways)
    return (
        f"rank {route.dst_rank} reads {told or 'nothing'} in {len(route.transfers)} transfers, {len(route.transfers) - staged} direct and "
        f"{staged} staged" + "".join(f"; {warning}" for warning in route.warnings)
    )


def connect_engine(
    me: LocalRank, remote: RemoteEngine, engine_metadata: EngineMetadata, options: EndpointOptions
) -> Peer:
    """Steps 2 and 3. Raises KvReshardError or TransportError."""
    check_compatibility(me.engine_metadata, engine_metadata, options.allow_mismatch)
    layout = engine_metadata.decode_layout()
    route = compile_route(layout, me.layout, me.rank, cost=options.cost, pattern_cache=me.pattern_cache)
    needed = {*route.src_ranks, *(rank for rank, reporters in route.reporters.items() if me.rank in reporters)}
    names = {rank: f"{remote.engine}/{remote.instance_id}/{rank}" for rank in sorted(needed)}
    metadata_by_rank = engine_metadata.rank_by_number
    try:
        me.transport.add_peers({name: metadata_by_rank[rank].metadata for rank, name in names.items()})
    except TransportError:
        route.drop_patterns()
        raise
    return Peer(remote, engine_metadata, layout, route, Mover(me.transport, me.memory, names, me.staging))
