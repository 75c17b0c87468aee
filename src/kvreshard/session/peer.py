"""A source engine that this rank has met (`Peer`), this rank itself (`LocalRank`), and how the two are connected."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import cached_property

from kvreshard.model import EngineLayout, LayoutMismatch
from kvreshard.plan.compile import compile_route
from kvreshard.plan.pattern_cache import PatternCache
from kvreshard.plan.route import Route
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.engine_metadata import EngineMetadata, check_compatibility
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.lease import WORD_BYTES, Lease
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.parts import RouteParts, find_parts
from kvreshard.session.pull import LeaseProof
from kvreshard.transport.base import Transport, TransportError
from kvreshard.transport.local import LocalMemory


@dataclass(frozen=True, eq=False)
class Peer:
    """A source engine that this rank can read from."""

    remote: RemoteEngine
    engine_metadata: EngineMetadata
    layout: EngineLayout
    route: Route
    mover: Mover

    def lease_proof(self, lease: Lease, scratch_address: int) -> LeaseProof:
        """Where the words of a lease are. Raises LayoutMismatch for a slot that a source rank does not have."""
        addresses, metadata_by_rank = {}, self.engine_metadata.rank_by_number
        for rank in self.route.src_ranks:
            metadata = metadata_by_rank[rank]
            if not 0 <= lease.slot < metadata.lease_slots:
                raise LayoutMismatch(
                    f"request '{lease.request}' of engine '{self.remote.engine}': lease slot {lease.slot}, but rank {rank} "
                    f"has {metadata.lease_slots}; were the kv_transfer_params changed on their way?"
                )
            addresses[rank] = metadata.lease_address + lease.slot * WORD_BYTES
        return LeaseProof(lease.word, addresses, scratch_address)

    @cached_property
    def parts(self) -> RouteParts:
        """What of the route may be read before a prefill has ended."""
        return find_parts(self.route, self.layout, self.engine_metadata)

    @property
    def notified_ranks(self) -> tuple[int, ...]:
        """Source ranks that this rank sends reports and heartbeats to."""
        mine = self.route.dst_rank
        return tuple(rank for rank, reporters in self.route.reporters.items() if mine in reporters)


@dataclass(frozen=True)
class LocalRank:
    """This rank.

    `refused`: engine metadata of engines that it could not connect to, for the records of failed loads. `pattern_cache`: shared by the routes
    from all sources.
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
    def is_first(self) -> bool:
        """Whether it has the lowest number, and logs what all ranks of its engine find alike."""
        return self.rank == min(self.layout.rank_by_number)

    @property
    def name(self) -> tuple[str, str]:
        """The engine and its instance id."""
        return self.engine_metadata.engine, self.engine_metadata.instance_id


def check_instance(remote: RemoteEngine, engine_metadata: EngineMetadata) -> None:
    """Raises HandshakeError unless this is the metadata of the instance that was asked for."""
    if (engine_metadata.engine, engine_metadata.instance_id) != remote.name:
        raise HandshakeError(
            f"at {remote.address} listens engine '{engine_metadata.engine}', instance id {engine_metadata.instance_id[:12]}, not "
            f"'{remote.engine}', instance id {remote.instance_id[:12]}: it has restarted, and what the request refers to is gone"
        )


def connect_engine(
    me: LocalRank, remote: RemoteEngine, engine_metadata: EngineMetadata, options: EndpointOptions
) -> Peer:
    """Compare with an engine, compile and prove the route, and add the source ranks to the transport.

    Raises KvReshardError or TransportError.
    """
    check_compatibility(me.engine_metadata, engine_metadata, options.allow_mismatch)
    layout = engine_metadata.decode_layout()
    route = compile_route(layout, me.layout, me.rank, cost=options.cost, pattern_cache=me.pattern_cache)
    needed = {*route.src_ranks, *(rank for rank, reporters in route.reporters.items() if me.rank in reporters)}
    names = {
        rank: f"{remote.engine}/{remote.instance_id}/{rank} at {remote.address.host_port}" for rank in sorted(needed)
    }
    metadata_by_rank = engine_metadata.rank_by_number
    try:
        me.transport.add_peers({name: metadata_by_rank[rank].transport_metadata for rank, name in names.items()})
    except TransportError:
        route.drop_patterns()
        raise
    return Peer(remote, engine_metadata, layout, route, Mover(me.transport, me.memory, names, me.staging))


def disconnect(peer: Peer) -> None:
    """Make the transport forget a peer's ranks, and free what its route keeps."""
    peer.route.drop_patterns()
    if "parts" in vars(peer):
        peer.parts.drop_patterns()
    for name in peer.mover.peers.values():
        with contextlib.suppress(TransportError):
            peer.mover.transport.remove_peer(name)


def describe_route(route: Route) -> str:
    """A route in a sentence, for logs: "decode rank 0 <- prefill rank 0 (64 fields): 2 transfers, direct"."""
    num_fields: dict[int, int] = {}
    for transfer in route.transfers:
        num_fields[transfer.src_rank] = num_fields.get(transfer.src_rank, 0) + len(transfer.fields)
    sources = ", ".join(f"prefill rank {rank} ({count} fields)" for rank, count in sorted(num_fields.items()))
    num_staged = sum(t.choice.way == "staged" for t in route.transfers)
    how = f"{num_staged} staged" if num_staged else "direct"
    warnings = "".join(f"; {warning}" for warning in route.warnings)
    return f"decode rank {route.dst_rank} <- {sources or 'nothing'}: {len(route.transfers)} transfers, {how}{warnings}"
