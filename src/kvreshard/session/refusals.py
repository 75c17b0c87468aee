"""Reports to source engines that this rank has met and cannot read from, so that they free the request's pages.

There is no route that says who reports to whom. So this rank reports to every rank of the source, as its only reporter: a request that one rank
cannot load is not loaded at all. A source that cannot be connected or notified is a line in the log: its lease expires.
"""

from __future__ import annotations

import contextlib

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import RemoteLease
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.notes import VERSION, Report, write_note
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)

MAX_ENGINES = 16


class Refusals:
    """Of one rank. At most `MAX_ENGINES` sources are connected at a time. Used from the session's thread only."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._peers: dict[tuple[str, str], list[str]] = {}

    def release(self, consumer: str, rank: int, engine_metadata: EngineMetadata, lease: RemoteLease) -> None:
        """Report a lease to all ranks of an engine. `consumer`: this engine and its instance id."""
        report = Report(VERSION, consumer, lease.request, lease.word, rank, (rank,), is_good=False)
        try:
            for peer in self._connect(engine_metadata):
                self._transport.notify(peer, write_note(report))
        except TransportError as error:
            logger.warning(
                "engine %s could not be notified that request %s is not wanted: %s",
                engine_metadata.engine,
                lease.request,
                error,
            )

    def _connect(self, engine_metadata: EngineMetadata) -> list[str]:
        name = engine_metadata.engine, engine_metadata.instance_id
        if name not in self._peers:
            while len(self._peers) >= MAX_ENGINES:
                for peer in self._peers.pop(next(iter(self._peers))):
                    with contextlib.suppress(TransportError):
                        self._transport.remove_peer(peer)
            found = {
                f"refused {engine_metadata.engine}/{engine_metadata.instance_id}/{rank.rank}": rank.transport_metadata
                for rank in engine_metadata.ranks
            }
            self._transport.add_peers(found)
            self._peers[name] = list(found)
        return self._peers[name]
