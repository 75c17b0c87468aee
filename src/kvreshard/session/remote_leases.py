"""Which leases of other engines does this rank want, and who must be told so?

1. A request wants a lease while it waits for its load (`start_renewing`), while it is loaded (`begin`), and afterwards where its load does not
   give the source back by itself (`end`).
2. The sources of what waits, or is kept, hear of it in time (`renew`).
3. With the last request that wanted it a lease is given back: a report goes to the source ranks that the election appoints to hear
   from this one, at once if the source is met, else as soon as it is (`send_releases`), or not at all if that takes longer than
   `RELEASE_PATIENCE_S`. A source that was met and cannot be read from hears of it too (`refusals`).
4. A source of which nothing is wanted any more, and that has not answered yet, is not asked further.

What is wanted is kept by source and lease: no event costs more where more is wanted. Nothing here waits, and a source that cannot be
told is a line in the log: its lease runs out.
"""

from __future__ import annotations

import contextlib
import queue
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Load, Release, RemoteEngine, RemoteLease, Renew
from kvreshard.session.notes import VERSION, Report, heartbeats, write_note
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.peers import Peers
from kvreshard.session.refusals import Refusals
from kvreshard.session.renewals import Renewals
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)

# An engine that is there answers in less. What waits for one that does not is a courtesy: the lease runs out by itself.
RELEASE_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Source:
    """What is wanted of one source, by lease. `waiting`, `kept`: requests. `loading`: how many loads. `releases`: to be given back once
    the source is met. `handshake`: the one whose end is heard of.
    """

    waiting: dict[RemoteLease, set[str]] = field(default_factory=dict)
    kept: dict[RemoteLease, set[str]] = field(default_factory=dict)
    loading: Counter[RemoteLease] = field(default_factory=Counter)
    releases: dict[RemoteLease, None] = field(default_factory=dict)
    handshake: Future[Peer] | None = None

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting or self.kept or self.loading)

    @property
    def is_mute(self) -> bool:
        """Whether it is being asked and has not answered."""
        return self.handshake is not None and not self.handshake.done()


