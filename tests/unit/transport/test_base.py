"""Are copy lists, regions and transfers checked once, at birth, with a refusal that says what to do?"""

import numpy as np
import pytest

from kvreshard.transport.base import Copies, Direction, MemoryRegion, Transfer, TransferState, TransportError

TOP = 2**64


def test_copies_are_read_only_uint64() -> None:
    copies = Copies.of([1, 2], [3, 4], 5)
    assert len(copies) == 2
    assert copies.num_bytes == 10
    for array in (copies.local_address, copies.remote_address, copies.length_bytes):
        assert array.dtype == np.uint64
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_copies_leave_the_callers_array_writable() -> None:
    address = np.array([1, 2], dtype=np.uint64)
    Copies.of(address, address, 1)
    address[0] = 7


def test_the_last_byte_of_the_address_space_can_be_copied() -> None:
    assert Copies.of(np.array([TOP - 1], dtype=np.uint64), [0], 1).num_bytes == 1


def test_a_part_knows_its_place_in_the_whole() -> None:
    whole = Copies.of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    part = whole.part(1, 3)
    assert (part.whole, part.first, len(part), part.num_bytes) == (whole, 1, 2, 21)
    flat = part.flat()
    assert [column.tolist() for column in (flat.local_address, flat.remote_address, flat.length_bytes)] == [
        [2, 3], [6, 7], [10, 11]
    ]  # fmt: skip
    assert (len(whole.part(4, 4)), whole.part(4, 4).num_bytes) == (0, 0)
    with pytest.raises(ValueError, match="read-only"):
        flat.local_address[0] = 9
    for first, stop in ((-1, 2), (2, 1), (0, 5)):
        with pytest.raises(TransportError, match=f"pieces \\[{first}, {stop}\\) of 4"):
            whole.part(first, stop)


@pytest.mark.parametrize(
    ("local", "remote", "length", "message"),
    [
        ([1, 2], [1], [1, 1], r"\(2, 1, 2\)"),
        ([1, 2], [1, 2], [1, 0], "piece 1 of 2 has length 0"),
        ([-1], [1], [1], "not negative"),
        ([1.0], [1], [1], "whole numbers"),
        ([[1]], [1], [[1]], "2 dimension"),
        (np.array([TOP - 1], dtype=np.uint64), [0], [2], "local address 0xffffffffffffffff wrap"),
        ([0], np.array([TOP - 4], dtype=np.uint64), [5], "remote address"),
    ],
)
def test_a_wrong_copy_list_is_refused(local: object, remote: object, length: object, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        Copies(local, remote, length)  # what a caller may get wrong


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
    return Transfer("peer", Direction.READ, Copies.of([0], [0], 8), lambda: ticks[-1])


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
