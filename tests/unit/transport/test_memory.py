"""Does the in-process transport misbehave exactly as it is told?"""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.faulty_memory import Fault, FaultyFabric, FaultyTransport

from kvreshard.plan.copies import CopyList
from kvreshard.transport.base import (
    Direction,
    MemoryRegion,
    Notification,
    Transfer,
    TransferState,
    Transport,
    TransportError,
)

SIZE = 64


class Pair:
    """Two connected transports: `a` posts under the faults, `b` answers."""

    def __init__(self, *faults: Fault, deliveries: tuple[int, ...] = (), shuffle_seed: int | None = None) -> None:
        self.fabric = FaultyFabric(shuffle_seed)
        self.a = FaultyTransport(
            self.fabric,
            "a",
            faults=lambda index, _transfer: faults[index] if index < len(faults) else Fault(),
            deliveries=lambda index, _peer, _payload: deliveries[index] if index < len(deliveries) else 1,
        )
        self.b = FaultyTransport(self.fabric, "b")
        self.here = np.zeros(SIZE, dtype=np.uint8)
        self.there = np.arange(1, SIZE + 1, dtype=np.uint8)
        self.a.register([region(self.here)])
        self.b.register([region(self.there)])
        self.a.add_peer("bob", self.b.metadata())
        self.b.add_peer("ann", self.a.metadata())

    def read(self, offset: int = 0, length: int = SIZE, notify: bytes | None = None) -> Transfer:
        pieces = CopyList.of([self.there.ctypes.data + offset], [self.here.ctypes.data + offset], length)
        return self.a.post("bob", Direction.READ, pieces, notify)


def region(memory: NDArray[np.uint8]) -> MemoryRegion:
    return MemoryRegion(memory.ctypes.data, memory.nbytes)


@pytest.fixture
def plain() -> Pair:
    return Pair()


def test_it_is_a_transport(plain: Pair) -> None:
    assert isinstance(plain.a, Transport)


def test_a_delayed_transfer_moves_its_bytes_in_its_step() -> None:
    pair = Pair(Fault(delay_steps=2))
    transfer = pair.read(notify=b"done")
    pair.fabric.step()
    assert transfer.state is TransferState.PENDING
    assert not pair.here.any()
    assert pair.b.notifications() == []
    assert pair.fabric.step() == 1
    transfer.wait(0.0)
    assert np.array_equal(pair.here, pair.there)
    assert pair.b.notifications() == [Notification("ann", b"done")]


def test_a_later_post_may_overtake() -> None:
    pair = Pair(Fault(delay_steps=3), Fault(delay_steps=1))
    slow, fast = pair.read(0, 8), pair.read(8, 8)
    pair.fabric.step()
    assert (slow.state, fast.state) == (TransferState.PENDING, TransferState.DONE)


def test_a_dropped_transfer_stays_pending_until_close() -> None:
    pair = Pair(Fault(drop=True))
    transfer = pair.read()
    assert pair.fabric.step(100) == 0
    pair.a.remove_peer("bob")
    assert pair.fabric.step(100) == 0
    assert pair.fabric.num_pending == 1
    pair.a.close()
    with pytest.raises(TransportError, match="closed"):
        transfer.wait(0.0)
    assert not pair.here.any()


def test_a_failing_transfer_moves_some_pieces_and_does_not_notify() -> None:
    pair = Pair(Fault(fail_after_copies=2))
    base, there = pair.here.ctypes.data, pair.there.ctypes.data
    pieces = CopyList.of([there, there + 8, there + 16], [base, base + 8, base + 16], 4)
    transfer = pair.a.post("bob", Direction.READ, pieces, b"never")
    with pytest.raises(TransportError, match="after 2 of 3 copies"):
        transfer.wait(0.0)
    assert np.flatnonzero(pair.here).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert pair.b.notifications() == []


