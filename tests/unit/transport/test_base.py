"""Are regions and transfers checked once, at birth, with a refusal that says what to do?"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.unit.transport.fake_agent import FakeAgent

from kvreshard.model import UsageError
from kvreshard.plan.copies import CopyList
from kvreshard.transport import nixl
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, TransferState, Transport, TransportError
from kvreshard.transport.memory import Fabric, MemoryTransport
from kvreshard.transport.nixl import NixlTransport

TOP = 2**63


@pytest.mark.parametrize(
    ("address", "size_bytes", "device", "message"),
    [
        (0, 0, "cpu", "positive size"),
        (-1, 5, "cpu", "address space"),
        (TOP - 4, 5, "cpu", "address space"),
        (0, 5, "cuda", "'cuda:N'"),
        (0, 5, "cuda:x", "'cuda:N'"),
        (0, 5, "cpu:0", "'cuda:N'"),
        (0, 5, "tpu:0", "'cuda:N'"),
    ],
)
def test_a_wrong_region_is_refused(address: int, size_bytes: int, device: str, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        MemoryRegion(address, size_bytes, device)


@pytest.mark.parametrize(
    ("address", "size_bytes"),
    [(np.int32(2**31 - 16), np.int32(32)), (np.uint64(2**40), np.int64(32)), (2**40, np.int8(32))],
)
def test_numbers_of_numpy_make_the_same_region(address: np.integer, size_bytes: np.integer) -> None:
    """Those of few bits wrap around, and those of unlike types add up to a fraction."""
    region = MemoryRegion(address, size_bytes)
    assert region == MemoryRegion(int(address), int(size_bytes))
    assert type(region.end) is int


@pytest.fixture(params=["memory", "nixl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    """With the peer 'b'. No call here reaches NIXL's agent, but for the peer."""
    monkeypatch.setattr(nixl, "NixlAgent", lambda name, options: FakeAgent())
    fabric = Fabric()
    found: list[Transport] = [
        MemoryTransport(fabric, name) if request.param == "memory" else NixlTransport(name) for name in "ab"
    ]
    found[0].add_peer("b", found[1].metadata())
    yield found[0]
    for one in found:
        one.close()


COPIES = CopyList.of([0], [0], 8)
WRONG: dict[str, Callable[[Transport], object]] = {
    "the direction of a transfer is of type str, and must be Direction": lambda one: one.post("b", "read", COPIES),
    "the copies of a transfer is of type list, and must be CopyList": lambda one: one.post(
        "b", Direction.READ, [COPIES]
    ),
    "the source column of copies is of type list, and must be ndarray": lambda one: one.post(
        "b", Direction.READ, CopyList(0, 0, [0], [0], [8])
    ),
    "a notification is of type int": lambda one: one.post("b", Direction.READ, COPIES, 5),
    "a notification is of type str, and must be bytes": lambda one: one.notify("b", "done"),
    r"peer \[\] is unknown": lambda one: one.notify([], b"done"),
    "peers to add is of type list, and must be Mapping": lambda one: one.add_peers(["c"]),
    "the name of a peer is of type int, and must be str": lambda one: one.add_peers({5: b""}),
    "the name of a peer is of type list": lambda one: one.add_peer([], b""),
    "regions to deregister is of type MemoryRegion": lambda one: one.deregister(MemoryRegion(4, 4)),
    "a region is of type int": lambda one: one.deregister([4]),
}


@pytest.mark.parametrize(("message", "use"), WRONG.items(), ids=WRONG)
def test_values_of_other_types_are_refused(
    transport: Transport, message: str, use: Callable[[Transport], object]
) -> None:
    with pytest.raises((UsageError, TransportError), match=message):
        use(transport)


def make_transfer(ticks: list[float]) -> Transfer:
    return Transfer("peer", Direction.READ, CopyList.of([0], [0], 8), lambda: ticks[-1])


def test_a_transfer_settles_once() -> None:
    ticks = [1.0]
    transfer = make_transfer(ticks)
    seen: list[TransferState] = []
    transfer.add_done_callback(lambda settled: seen.append(settled.state))
    assert transfer.state is TransferState.PENDING
    assert transfer.seconds is None
    ticks.append(3.5)
    transfer.settle(None)
    ticks.append(9.0)
    transfer.settle(TransportError("too late"))
    transfer.add_done_callback(lambda settled: seen.append(settled.state))
    transfer.wait(0.0)
    assert seen == [TransferState.DONE, TransferState.DONE]
    assert transfer.seconds == 2.5
    assert transfer.error is None


def test_waiting_tells_failure_and_timeout_apart() -> None:
    transfer = make_transfer([0.0])
    with pytest.raises(TimeoutError, match="must not be reused"):
        transfer.wait(0.0)
    transfer.settle(TransportError("broken"))
    with pytest.raises(TransportError, match="broken"):
        transfer.wait(0.0)
