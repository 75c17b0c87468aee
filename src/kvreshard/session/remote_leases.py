"""The leases of other engines that this rank wants: their renewal, their release, and the keys of their sources.

1. A request wants a lease while it waits for its load (`start_renewing`), while it is loaded (`begin`), and afterwards if the load does not
   release its source itself (`end`).
2. `renew` sends heartbeats for the leases of requests that wait or are loaded. How often is up to the source: `RENEWALS_PER_LEASE` times in
   the lifetime that its engine metadata states, for all of its leases at once, and at once when the source has just been met. A source
   that has not been met is tried every `usual_s`.
3. A lease that no request wants is released: this rank reports to the source ranks that the route names, at once if the source is met, else
   when it is (`update`), or not at all if that takes longer than `RELEASE_PATIENCE_S`. A source that was met and cannot be read from gets
   reports too.
4. A source that nothing is wanted of and that has not answered is not asked further.
5. The key of a source, or why it could not be met, is a result of each request that asks for it.

The bookkeeping is by source and lease: an event costs the same however many leases there are. Nothing here waits. A source that cannot be
notified is a line in the log; its lease expires.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import queue
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.session.commands import Load, Release, RemoteEngine, Renew
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.job import to_failure
from kvreshard.session.lease import RENEWALS_PER_LEASE, Lease
from kvreshard.session.notes import VERSION, Report, heartbeats, write_note
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.peers import Peers
from kvreshard.session.results import ResultQueue
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)

# A source that runs answers in less. Releasing early is a courtesy: the lease expires anyway.
RELEASE_PATIENCE_S = 5.0
# Engine metadata must not make a reader busy: leases of less than a second are not published (`vllm.options`).
MIN_INTERVAL_S = 0.1
# Sources that this rank cannot read from and is connected to at one time.
MAX_REFUSED = 16


@dataclass(slots=True)
class _Source:
    """What is wanted of one source, by lease.

    `waiting`: requests. `loading`: number of loads. `loaded`: leases that were read and are not released, by the lease that their release names:
    another one if their prefill has begun again. `releases`: leases to release when the source is met. `key_requests`: requests that wait for
    its key. `handshake`: the latest, whose end is reported to `_answered`. `has_answer`: it has ended, and nobody has looked at it.
    """

    waiting: dict[Lease, set[str]] = field(default_factory=dict)
    loaded: dict[Lease, set[Lease]] = field(default_factory=dict)
    loading: Counter[Lease] = field(default_factory=Counter)
    releases: dict[Lease, None] = field(default_factory=dict)
    key_requests: set[str] = field(default_factory=set)
    handshake: Future[Peer] | None = None
    has_answer: bool = False

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting or self.loaded or self.loading)

    @property
    def is_unanswered(self) -> bool:
        return self.handshake is not None and not self.handshake.done()


class RemoteLeases:
    """Of one rank. Used from the session's thread only. `results`: gets the keys. `usual_s`: between two attempts to meet a source."""

    def __init__(self, transport: Transport, peers: Peers, results: ResultQueue, usual_s: float) -> None:
        self._transport, self._peers, self._results, self._usual_s = transport, peers, results, usual_s
        self._sources: dict[RemoteEngine, _Source] = {}
        self._waiting: dict[str, tuple[RemoteEngine, Lease]] = {}
        # Sources to look at in the next `update`, and those whose handshake has ended, put in by other threads.
        self._changed: dict[RemoteEngine, None] = {}
        self._answered: queue.SimpleQueue[RemoteEngine] = queue.SimpleQueue()
        self._patience: deque[tuple[float, RemoteEngine]] = deque()
        # When each source is renewed next. A source keeps its time although nothing is wanted of it until then: its next request waits for
        # that time. In `_renewed`: those that got heartbeats when that time was set.
        self._renew_at_s: dict[RemoteEngine, float] = {}
        # (time, number, source): those times, and former ones, which are passed over.
        self._renewal_heap: list[tuple[float, int, RemoteEngine]] = []
        self._numbers = itertools.count()
        self._repeats = Repeats(logger)
        self._renewed: set[RemoteEngine] = set()
        # Ranks of sources that this rank cannot read from, added to the transport for reports; the latest last.
        self._refused: dict[tuple[str, str], list[str]] = {}

    def start_renewing(self, command: Renew, me: LocalRank | None) -> None:
        """Meet the source, and renew its lease until the request is loaded, or `stop_renewing`."""
        self.stop_renewing(command.request)
        source = self._source(command.remote)
        self._waiting[command.request] = command.remote, command.lease
        source.waiting.setdefault(command.lease, set()).add(command.request)
        if command.asks_key:
            source.key_requests.add(command.request)
        self._expect_renewal(command.remote)
        self._changed[command.remote] = None
        if me is not None:
            self._ask(me, command.remote, source)

    def stop_renewing(self, request: str) -> None:
        """Renew no longer."""
        found = self._waiting.pop(request, None)
        if found is not None:
            remote, lease = found
            self._sources[remote].key_requests.discard(request)
            waiting = self._sources[remote].waiting
            waiting[lease].discard(request)
            if not waiting[lease]:
                del waiting[lease]
            self._changed[remote] = None

    def begin(self, load: Load) -> None:
        """A load has begun. It must `end`."""
        self._source(load.remote).loading[load.lease] += 1

    def change(self, old: Load, new: Load) -> None:
        """A load that has begun goes on under another lease, since its prefill has begun again. It must end under that one."""
        source = self._source(old.remote)
        source.loading[old.lease] -= 1
        if not source.loading[old.lease]:
            del source.loading[old.lease]
        self.begin(new)
        if new.request in self._waiting:
            self.start_renewing(Renew(new.request, new.remote, new.lease), None)

    def end(self, me: LocalRank, load: Load, peer: Peer | None, *, is_good: bool, kept_as: Lease | None) -> None:
        """A load has ended. `kept_as`: the lease that a later release of its source names. `peer` is None if it was not met."""
        source = self._source(load.remote)
        source.loading[load.lease] -= 1
        if not source.loading[load.lease]:
            del source.loading[load.lease]
        if kept_as is not None:
            source.loaded.setdefault(kept_as, set()).add(load.lease)
            self._expect_renewal(load.remote)
        self.stop_renewing(load.request)
        if kept_as is not None:
            return
        if peer is None:  # stopped before its source was met: report when it is
            self._release(load.remote, load.lease)
        elif not self._is_wanted(load.remote, load.lease):
            self._report(me, peer, load.lease, is_good)
        self._changed[load.remote] = None

    def release(self, release: Release) -> None:
        """No request that has been loaded wants the lease any more."""
        source = self._source(release.remote)
        for lease in source.loaded.pop(release.lease, {release.lease}):
            self._release(release.remote, lease)

    def update(self, me: LocalRank | None, now_s: float) -> None:
        """Act on handshakes that have ended and on sources whose wants have changed; without `me`, later."""
        if me is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                remote = self._answered.get_nowait()
                self._changed[remote] = None
                if remote in self._sources:
                    self._sources[remote].has_answer = True
                if self._peers.met(remote) is not None and remote in self._renew_at_s and remote not in self._renewed:
                    self._set_renewal(remote, -math.inf)
        while self._patience and now_s >= self._patience[0][0]:
            remote = self._patience.popleft()[1]
            source = self._sources.get(remote)
            if source is not None and source.is_unanswered and not source.is_wanted:
                source.releases.clear()
                self._changed[remote] = None
        changed, self._changed = self._changed, {}
        for remote in changed:
            source = self._sources.get(remote)
            if source is not None:
                self._update_source(me, remote, source, now_s)

    def renew(self, me: LocalRank, now_s: float) -> float:
        """Send the heartbeats that are due; seconds until the next."""
        self._repeats.flush()
        due: list[RemoteEngine] = []
        while self._next_renewal_s() <= now_s:
            due.append(heapq.heappop(self._renewal_heap)[2])
            del self._renew_at_s[due[-1]]
            self._renewed.discard(due[-1])
        for remote in due:
            source = self._sources.get(remote)
            if source is not None and (source.waiting or source.loaded):
                self._renew_source(me, remote, source, now_s)
        return max(0.0, self._next_renewal_s() - now_s)

    def _expect_renewal(self, remote: RemoteEngine) -> None:
        if remote not in self._renew_at_s:
            self._set_renewal(remote, -math.inf)

    def _set_renewal(self, remote: RemoteEngine, at_s: float) -> None:
        self._renew_at_s[remote] = at_s
        heapq.heappush(self._renewal_heap, (at_s, next(self._numbers), remote))

    def _next_renewal_s(self) -> float:
        while self._renewal_heap and self._renew_at_s.get(self._renewal_heap[0][2]) != self._renewal_heap[0][0]:
            heapq.heappop(self._renewal_heap)
        return self._renewal_heap[0][0] if self._renewal_heap else math.inf

    def _renew_source(self, me: LocalRank, remote: RemoteEngine, source: _Source, now_s: float) -> None:
        peer = self._peers.met(remote)
        if peer is None:
            self._set_renewal(remote, now_s + self._usual_s)
            self._ask(me, remote, source)
            return
        self._set_renewal(remote, now_s + max(MIN_INTERVAL_S, peer.engine_metadata.lease_s / RENEWALS_PER_LEASE))
        self._renewed.add(remote)
        leases = dict.fromkeys(
            (lease.request, lease.word) for lease in (*source.waiting, *itertools.chain(*source.loaded.values()))
        )
        for note in heartbeats(me.engine_metadata.engine, leases):
            payload = write_note(note)
            for rank in peer.notified_ranks:
                self._notify(peer, rank, payload)

    def _source(self, remote: RemoteEngine) -> _Source:
        return self._sources.setdefault(remote, _Source())

    def _ask(self, me: LocalRank, remote: RemoteEngine, source: _Source) -> Future[Peer]:
        """The handshake with a source. Its end is reported to `_answered` once."""
        handshake = self._peers.get(me, remote)
        if handshake is not source.handshake:
            source.handshake = handshake
            handshake.add_done_callback(lambda _: self._answered.put(remote))
        return handshake

    def _update_source(self, me: LocalRank, remote: RemoteEngine, source: _Source, now_s: float) -> None:
        """Ask a source that is wanted; of one that has answered, note its key and release its leases; forget one that is not wanted."""
        if source.is_wanted or source.releases:
            # A handshake that has just failed is the answer; to ask anew, which `retry_s` may allow at once, would go on for ever. A peer that was
            # met may be disconnected meanwhile.
            handshake, has_answer, source.has_answer = source.handshake, source.has_answer, False
            if handshake is None or not (has_answer and _has_failed(handshake)):
                handshake = self._ask(me, remote, source)
            if handshake.done():
                self._note_key(source, handshake)
                self._send_releases(me, remote, source, handshake)
            elif source.releases:
                self._patience.append((now_s + RELEASE_PATIENCE_S, remote))
        if not (source.is_wanted or source.releases):
            del self._sources[remote]
            self._peers.cancel(remote)

    def _note_key(self, source: _Source, handshake: Future[Peer]) -> None:
        if handshake.cancelled():
            return
        requests, source.key_requests = source.key_requests, set()
        error = handshake.exception()
        if error is None:
            self._results.meet(dict.fromkeys(requests, handshake.result().engine_metadata.key), {})
        else:
            self._results.meet({}, dict.fromkeys(requests, to_failure(error)))

    def _send_releases(self, me: LocalRank, remote: RemoteEngine, source: _Source, handshake: Future[Peer]) -> None:
        """Report the leases that are not wanted any more. The route of a peer says who reports to whom."""
        releases, source.releases = source.releases, {}
        if handshake.cancelled():
            return
        error, refused = handshake.exception(), me.refused.get(remote)
        for lease in releases:
            if error is None:
                self._report(me, handshake.result(), lease, is_good=True)
            elif refused is not None and not isinstance(error, TransportError):
                self._report_refused(me, refused, lease)

    def _release(self, remote: RemoteEngine, lease: Lease) -> None:
        if not self._is_wanted(remote, lease):
            self._source(remote).releases[lease] = None
            self._changed[remote] = None

    def _is_wanted(self, remote: RemoteEngine, lease: Lease) -> bool:
        """Whether another request of this engine (another choice) reads from this lease, and will report at its end."""
        source = self._sources.get(remote)
        return source is not None and (lease in source.loading or lease in source.waiting)

    def _report(self, me: LocalRank, peer: Peer, lease: Lease, is_good: bool) -> None:
        consumer, reporters = "/".join(me.name), peer.route.reporters
        for rank in peer.notified_ranks:
            report = Report(VERSION, consumer, lease.request, lease.word, me.rank, reporters[rank], is_good)
            self._notify(peer, rank, write_note(report))

    def _report_refused(self, me: LocalRank, source: EngineMetadata, lease: Lease) -> None:
        """Report a lease to all ranks of a source that was met and cannot be read from.

        There is no route that says who reports to whom. So this rank is the only reporter: a request that one rank cannot load is not loaded
        at all.
        """
        report = Report(VERSION, "/".join(me.name), lease.request, lease.word, me.rank, (me.rank,), is_good=False)
        try:
            for peer in self._connect_refused(source):
                self._transport.notify(peer, write_note(report))
        except TransportError as error:
            logger.warning(
                "engine %s was not told that request %s is not wanted, and holds its blocks until the lease runs out: %s",
                *(source.engine, lease.request, error),
                extra=fields("notification_failed", engine=source.engine, request_id=lease.request),
            )

    def _connect_refused(self, source: EngineMetadata) -> list[str]:
        name = source.engine, source.instance_id
        if name not in self._refused:
            while len(self._refused) >= MAX_REFUSED:
                for peer in self._refused.pop(next(iter(self._refused))):
                    with contextlib.suppress(TransportError):
                        self._transport.remove_peer(peer)
            found = {f"refused {'/'.join(name)}/{rank.rank}": rank.transport_metadata for rank in source.ranks}
            self._transport.add_peers(found)
            self._refused[name] = list(found)
        return self._refused[name]

    def _notify(self, peer: Peer, rank: int, payload: bytes) -> None:
        try:
            self._transport.notify(peer.mover.peers[rank], payload)
        except TransportError as error:
            self._repeats.log(
                logging.WARNING,
                peer.remote,
                "rank %d of %s could not be notified: %s",
                *(rank, peer.remote, error),
                extra=fields("notification_failed", **peer.remote.log_fields),
            )


def _has_failed(handshake: Future[Peer]) -> bool:
    return handshake.done() and not handshake.cancelled() and handshake.exception() is not None
