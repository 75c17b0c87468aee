"""A source engine that this rank has met (`Peer`), and this rank as its peers see it (`LocalRank`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from kvreshard.model import EngineLayout, LayoutMismatch
from kvreshard.model.logs import get_logger
from kvreshard.plan.pattern_cache import PatternCache
from kvreshard.plan.route import Route
from kvreshard.session import notes
from kvreshard.session.card import EngineCard
from kvreshard.session.commands import RemoteEngine, RemoteLease
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.mover import Mover
from kvreshard.session.pull import LeaseProof
from kvreshard.session.staging import Staging
from kvreshard.transport.base import Transport, TransportError
from kvreshard.transport.local import LocalMemory

logger = get_logger(__name__)


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
        addresses, cards = {}, self.card.rank_by_number
        for rank in self.route.src_ranks:
            card = cards[rank]
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
class LocalRank:
    """This rank: its engine's card and layout, its memory and what it moves bytes with.

    `refused`: cards of engines that could not be worked with, for the record of a failed load. `pattern_cache`: what the routes from all of
    its sources keep.
    """

    card: EngineCard
    layout: EngineLayout
    rank: int
    transport: Transport
    memory: LocalMemory
    staging: Staging | None
    refused: dict[RemoteEngine, EngineCard] = field(default_factory=dict, compare=False)
    pattern_cache: PatternCache = field(default_factory=PatternCache, compare=False)

    @property
    def name(self) -> tuple[str, str]:
        """The engine and its incarnation."""
        return self.card.engine, self.card.incarnation


def disconnect(peer: Peer) -> None:
    """Make the transport forget a peer's ranks, and keep nothing of its route."""
    peer.route.drop_patterns()
    for name in peer.mover.peers.values():
        with contextlib.suppress(TransportError):
            peer.mover.transport.remove_peer(name)
