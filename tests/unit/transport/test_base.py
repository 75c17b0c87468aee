"""Are regions and transfers checked once, at birth, with a refusal that says what to do?"""

import pytest

from kvreshard.plan.copies import CopyList
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, TransferState, TransportError

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
