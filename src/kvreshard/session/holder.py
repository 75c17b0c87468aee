"""Which leases of other engines does this rank want, and who must be told so?

1. A request wants a lease while it waits for its load (`watch`), while it is loaded (`begin`), and afterwards where its load does not
   give the source back by itself (`end`).
2. The sources of what waits, or is kept, hear of it in time (`renew`).
3. With the last request that wanted it a lease is given back: a report goes to the source ranks that the election appoints to hear
   from this one, at once if the source is met, else as soon as it is (`send_releases`).

Nothing here waits, and a source that cannot be told is a line in the log: its lease runs out.
"""

from __future__ import annotations

from collections import Counter

from kvreshard.model.logs import get_logger
from kvreshard.session.notes import Report, heartbeats, write_note
from kvreshard.session.orders import Load, Release, RemoteEngine, RemoteLease, Watch
from kvreshard.session.peers import Peer, Peers, Self
from kvreshard.session.renewals import Renewals, by_source
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)


class LeaseHolder:
    """The leases that one rank has from others. Used from the session's thread only.

    `usual_s`: between two renewals where a source says nothing (`renewals`).
    """

    def __init__(self, transport: Transport, peers: Peers, usual_s: float) -> None:
        self._transport, self._peers = transport, peers
        self._watched: dict[str, Watch] = {}
        self._loading: Counter[tuple[RemoteEngine, RemoteLease]] = Counter()
        self._kept: dict[str, Load] = {}
        self._waiting_releases: list[Release] = []
        self._renewals = Renewals(usual_s)

    @property
    def num_kept(self) -> int:
        """Requests that are loaded and whose source waits for a word."""
        return len(self._kept)

    @property
    def is_releasing(self) -> bool:
        """Whether leases are to be given back whose sources are not met yet."""
        return bool(self._waiting_releases)

    def watch(self, watch: Watch, me: Self | None) -> None:
        """Get to know the source, and renew its lease until the request is loaded, or `unwatch`."""
        self._watched[watch.request] = watch
        self._renewals.expect()
        if me is not None:
            self._peers.get(me, watch.remote)

    def unwatch(self, request: str) -> None:
        """Renew no longer."""
        self._watched.pop(request, None)

    def begin(self, load: Load) -> None:
        """A load is under way. It must `end`."""
        self._loading[load.remote, load.lease] += 1

    def end(self, me: Self, load: Load, peer: Peer | None, *, is_good: bool, is_kept: bool) -> None:
        """A load is over. `is_kept`: a release or a cancel gives its source back, not this. `peer` is None where it was not met."""
        source = load.remote, load.lease
        self._loading[source] -= 1
        if not self._loading[source]:
            del self._loading[source]
        self._watched.pop(load.request, None)
        if is_kept:
            self._kept[load.request] = load
        elif peer is None:  # given up before its source was met: the source hears of it as soon as it is
            self._give_back(*source)
        elif not self._is_wanted(*source):
            self._report(me, peer, load.lease, is_good)

    def release(self, release: Release) -> None:
        """No request that has been loaded wants the lease any more."""
        source = release.remote, release.lease
        self._kept = {name: kept for name, kept in self._kept.items() if (kept.remote, kept.lease) != source}
        self._give_back(*source)

    def cancel(self, request: str) -> None:
        """A request, loaded or not, has been aborted."""
        kept = self._kept.pop(request, None)
        if kept is not None:
            self._give_back(kept.remote, kept.lease)

    def send_releases(self, me: Self | None) -> None:
        """A release needs its source's route: who reports to whom. One that cannot be met keeps its lease until it ends."""
        still: list[Release] = []
        for release in self._waiting_releases:
            if me is None:
                still.append(release)
                continue
            meeting = self._peers.get(me, release.remote)
            if not meeting.done():
                still.append(release)
            elif meeting.exception() is None:
                self._report(me, meeting.result(), release.lease, is_good=True)
        self._waiting_releases = still

    def renew(self, me: Self, now_s: float) -> float:
        """Tell the sources for which it is time which leases are wanted; how long nobody else need be told."""
        if not self._renewals.is_time(now_s):
            return self._renewals.rest_s(now_s)
        wanted = by_source([*self._watched.values(), *self._kept.values()])
        peers = {remote: self._peers.met(remote) for remote in wanted}
        cards = ((remote, None if peer is None else peer.card) for remote, peer in peers.items())
        for remote in self._renewals.due(cards, now_s):
            peer = peers[remote]
            if peer is None:
                self._peers.get(me, remote)
                continue
            for note in heartbeats(me.card.engine, wanted[remote], peer.note_version):
                for rank in peer.told_ranks:
                    self._notify(peer, rank, write_note(note))
        return self._renewals.rest_s(now_s)

    def _give_back(self, remote: RemoteEngine, lease: RemoteLease) -> None:
        if not self._is_wanted(remote, lease):
            self._waiting_releases.append(Release(remote, lease))

    def _is_wanted(self, remote: RemoteEngine, lease: RemoteLease) -> bool:
        """Whether another request of this engine has the same source, and will report when it has done: one of several choices."""
        if self._loading[remote, lease]:
            return True
        return any((watch.lease, watch.remote) == (lease, remote) for watch in self._watched.values())

    def _report(self, me: Self, peer: Peer, lease: RemoteLease, is_good: bool) -> None:
        consumer, reporters = "/".join(me.name), peer.route.reporters
        for rank in peer.told_ranks:
            report = Report(peer.note_version, consumer, lease.request, lease.word, me.rank, reporters[rank], is_good)
            self._notify(peer, rank, write_note(report))

    def _notify(self, peer: Peer, rank: int, payload: bytes) -> None:
        try:
            self._transport.notify(peer.mover.peers[rank], payload)
        except TransportError as error:
            logger.warning("rank %d of engine %s was not told: %s", rank, peer.remote.engine, error)
