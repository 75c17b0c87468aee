"""Does every transport pass the contract? In one process and, where it can, between processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvreshard.testing.contract import NUM_RANKS, TransportContract
from kvreshard.testing.pieces import MEMORY_BYTES
from kvreshard.testing.ranks import LocalRanks, ProcessRanks, Ranks
from kvreshard.transport.memory import Fabric, MemoryTransport
from kvreshard.transport.nixl import NixlTransport


@pytest.fixture(scope="module")
def memory_ranks() -> Iterator[Ranks]:
    fabric = Fabric()
    with LocalRanks(NUM_RANKS, MEMORY_BYTES, lambda rank: MemoryTransport(fabric, f"rank{rank}")) as ranks:
        ranks.connect_all()
        yield ranks


@pytest.fixture(scope="module")
def local_nixl_ranks() -> Iterator[Ranks]:
    with LocalRanks(NUM_RANKS, MEMORY_BYTES, lambda rank: NixlTransport(f"rank{rank}")) as ranks:
        ranks.connect_all()
        yield ranks


@pytest.fixture(scope="module")
def process_nixl_ranks() -> Iterator[Ranks]:
    with ProcessRanks(NUM_RANKS, MEMORY_BYTES) as ranks:
        ranks.connect_all()
        yield ranks


class TestMemory(TransportContract):
    """All ranks in this process."""

    @pytest.fixture
    def ranks(self, memory_ranks: Ranks) -> Ranks:
        return memory_ranks


@pytest.mark.nixl
class TestNixlInOneProcess(TransportContract):
    """Several agents in this process."""

    @pytest.fixture
    def ranks(self, local_nixl_ranks: Ranks) -> Ranks:
        return local_nixl_ranks


@pytest.mark.nixl
class TestNixlBetweenProcesses(TransportContract):
    """A process per rank, as in production."""

    @pytest.fixture
    def ranks(self, process_nixl_ranks: Ranks) -> Ranks:
        return process_nixl_ranks
