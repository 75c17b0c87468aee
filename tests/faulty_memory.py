"""The in-process transport with faults on request.

1. A transport asks its fault plan at each post, and its delivery plan at each notification, what shall happen to it.
2. `FaultyFabric.step` is the clock of faults: a transfer delayed by n steps moves its bytes in the n-th step, not before, so that a caller
   who reuses memory too early is caught. Nothing here sleeps or depends on real time.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvreshard.plan.copies import CopyList
from kvreshard.transport.base import Transfer, TransportError, closed_while_pending
from kvreshard.transport.memory import Fabric, MemoryTransport


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one post. The default is what a good transport does.

    Attributes:
        delay_steps: bytes move and the transfer settles in that many calls of `FaultyFabric.step`; 0 is within `post`.
        drop: no byte moves and the transfer stays pending until its transport closes.
        fail_after_copies: only so many copies move, then the transfer fails.
        corrupt_byte: this byte of the transfer, counted over its copies in order, arrives inverted.
    """

    delay_steps: int = 0
    drop: bool = False
    fail_after_copies: int | None = None
    corrupt_byte: int | None = None


FaultPlan = Callable[[int, Transfer], Fault]
"""The fault of a transport's n-th post, n from 0."""

DeliveryPlan = Callable[[int, str, bytes], int]
"""How often a transport's n-th notification arrives, given n from 0, peer and payload: 0 loses it, 2 repeats it."""


def no_fault(_index: int, _transfer: Transfer) -> Fault:
    """The fault plan of a good transport."""
    return Fault()


def deliver_once(_index: int, _peer: str, _payload: bytes) -> int:
    """The delivery plan of a good transport."""
    return 1


@dataclass(slots=True, eq=False)
class _Pending:
    """A transfer that has not settled. `due_step` None: never. `finish`: moves its bytes and settles it."""

    owner: FaultyTransport
    transfer: Transfer
    due_step: int | None
    finish: Callable[[], None]


class FaultyFabric(Fabric):
    """A fabric with delayed transfers. `shuffle_seed`: settle those of one step in a shuffled order, the same for the same seed."""

    def __init__(self, shuffle_seed: int | None = None) -> None:
        super().__init__()
        self.pending: list[_Pending] = []
        self.now_step = 0
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)

    def step(self, count: int = 1) -> int:
        """Let `count` steps pass; returns how many transfers settled."""
        settled = 0
        for _ in range(count):
            with self.lock:
                self.now_step += 1
                due = [entry for entry in self.pending if entry.due_step == self.now_step]
                if self._random is not None:
                    self._random.shuffle(due)
                self.pending = [entry for entry in self.pending if entry not in due]
            for entry in due:
                entry.finish()
            settled += len(due)
        return settled

    @property
    def num_pending(self) -> int:
        """Transfers that have not settled, the dropped ones included."""
        return len(self.pending)


class FaultyTransport(MemoryTransport):
    """A `MemoryTransport` that misbehaves. `faults`: asked once per post; `deliveries`: once per notification, posted with a transfer or alone."""

    def __init__(
        self,
        fabric: FaultyFabric,
        name: str = "memory",
        *,
        faults: FaultPlan = no_fault,
        deliveries: DeliveryPlan = deliver_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fabric, name, clock=clock)
        self._steps, self._faults, self._deliveries = fabric, faults, deliveries
        self._num_posts = self._num_notifications = 0
        self._fault_of: dict[Transfer, Fault] = {}
        self._removed: set[Transfer] = set()

    def remove_peer(self, name: str) -> None:
        """The bytes of a delayed transfer still move in its step: they were in flight."""
        super().remove_peer(name)
        pending = (entry.transfer for entry in self._steps.pending if entry.owner is self)
        self._removed |= {transfer for transfer in pending if transfer.peer == name}

    def carry_out(self, target: str, transfer: Transfer, copies: CopyList, notify: bytes | None) -> None:
        """Now, or in the step that the fault says."""
        with self.fabric.lock:
            fault = self._fault_of[transfer] = self._faults(self._num_posts, transfer)
            self._num_posts += 1
            if fault.drop or fault.delay_steps > 0:
                due_step = None if fault.drop else self._steps.now_step + fault.delay_steps
                finish = lambda: super(FaultyTransport, self).carry_out(target, transfer, copies, notify)  # noqa: E731
                self._steps.pending.append(_Pending(self, transfer, due_step, finish))
                return
        super().carry_out(target, transfer, copies, notify)

    def move(self, transfer: Transfer, copies: CopyList) -> None:
        """Stops and inverts as the fault says."""
        fault = self._fault_of.pop(transfer)
        count = len(copies.length) if fault.fail_after_copies is None else fault.fail_after_copies
        dst, length = copies.dst_address[:count], copies.length[:count]
        super().move(transfer, CopyList(copies.src_rank, copies.dst_rank, copies.src_address[:count], dst, length))
        if fault.corrupt_byte is not None:
            ends = np.cumsum(length)
            row = int(np.searchsorted(ends, fault.corrupt_byte, side="right"))
            if row < len(ends):
                offset = fault.corrupt_byte - int(ends[row] - length[row])
                ctypes.c_ubyte.from_address(int(dst[row]) + offset).value ^= 0xFF
        if fault.fail_after_copies is not None:
            raise TransportError(
                f"injected: {transfer.direction.value} with {transfer.peer!r} failed after {count} of {transfer.num_descriptors} copies"
            )
        if transfer in self._removed:
            raise TransportError(f"peer {transfer.peer!r} was removed while its transfer was pending")

    def deliver(self, target: str, peer: str, payload: bytes) -> None:
        """As often as the delivery plan says."""
        times = self._deliveries(self._num_notifications, peer, payload)
        self._num_notifications += 1
        for _ in range(times):
            super().deliver(target, peer, payload)

    def close(self) -> None:
        """No byte of a pending transfer moves afterwards."""
        with self.fabric.lock:
            mine = [entry for entry in self._steps.pending if entry.owner is self]
            self._steps.pending = [entry for entry in self._steps.pending if entry.owner is not self]
            super().close()
        for entry in mine:
            entry.transfer.settle(closed_while_pending(self.name))