class RemoteLeases:
    """The leases that one rank has from others. Used from the session's thread only.

    `usual_s`: between two renewals of a source that is not known yet (`renewals`).
    """

    def __init__(self, transport: Transport, peers: Peers, usual_s: float) -> None:
        self._transport, self._peers = transport, peers
        self._sources: dict[RemoteEngine, _Source] = {}
        self._waiting: dict[str, tuple[RemoteEngine, RemoteLease]] = {}
        self._kept: dict[str, tuple[RemoteEngine, RemoteLease]] = {}
        # Sources of which something has changed, and those that have answered, which other threads say.
        self._open: dict[RemoteEngine, None] = {}
        self._answered: queue.SimpleQueue[RemoteEngine] = queue.SimpleQueue()
        self._patience: deque[tuple[float, RemoteEngine]] = deque()
        self._renewals = Renewals(usual_s)
        self._refusals = Refusals(transport)

    @property
    def num_kept(self) -> int:
        """Requests that are loaded and whose source waits for a word."""
        return len(self._kept)

    @property
    def is_releasing(self) -> bool:
        """Whether leases are to be given back whose sources are not met yet."""
        return any(source.releases for source in self._sources.values())

    def start_renewing(self, command: Renew, me: LocalRank | None) -> None:
        """Get to know the source, and renew its lease until the request is loaded, or `stop_renewing`."""
        self.stop_renewing(command.request)
        source = self._source(command.remote)
        self._waiting[command.request] = command.remote, command.lease
        source.waiting.setdefault(command.lease, set()).add(command.request)
        self._renewals.expect(command.remote)
        if me is None:
            self._open[command.remote] = None
        else:
            self._ask(me, command.remote, source)

    def stop_renewing(self, request: str) -> None:
        """Renew no longer."""
        found = self._waiting.pop(request, None)
        if found is not None:
            remote, lease = found
            _discard(self._sources[remote].waiting, lease, request)
            self._open[remote] = None

    def begin(self, load: Load) -> None:
        """A load is under way. It must `end`."""
        self._source(load.remote).loading[load.lease] += 1

    def end(self, me: LocalRank, load: Load, peer: Peer | None, *, is_good: bool, is_kept: bool) -> None:
        """A load is over. `is_kept`: a release or a cancel gives its source back, not this. `peer` is None where it was not met."""
        source = self._source(load.remote)
        source.loading[load.lease] -= 1
        if not source.loading[load.lease]:
            del source.loading[load.lease]
        if is_kept:
            self._forget_kept(load.request)
            self._kept[load.request] = load.remote, load.lease
            source.kept.setdefault(load.lease, set()).add(load.request)
            self._renewals.expect(load.remote)
        self.stop_renewing(load.request)
        if is_kept:
            return
        if peer is None:  # given up before its source was met: the source hears of it as soon as it is
            self._give_back(load.remote, load.lease)
        elif not self._is_wanted(load.remote, load.lease):
            self._report(me, peer, load.lease, is_good)
        self._open[load.remote] = None

    def release(self, release: Release) -> None:
        """No request that has been loaded wants the lease any more."""
        source = self._source(release.remote)
        for request in source.kept.pop(release.lease, ()):
            del self._kept[request]
        self._give_back(release.remote, release.lease)

    def cancel(self, request: str) -> None:
        """A request, loaded or not, has been aborted."""
        found = self._forget_kept(request)
        if found is not None:
            self._give_back(*found)

    def send_releases(self, me: LocalRank | None, now_s: float) -> None:
        """Give back what is not wanted any more where the source is met: a report needs its route, which says who reports to whom."""
        if me is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                remote = self._answered.get_nowait()
                self._open[remote] = None
                if self._peers.met(remote) is not None:
                    self._renewals.met(remote)
        while self._patience and now_s >= self._patience[0][0]:
            remote = self._patience.popleft()[1]
            source = self._sources.get(remote)
            if source is not None and source.is_mute and not source.is_wanted:
                source.releases.clear()
                self._open[remote] = None
        opened, self._open = self._open, {}
        for remote in opened:
            self._settle(me, remote, now_s)

    def renew(self, me: LocalRank, now_s: float) -> float:
        """Tell the sources for which it is time which leases are wanted; how long nobody else need be told."""
        for remote in self._renewals.due(now_s):
            source = self._sources.get(remote)
            if source is None or not (source.waiting or source.kept):
                continue
            peer = self._peers.met(remote)
            self._renewals.told(remote, None if peer is None else peer.engine_metadata, now_s)
            if peer is None:
                self._ask(me, remote, source)
                continue
            leases = dict.fromkeys((lease.request, lease.word) for lease in (*source.waiting, *source.kept))
            for note in heartbeats(me.engine_metadata.engine, leases):
                payload = write_note(note)
                for rank in peer.told_ranks:
                    self._notify(peer, rank, payload)
        return self._renewals.rest_s(now_s)

    def _source(self, remote: RemoteEngine) -> _Source:
        return self._sources.setdefault(remote, _Source())

    def _ask(self, me: LocalRank, remote: RemoteEngine, source: _Source) -> Future[Peer]:
        """The handshake with a source, of whose end this hears once."""
        handshake = self._peers.get(me, remote)
        if handshake is not source.handshake:
            source.handshake = handshake
            handshake.add_done_callback(lambda _: self._answered.put(remote))
        return handshake

    def _settle(self, me: LocalRank, remote: RemoteEngine, now_s: float) -> None:
        """Ask for a source that was not asked for, tell one that is met what is given back, and forget one that is not wanted."""
        source = self._sources.get(remote)
        if source is None:
            return
        if source.is_wanted or source.releases:
            handshake = self._ask(me, remote, source)
            if source.releases and source.is_mute:
                self._patience.append((now_s + RELEASE_PATIENCE_S, remote))
            elif source.releases:
                releases, source.releases = source.releases, {}
                error = None if handshake.cancelled() else handshake.exception()
                engine_metadata = me.refused.get(remote)
                for lease in () if handshake.cancelled() else releases:
                    if error is None:
                        self._report(me, handshake.result(), lease, is_good=True)
                    elif engine_metadata is not None and not isinstance(error, TransportError):
                        self._refusals.give_back("/".join(me.name), me.rank, engine_metadata, lease)
        if not (source.is_wanted or source.releases):
            del self._sources[remote]
            self._peers.cancel(remote)

    def _give_back(self, remote: RemoteEngine, lease: RemoteLease) -> None:
        if not self._is_wanted(remote, lease):
            self._source(remote).releases[lease] = None
            self._open[remote] = None

    def _is_wanted(self, remote: RemoteEngine, lease: RemoteLease) -> bool:
        """Whether another request of this engine has the same source, and will report when it has done: one of several choices."""
        source = self._sources.get(remote)
        return source is not None and (lease in source.loading or lease in source.waiting)

    def _forget_kept(self, request: str) -> tuple[RemoteEngine, RemoteLease] | None:
        found = self._kept.pop(request, None)
        if found is not None:
            _discard(self._sources[found[0]].kept, found[1], request)
        return found

    def _report(self, me: LocalRank, peer: Peer, lease: RemoteLease, is_good: bool) -> None:
        consumer, reporters = "/".join(me.name), peer.route.reporters
        for rank in peer.told_ranks:
            report = Report(VERSION, consumer, lease.request, lease.word, me.rank, reporters[rank], is_good)
            self._notify(peer, rank, write_note(report))

    def _notify(self, peer: Peer, rank: int, payload: bytes) -> None:
        try:
            self._transport.notify(peer.mover.peers[rank], payload)
        except TransportError as error:
            logger.warning("rank %d of engine %s was not told: %s", rank, peer.remote.engine, error)


def _discard(requests: dict[RemoteLease, set[str]], lease: RemoteLease, request: str) -> None:
    requests[lease].discard(request)
    if not requests[lease]:
        del requests[lease]
