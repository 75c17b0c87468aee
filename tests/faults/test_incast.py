"""Do many readers share one source, and does a source that is stopped leave the others alone?"""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from tests.faults.incast import CASES, NUM_READERS, Case, Shares, measure

from kvreshard.testing import rank_worker as ask
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import Copies, Direction, MemoryRegion, Transfer, TransferState
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.pace import Pace

pytestmark = pytest.mark.nixl
MEMORY_BYTES = 1 << 20
# Over TCP nothing of a read settles without the source; over shared memory some does.
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"}


def is_fair(shares: Shares, wanted: float) -> bool:
    """By Jain's index, and nobody gets less than a quarter of an equal share."""
    assert len(shares.num_bytes) == NUM_READERS
    return shares.jain > wanted and min(shares.num_bytes) > sum(shares.num_bytes) / NUM_READERS / 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_nobody_is_starved(case: Case) -> None:
    """Measured: 0.97 and above; a greedy reader has as many slices on its way as it may, four times what the others ask for,
    and got up to 2.9 times as much (0.80). Starved, it would be 1/6. One window of three must show it: on a machine that others use
    too, which of six processes gets its turn in a second is not for us to say.
    """
    wanted = 0.8 if len(set(case.depths)) == 1 else 0.6
    tried: list[Shares] = []
    while not tried or (len(tried) < 3 and not is_fair(tried[-1], wanted)):
        tried.append(measure(case, 1.5))
    assert is_fair(tried[-1], wanted), tried


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
            copies = Copies.of(np.uint64(here) + start, np.uint64(ranks.address(rank)) + start, 64)
            return reader.post(f"source{rank}", Direction.READ, copies)

        try:
            reader.register([MemoryRegion(here, MEMORY_BYTES)])
            for rank in range(2):
                ranks.memory(rank)[:] = rank + 1
                reader.add_peer(f"source{rank}", ranks.served(rank, ask.Metadata()).data)
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
