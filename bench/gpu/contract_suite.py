"""The transport's contract for ranks on the devices that KVRESHARD_DEVICES names, as in "cuda:0,cpu,cuda:0". Run by `parts.contract`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvreshard.testing.contract import NUM_RANKS, TransportContract
from kvreshard.testing.pieces import MEMORY_BYTES
from kvreshard.testing.ranks import ProcessRanks, Ranks


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[Ranks]:
    with ProcessRanks(NUM_RANKS, MEMORY_BYTES, devices=os.environ["KVRESHARD_DEVICES"].split(",")) as ranks:
        ranks.connect_all()
        yield ranks


class TestNixlOnDevices(TransportContract):
    """A process per rank."""

    @pytest.fixture
    def ranks(self, device_ranks: Ranks) -> Ranks:
        return device_ranks