@pytest.mark.parametrize(("corrupt_byte", "changed"), [(0, 0), (3, 3), (4, 8), (11, 19)])
def test_one_byte_arrives_inverted(corrupt_byte: int, changed: int) -> None:
    pair = Pair(Fault(corrupt_byte=corrupt_byte))
    base, there = pair.here.ctypes.data, pair.there.ctypes.data
    pieces = CopyList.of([there, there + 8, there + 16], [base, base + 8, base + 16], 4)
    pair.a.post("bob", Direction.READ, pieces).wait(0.0)
    good = pair.there.copy()
    good[changed] ^= 0xFF
    touched = [*range(4), *range(8, 12), *range(16, 20)]
    assert np.array_equal(pair.here[touched], good[touched])


def test_notifications_are_lost_and_repeated() -> None:
    pair = Pair(deliveries=(0, 2, 1))
    pair.a.notify("bob", b"lost")
    pair.read(notify=b"twice")
    pair.a.notify("bob", b"once")
    assert [message.payload for message in pair.b.notifications()] == [b"twice", b"twice", b"once"]


def test_bytes_in_flight_still_land_after_the_peer_was_removed() -> None:
    pair = Pair(Fault(delay_steps=1))
    transfer = pair.read(notify=b"never")
    pair.a.remove_peer("bob")
    assert transfer.state is TransferState.PENDING
    pair.fabric.step()
    with pytest.raises(TransportError, match="removed"):
        transfer.wait(0.0)
    assert np.array_equal(pair.here, pair.there)
    assert pair.b.notifications() == []


def test_a_peer_that_closed_fails_what_is_pending() -> None:
    pair = Pair(Fault(delay_steps=1))
    transfer = pair.read()
    pair.b.close()
    pair.fabric.step()
    with pytest.raises(TransportError, match=r"'bob' \(b-1\) has closed"):
        transfer.wait(0.0)
    assert not pair.here.any()


def test_memory_that_was_deregistered_meanwhile_is_not_touched() -> None:
    pair = Pair(Fault(delay_steps=1))
    transfer = pair.read()
    pair.b.deregister([region(pair.there)])
    pair.fabric.step()
    with pytest.raises(TransportError, match="registered: none"):
        transfer.wait(0.0)
    assert not pair.here.any()


def test_the_shuffle_is_repeatable() -> None:
    def order(seed: int) -> list[int]:
        pair = Pair(*[Fault(delay_steps=1)] * 8, shuffle_seed=seed)
        settled: list[int] = []
        transfers = [pair.read(number, 1) for number in range(8)]
        for transfer in transfers:
            transfer.add_done_callback(lambda done: settled.append(transfers.index(done)))
        pair.fabric.step()
        return settled

    assert order(1) == order(1)
    assert sorted(order(1)) == list(range(8))
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_device_memory_and_strangers_are_refused(plain: Pair) -> None:
    with pytest.raises(TransportError, match="host memory only"):
        plain.a.register([MemoryRegion(0, 8, "cuda:0")])
    stranger = FaultyTransport(FaultyFabric(), "elsewhere")
    with pytest.raises(TransportError, match="not on this fabric"):
        plain.a.add_peer("eve", stranger.metadata())
    with pytest.raises(TransportError, match="itself"):
        plain.a.add_peer("me", plain.a.metadata())


def test_of_peers_that_are_added_together_all_are_known_or_none(plain: Pair) -> None:
    first, second = (FaultyTransport(plain.fabric, name).metadata() for name in ("first", "second"))
    stranger = FaultyTransport(FaultyFabric(), "elsewhere").metadata()
    for peers, told in (
        ({"one": first, "two": stranger}, "not on this fabric"),
        ({"one": first, "me": plain.a.metadata()}, "itself"),
        ({"one": first, "bob": second}, "'bob' belongs to"),
        ({"one": first, "again": first}, "known already as 'one'"),
        ({"one": first, "two": b"?"}, "not readable"),
    ):
        with pytest.raises(TransportError, match=told):
            plain.a.add_peers(peers)
        with pytest.raises(TransportError, match="peer 'one' is unknown"):
            plain.a.notify("one", b"word")
    plain.a.add_peers({"one": first, "two": second})
    plain.a.notify("bob", b"word")
    plain.a.notify("one", b"word")
    plain.a.notify("two", b"word")
    plain.a.add_peers({})
