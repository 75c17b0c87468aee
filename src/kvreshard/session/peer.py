"""A source engine that this rank has met (`Peer`), and this rank as its peers see it (`LocalRank`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from kvreshard.model import EngineLayout, LayoutMismatch
from kvreshard.model.logs import get_logger
from kvreshard.plan.pattern_cache import PatternCache
from kvreshard.plan.route import Route
from kvreshard.session.commands import RemoteEngine, RemoteLease
from kvreshard.session.engine_metadata import EngineMetadata
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
    engine_metadata: EngineMetadata
    layout: EngineLayout
    route: Route
    mover: Mover

    def lease_proof(self, lease: RemoteLease, scratch_address: int) -> LeaseProof:
        """Where the words of a lease stand. Raises LayoutMismatch for a slot that a source rank does not have."""
        addresses, metadata_by_rank = {}, self.engine_metadata.rank_by_number
        for rank in self.route.src_ranks:
            engine_metadata = metadata_by_rank[rank]
            if not 0 <= lease.slot < engine_metadata.lease_slots:
                raise LayoutMismatch(
                    f"request '{lease.request}' of engine '{self.remote.engine}': lease slot {lease.slot}, but rank {rank} "
                    f"has {engine_metadata.lease_slots}; were the kv_transfer_params changed on their way?"
                )
            addresses[rank] = engine_metadata.lease_address + lease.slot * WORD_BYTES
        return LeaseProof(lease.word, addresses, scratch_address)

    @property
    def told_ranks(self) -> tuple[int, ...]:
        """Source ranks that hear from this rank."""
        mine = self.route.dst_rank
        return tuple(rank for rank, reporters in self.route.reporters.items() if mine in reporters)


@dataclass(frozen=True)
class LocalRank:
    """This rank: its engine's engine metadata and layout, its memory and what it moves bytes with.

    `refused`: engine metadata of engines that could not be worked with, for the record of a failed load. `pattern_cache`: what the routes from all of
    its sources keep.
    """

    engine_metadata: EngineMetadata
    layout: EngineLayout
    rank: int
    transport: Transport
    memory: LocalMemory
    staging: Staging | None
    refused: dict[RemoteEngine, EngineMetadata] = field(default_factory=dict, compare=False)
    pattern_cache: PatternCache = field(default_factory=PatternCache, compare=False)

    @property
    def name(self) -> tuple[str, str]:
        """The engine and its instance id."""
        return self.engine_metadata.engine, self.engine_metadata.instance_id


def disconnect(peer: Peer) -> None:
    """Make the transport forget a peer's ranks, and keep nothing of its route."""
    peer.route.drop_patterns()
    for name in peer.mover.peers.values():
        with contextlib.suppress(TransportError):
            peer.mover.transport.remove_peer(name)
