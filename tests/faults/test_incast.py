"""Does each of many readers of one source get all that it asks for, and does a source that is stopped leave the others alone?"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from bench.incast import CASES, NUM_READERS, TRANSFER_BYTES, Case, read_all

from kvreshard.plan.copies import CopyList
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, TransferState
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.posting import Pace

pytestmark = pytest.mark.nixl
MEMORY_BYTES = 1 << 20
# More than the greedy reader has on its way at once.
NUM_TRANSFERS = 40
# Over TCP nothing of a read settles without the source; over shared memory some does.
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_everybody_gets_all_that_it_asks_for(case: Case) -> None:
    """Also beside a greedy one, and whatever the machine does meanwhile. How fairly is a figure of docs/reliability.md."""
    found = read_all(case, NUM_TRANSFERS)
    assert found.num_bytes == (NUM_TRANSFERS * TRANSFER_BYTES,) * NUM_READERS


def test_a_stopped_source_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More transfers than fit on their way are posted to a source that does not answer; then another source is read."""
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    here = int(memory.ctypes.data)
    reader = NixlTransport("reader")
    with ProcessRanks(2, MEMORY_BYTES, environment=ENVIRONMENT) as ranks:

        def read(rank: int, place: int) -> Transfer:
            start = np.arange(1000, dtype=np.uint64) * np.uint64(64) + np.uint64(place * (1 << 16))
            copies = CopyList.of(np.uint64(ranks.address(rank)) + start, np.uint64(here) + start, 64)
            return reader.post(f"source{rank}", Direction.READ, copies)

        try:
            reader.register([MemoryRegion(here, MEMORY_BYTES)])
            for rank in range(2):
                ranks.memory(rank)[:] = rank + 1
                reader.add_peer(f"source{rank}", ranks.metadata(rank))
                read(rank, rank).wait(60.0)
            os.kill(ranks.process_id(0), signal.SIGSTOP)
            stuck = [read(0, 2 + number) for number in range(2 * Pace().max_in_flight)]
            for number in range(20):
                memory[1 << 16 : 2 << 16] = 0
                read(1, 1).wait(30.0)
                assert set(memory[1 << 16 : (1 << 16) + 64]) == {2}, f"read {number} of the living source"
            assert all(transfer.state is TransferState.PENDING for transfer in stuck)
            os.kill(ranks.process_id(0), signal.SIGCONT)
            for transfer in stuck:
                transfer.wait(60.0)
        finally:
            os.kill(ranks.process_id(0), signal.SIGCONT)
            reader.close()
