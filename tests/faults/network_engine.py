"""What does an engine do on a host of its own? The real session: endpoints with threads, a listener with keys, leases, NIXL over TCP.

`python -m tests.faults.network_engine SOCKET` builds an engine as it is told by its first message, a `Setup`, and then answers
(method, arguments) with (worked, result). The controller is `network_control.RemoteEngineProcess`.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from tests.faults.network_control import Setup, Told, Wanted
from tests.pairs.small import GROUP
from tests.unit.session import world

from kvreshard.session import handshake_messages, handshake_server
from kvreshard.session.commands import Acquire, EndpointOptions, Load, Publish, RemoteEngine, Renew
from kvreshard.session.keys import read_keys
from kvreshard.session.lease import Lease
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values
from kvreshard.transport.nixl import NixlTransport

POISON = 0xEE

# Of all engines here, as their engine metadata say: no lease of a test is shorter, and readers renew six times in it.
LEASE_S = 1.5


class EngineProcess:
    """The engine's own side. Public methods are what the controller may ask."""

    def __init__(self, setup: Setup) -> None:
        world.FaultyTransport = lambda fabric, name, faults: NixlTransport(name)
        keys = None if setup.key_file is None else read_keys(setup.key_file)
        options = EndpointOptions(keys=keys, **setup.options)

        self.setup = setup
        self.side = world.make_side(time.monotonic, None, setup.layout(), lambda rank: None, None, options)
        self.side.lease_s = LEASE_S
        engine_metadata = self.side.engine_metadata()
        self.listener = handshake_server.HandshakeServer(
            handshake_messages.Address(setup.host, 0), engine_metadata, keys=keys
        )
        self.told = Told()
        for endpoint in self.side.endpoints.values():
            endpoint.introduce(engine_metadata, self.side.layout)
            endpoint.start()

    def port(self) -> int:
        return self.listener.address.port

    def offer(self, wanted: Wanted, reader: Setup, ttl_s: float) -> None:
        """A prefill has finished here: give it values, and a lease."""
        write_values(
            self.side.layout, reader.layout(), self.side.memory, wanted.request(self.setup, reader), wanted.seed
        )
        for endpoint in self.side.endpoints.values():
            endpoint.submit(Acquire(Lease(wanted.name, wanted.slot, wanted.word)))
            endpoint.submit(Publish(wanted.name, ttl_s, wanted.request(self.setup, reader).src_tables))

    def load(self, wanted: Wanted, source: Setup, port: int) -> None:
        remote = RemoteEngine(source.name, world.LIFE, handshake_messages.Address(source.host, port))
        lease = Lease(wanted.name, wanted.slot, wanted.word)
        transfer = wanted.request(source, self.setup)
        for endpoint in self.side.endpoints.values():
            endpoint.submit(Renew(wanted.name, remote, lease))
            endpoint.submit(
                Load(wanted.name, remote, lease, transfer, world.seal(transfer, lease, remote), gives_back=True)
            )

    def listen(self) -> Told:
        """Everything so far."""
        for endpoint in self.side.endpoints.values():
            self.told.note(endpoint.collect())
        self.told.num_quarantined = sum(len(endpoint._jobs._given_up) for endpoint in self.side.endpoints.values())
        return self.told

    def words(self, slot: int) -> list[int]:
        """A slot's lease words."""
        return [table[slot] for table in self.side.tables.values()]

    def poison(self, wanted: Wanted, source: Setup) -> None:
        """Fill the request's pages with what no value is expected to be."""
        for content in self._pages(wanted, source):
            content[:] = POISON

    def shares(self, wanted: Wanted, source: Setup) -> float:
        """The share of the request's bytes here that are no longer poison."""
        pages = self._pages(wanted, source)
        return sum(int((page != POISON).sum()) for page in pages) / sum(page.size for page in pages)

    def differs(self, wanted: Wanted, source: Setup) -> dict[Any, Any]:
        """Where the request's pages are not what the oracle leaves there. Everything else is as it was before this call."""
        src, transfer = source.layout(), wanted.request(source, self.setup)
        theirs = {(r.rank, g.name): np.zeros(g.size_bytes, np.uint8) for r in src.ranks for g in r.regions}
        write_values(src, self.side.layout, theirs, transfer, wanted.seed)
        expected = {place: content.copy() for place, content in self.side.memory.items()}
        apply_request(src, self.side.layout, theirs, expected, transfer)
        return differing_bytes(expected, self.side.memory)

    def close(self) -> None:
        self.listener.close()
        for rank, endpoint in self.side.endpoints.items():
            endpoint.close()
            self.side.transports[rank].close()

    def _pages(self, wanted: Wanted, source: Setup) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        transfer = wanted.request(source, self.setup)
        return [
            self.side.memory[rank.rank, slab.region][start : start + slab.page_bytes]
            for rank in self.side.layout.ranks
            for slab in rank.slabs
            for page in transfer.dst_tables[GROUP].pages
            for start in [slab.offset_bytes + int(page) * slab.page_stride_bytes]
        ]


def main(arguments: Sequence[str]) -> None:
    connection = Client(arguments[0], "AF_UNIX")
    process: EngineProcess | None = None
    try:
        while True:
            message = connection.recv()
            try:
                if process is None:
                    process = EngineProcess(message)
                    result = None
                else:
                    result = getattr(process, message[0])(*message[1])
            except Exception:  # noqa: BLE001  it is told to the test
                connection.send((False, traceback.format_exc()))
            else:
                connection.send((True, result))
    except (EOFError, OSError):
        if process is not None:
            process.close()


if __name__ == "__main__":
    main(sys.argv[1:])
