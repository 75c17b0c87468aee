"""Does the contract fail for a transport that breaks it? A suite that passes everything proves nothing."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.faulty_memory import Fault, FaultyFabric, FaultyTransport

from kvreshard.testing.contract import NUM_RANKS, TransportContract
from kvreshard.testing.pieces import MEMORY_BYTES, Expectation, copies_of
from kvreshard.testing.ranks import LocalRanks
from kvreshard.transport.base import Direction, Transfer, TransportError

SUITE = TransportContract()


class Broken:
    """Settings that a test changes while the ranks run."""

    def __init__(self) -> None:
        self.fault = Fault()
        self.deliveries = 1

    def faults(self, _index: int, _transfer: Transfer) -> Fault:
        return self.fault

    def delivered(self, _index: int, _peer: str, _payload: bytes) -> int:
        return self.deliveries


@pytest.fixture
def broken() -> Broken:
    return Broken()


@pytest.fixture
def ranks(broken: Broken) -> Iterator[LocalRanks]:
    fabric = FaultyFabric()

    def make(rank: int) -> FaultyTransport:
        return FaultyTransport(fabric, f"rank{rank}", faults=broken.faults, deliveries=broken.delivered)

    with LocalRanks(NUM_RANKS, MEMORY_BYTES, make) as ranks:
        ranks.connect_all()
        yield ranks


@pytest.mark.parametrize("direction", list(Direction))
def test_one_wrong_byte_is_noticed(ranks: LocalRanks, broken: Broken, direction: Direction) -> None:
    broken.fault = Fault(corrupt_byte=12_345)
    with pytest.raises(AssertionError, match="1 bytes differ"):
        SUITE.test_random_pieces_arrive_exactly(ranks, direction, seed=0)


def test_a_touched_guard_byte_is_noticed(ranks: LocalRanks) -> None:
    expected = Expectation(ranks)
    ranks.memory(2)[77] += 1
    with pytest.raises(AssertionError, match="rank 2: 1 bytes differ, the first at offset 77"):
        expected.check()


def test_a_missing_piece_is_noticed(ranks: LocalRanks, broken: Broken) -> None:
    broken.fault = Fault(fail_after_copies=3)
    with pytest.raises(TransportError, match="after 3 of"):
        SUITE.test_random_pieces_arrive_exactly(ranks, Direction.READ, seed=0)


@pytest.mark.parametrize("deliveries", [0, 2])
def test_a_lost_or_repeated_notification_is_noticed(ranks: LocalRanks, broken: Broken, deliveries: int) -> None:
    broken.deliveries = deliveries
    ranks.patience_s = 0.01
    with pytest.raises(AssertionError):
        SUITE.test_payloads_arrive_as_they_are(ranks, b"x")


def test_data_after_the_word_is_noticed(ranks: LocalRanks, broken: Broken) -> None:
    """The bytes are late, so that the word, sent apart from them, comes first."""
    broken.fault = Fault(delay_steps=1)
    ranks.memory(0)[:8] = 200
    pieces = (np.zeros(1, np.uint64), np.full(1, 64, np.uint64), np.full(1, 8, np.uint64))
    expected = Expectation(ranks)
    expected.copied(0, 1, Direction.WRITE, pieces)
    ranks.post(0, 1, Direction.WRITE, copies_of(ranks, 0, 1, Direction.WRITE, pieces))
    ranks.notify(0, 1, b"written")
    assert ranks.notifications(1, 1) == [("rank0", b"written")]
    with pytest.raises(AssertionError, match="8 bytes differ"):
        expected.check()
