"""The engines that a rank reads from: each is met once, in the background.

1. Request the engine's metadata from its listener (`handshake_client`, one thread for all engines).
2. Compare, compile and prove the route, connect (`connect_engine`, on `NUM_WORKERS` threads).
3. Report the outcome to the other side. Nobody waits for that.

The outcome is a `Peer` or an error. Both are kept, an error for `retry_s`, so that requests do not ask one by one. An instance of an engine is
one peer, whatever addresses it is asked at. At most `MAX_PER_HOST` engines of one host are asked at once: whoever may send requests names
hosts, and one that never answers must not take all handshakes.

A peer is forgotten when nothing was read from it for `peer_ttl_s`, and when it does not answer any more after a load from it did not end in
time, or another instance of the engine was met. One that answers is kept: other loads read from it. One with which a transfer has failed is
met anew (`retire`), once the other loads that read from it have ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from kvreshard.model import KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.engine_metadata import MAX_ENGINE_METADATA_BYTES, EngineMetadata
from kvreshard.session.handshake_client import HandshakeClient, read_engine_metadata
from kvreshard.session.handshake_messages import MAX_MESSAGE_BYTES, HandshakeError, metadata_request, outcome_message
from kvreshard.session.peer import LocalRank, Peer, check_instance, connect_engine, describe_route, disconnect
from kvreshard.session.workers import Workers
from kvreshard.transport.base import TransportError

logger = get_logger(__name__)

# Compiling takes processor time only: further threads keep a large layout from holding up the others.
NUM_WORKERS = 4
SWEEP_S = 60.0
MAX_REFUSED = 16
MAX_WARNED = 1000
# More than the engines of one machine that can start at one moment.
MAX_PER_HOST = 32
# Longer than most loads take. If the connection is broken, the others will not end by themselves.
RETIRE_S = 10.0


@dataclass(slots=True, eq=False)
class _PeerEntry:
    """An engine that is met, is being met, or could not be met.

    `began_s`: when it was first asked. `reply`: of its listener, until that has answered. `failed_s`: when it could not be met. `is_other_address`:
    the instance was met at another address, and this is its second name. `checked`: other instances of the engine that were asked whether they
    are still there, since this one has answered.
    """

    used_s: float
    began_s: float
    peer: Future[Peer] = field(default_factory=Future)
    reply: Future[bytes] | None = None
    failed_s: float | None = None
    is_other_address: bool = False
    checked: set[RemoteEngine] = field(default_factory=set)

    @property
    def found(self) -> Peer | None:
        """The peer if it is met under this reference."""
        is_met = self.peer.done() and not self.peer.cancelled() and self.peer.exception() is None
        return self.peer.result() if is_met and not self.is_other_address else None


@dataclass(slots=True)
class _RetiredPeer:
    """A peer that is met anew when its loads have ended, or at `until_s`. `waiting`: who wants it then."""

    peer: Peer
    until_s: float
    waiting: list[tuple[LocalRank, RemoteEngine, _PeerEntry]] = field(default_factory=list)


class Peers:
    """The engines that this rank has met or is meeting. Used from one thread; handshakes run on others.

    `connect`: `connect_engine`, or what a test has instead. `on_handshake`: called, on any thread, when one has ended, with its seconds and
    whether the engine was met.
    """

    def __init__(
        self,
        options: EndpointOptions,
        clock: Callable[[], float],
        wake: Callable[[], None],
        connect: Callable[[LocalRank, RemoteEngine, EngineMetadata, EndpointOptions], Peer] = connect_engine,
        on_handshake: Callable[[float, bool], None] = lambda seconds, is_met: None,
    ) -> None:
        self._options, self._clock, self._wake, self._connect = options, clock, wake, connect
        self._on_handshake = on_handshake
        self._known: dict[RemoteEngine, _PeerEntry] = {}
        self._retired: dict[tuple[str, str], _RetiredPeer] = {}
        # Those that are met, by engine and instance id; and those that are being connected to. The lock is for them and for `_num_of_host`.
        self._met: dict[str, dict[str, RemoteEngine]] = {}
        self._connecting: dict[tuple[str, str], _PeerEntry] = {}
        self._num_of_host: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._swept_s = clock()
        self._checking: set[Peer] = set()
        self._checked: queue.SimpleQueue[tuple[Peer, bool]] = queue.SimpleQueue()
        self._warned: set[tuple[str, str]] = set()
        self._client = HandshakeClient()
        self._workers = Workers("kvreshard-compile", NUM_WORKERS)

    def get(self, me: LocalRank, remote: RemoteEngine) -> Future[Peer]:
        """The peer, now or later; its exception says why there is none."""
        remote = self._canonical(remote)
        now_s = self._clock()
        known = self._known.get(remote)
        is_second_name = (
            known is not None and known.is_other_address and known.peer.done()
        )  # of one that is not met any more
        if (
            known is not None
            and not is_second_name
            and (known.failed_s is None or now_s < known.failed_s + self._options.retry_s)
        ):
            known.used_s = now_s
            if known.found is not None:
                self._check_others(me, remote, known)
            return known.peer
        known = self._known[remote] = _PeerEntry(now_s, now_s)
        if remote.name in self._retired:
            self._retired[remote.name].waiting.append((me, remote, known))
        else:
            self._ask(me, remote, known)
        return known.peer

    def _ask(self, me: LocalRank, remote: RemoteEngine, known: _PeerEntry) -> None:
        host = remote.address.host
        if not self._count(host):
            text = f"{MAX_PER_HOST} other engines that were named at {host} have not answered; are they there?"
            self._end(known, HandshakeError(text))
            return
        known.reply = reply = self._request_metadata(me, remote)
        reply.add_done_callback(lambda reply: self._on_reply(me, remote, reply, known))

    def met(self, remote: RemoteEngine) -> Peer | None:
        """The peer if it is met."""
        known = self._known.get(self._canonical(remote))
        found = None if known is None else known.found
        if known is not None and found is not None:
            known.used_s = self._clock()
        return found

    @property
    def num_met(self) -> int:
        """Instances of engines that are met, and not dropped since."""
        with self._lock:
            return sum(map(len, self._met.values()))

    def cancel(self, remote: RemoteEngine) -> None:
        """Stop asking an engine that nobody wants any more. One that has answered stays."""
        known = self._known.get(remote)
        reply = None if known is None else known.reply  # looked at once: the answer comes on another thread
        if reply is not None and reply.cancel():
            self._drop(remote)

    def forget(self, peer: Peer) -> None:
        """Drop a peer that is gone; the next request meets it anew."""
        remote = self._canonical(peer.remote)
        known = self._known.get(remote)
        if known is not None and known.found is peer:
            self._forget(remote, known)

    def retire(self, peer: Peer) -> None:
        """Meet a peer anew with which a transfer has failed. A later `sweep` disconnects it, when no other load reads from it any more."""
        remote = self._canonical(peer.remote)
        known = self._known.get(remote)
        if known is not None and known.found is peer:
            self._drop(remote)
            self._retired[remote.name] = _RetiredPeer(peer, self._clock() + RETIRE_S)

    def check(self, me: LocalRank, peer: Peer) -> None:
        """Ask whether a peer is still there; a later `sweep` forgets one that is not."""
        if peer not in self._checking:
            self._checking.add(peer)
            self._request_metadata(me, peer.remote).add_done_callback(lambda reply: self._on_check(peer, reply))

    def sweep(self, in_use: Callable[[], Collection[Peer]]) -> None:
        """Forget the peers that are gone, and now and then those that nobody has used for a long time, unless loads use them."""
        with contextlib.suppress(queue.Empty):
            while True:
                peer, is_there = self._checked.get_nowait()
                self._checking.remove(peer)
                if not is_there:
                    logger.warning(
                        "%s is gone or was started again: its next request meets it anew",
                        peer.remote,
                        extra=fields("peer_gone", **peer.remote.log_fields),
                    )
                    self.forget(peer)
        now_s = self._clock()
        if not self._retired and now_s < self._swept_s + SWEEP_S:
            return
        used = in_use()
        for name, retired in list(self._retired.items()):
            if retired.peer not in used or now_s >= retired.until_s:
                del self._retired[name]
                disconnect(retired.peer)
                for me, remote, known in retired.waiting:
                    self._ask(me, remote, known)
        if now_s < self._swept_s + SWEEP_S:
            return
        self._swept_s = now_s
        for remote, known in list(self._known.items()):
            found = known.found
            kept_s = self._options.retry_s if found is None else self._options.peer_ttl_s
            if now_s >= known.used_s + kept_s and found not in used:
                self._forget(remote, known)

    def close(self) -> None:
        """End all handshakes without waiting; the transport forgets the peers when it is closed."""
        self._workers.close()
        self._client.close()

    def _count(self, host: str) -> bool:
        """Count one more engine of a host that is asked; False if there are too many."""
        with self._lock:
            is_free = self._num_of_host[host] < MAX_PER_HOST
            self._num_of_host[host] += is_free
        return is_free

    def _discount(self, host: str) -> None:
        with self._lock:
            self._num_of_host[host] -= 1
            if not self._num_of_host[host]:
                del self._num_of_host[host]

    def _send(self, remote: RemoteEngine, message: bytes, max_bytes: int) -> Future[bytes]:
        options = self._options
        return self._client.ask(remote.address, message, options.handshake_timeout_s, max_bytes, options.keys)

    def _request_metadata(self, me: LocalRank, remote: RemoteEngine) -> Future[bytes]:
        return self._send(remote, metadata_request(me.engine_metadata.engine, me.rank), MAX_ENGINE_METADATA_BYTES)

    def _canonical(self, remote: RemoteEngine) -> RemoteEngine:
        """The reference under which this instance was met; it may have another address.

        An instance that is being met at one address is asked at another all the same: the first may be wrong.
        """
        return self._met.get(remote.engine, {}).get(remote.instance_id, remote)

    def _check_others(self, me: LocalRank, remote: RemoteEngine, known: _PeerEntry) -> None:
        """Ask the other instances of an engine that has answered whether they are still there, once each.

        Most likely it has restarted, but two engines may have been given one name. Only after the new one has answered: a reference to an
        instance that never was must not end the routes of the one that is there.
        """
        for other in list(self._met.get(remote.engine, {}).values()):
            found = self._known[other].found if other != remote and other not in known.checked else None
            if found is not None:
                known.checked.add(other)
                self.check(me, found)

    def _forget(self, remote: RemoteEngine, known: _PeerEntry) -> None:
        """Drop what is known under exactly this reference: the same instance may have been met at another address.

        A handshake under way stays known: the transport must not keep a peer that nothing here knows.
        """
        if known.peer.done():
            found = known.found
            self._drop(remote)
            if found is not None:
                disconnect(found)

    def _drop(self, remote: RemoteEngine) -> None:
        """Remove a reference."""
        known = self._known.pop(remote)
        with self._lock:
            if self._connecting.get(remote.name) is known:
                del self._connecting[remote.name]
            instances = self._met.get(remote.engine, {})
            if instances.get(remote.instance_id) == remote:
                del instances[remote.instance_id]
            if not instances:
                self._met.pop(remote.engine, None)

    # Below: on other threads.

    def _on_reply(self, me: LocalRank, remote: RemoteEngine, reply: Future[bytes], known: _PeerEntry) -> None:
        known.reply = None
        self._discount(remote.address.host)
        if reply.cancelled():
            known.peer.cancel()
        elif (error := reply.exception()) is not None:
            self._end(known, error)
        elif not self._workers.submit(lambda: self._meet(me, remote, reply.result(), known)):
            self._end(known, HandshakeError("no new thread can be started here to meet it; let this process have more"))

    def _meet(self, me: LocalRank, remote: RemoteEngine, reply: bytes, known: _PeerEntry) -> None:
        """Steps 2 and 3."""
        try:
            engine_metadata = read_engine_metadata(remote.address, reply)
            check_instance(remote, engine_metadata)
        except Exception as error:  # noqa: BLE001  whoever waits must get it
            self._end(known, error)
            return
        with self._lock:
            first = self._connecting.setdefault(remote.name, known)
        if first is not known:
            known.is_other_address = True
            first.peer.add_done_callback(lambda peer: self._end(known, peer.exception() or peer.result()))
            return
        try:
            found = self._connect(me, remote, engine_metadata, self._options)
        except Exception as error:
            with self._lock:
                self._connecting.pop(remote.name, None)
            if len(me.refused) >= MAX_REFUSED:
                me.refused.clear()
            me.refused[remote] = engine_metadata
            is_fault = not isinstance(error, (KvReshardError, TransportError))
            if is_fault:
                logger.error("%s", remote, exc_info=error, extra=fields("internal_error", **remote.log_fields))
            self._end(known, error)
            self._send_outcome(me, remote, str(error), is_good=False)
            return
        sentence = describe_route(found.route)
        # Ranks of an engine have routes alike: one of them is enough for the log.
        logger.log(
            logging.INFO if me.is_first else logging.DEBUG,
            "%s: %s",
            *(remote, sentence),
            extra=fields("peer_met", **remote.log_fields),
        )
        self._note_met(remote)
        self._warn(me, remote, found.route.warnings)
        self._end(known, found)
        self._send_outcome(me, remote, sentence, is_good=True)

    def _note_met(self, remote: RemoteEngine) -> None:
        with self._lock:
            self._met.setdefault(remote.engine, {})[remote.instance_id] = remote

    def _warn(self, me: LocalRank, remote: RemoteEngine, warnings: Sequence[str]) -> None:
        """Once per engine and warning, however often the engine is met, and by one rank: all of them have the same."""
        if not me.is_first:
            return
        for warning in warnings:
            if (remote.engine, warning) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((remote.engine, warning))
                logger.warning("%s: %s", remote, warning, extra=fields("peer_warning", **remote.log_fields))

    def _end(self, known: _PeerEntry, outcome: Peer | BaseException) -> None:
        self._on_handshake(self._clock() - known.began_s, isinstance(outcome, Peer))
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Peer):
                known.peer.set_result(outcome)
            else:
                known.failed_s = self._clock()
                known.peer.set_exception(outcome)
        self._wake()

    def _send_outcome(self, me: LocalRank, remote: RemoteEngine, text: str, *, is_good: bool) -> None:
        """A courtesy: whatever goes wrong with it, the handshake has ended."""

        def note(answer: Future[bytes]) -> None:
            if not answer.cancelled() and answer.exception() is not None:
                logger.debug("%s did not get the outcome of the handshake: %s", remote, answer.exception())

        message = outcome_message(me.engine_metadata.engine, me.rank, text, is_good)
        self._send(remote, message, MAX_MESSAGE_BYTES).add_done_callback(note)

    def _on_check(self, peer: Peer, reply: Future[bytes]) -> None:
        def note() -> None:
            is_there = False
            with contextlib.suppress(Exception):  # whatever it is, it is no answer of that instance
                check_instance(peer.remote, read_engine_metadata(peer.remote.address, reply.result()))
                is_there = True
            self._checked.put((peer, is_there))
            self._wake()

        if reply.cancelled() or not self._workers.submit(note):
            self._checked.put((peer, True))  # nothing was found out
