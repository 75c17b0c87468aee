"""The buffer of staged reads: one half is read into while the other is permuted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvreshard.plan.copies import CopyList
from kvreshard.plan.stage import Batch

NUM_HALVES = 2


@dataclass(frozen=True, slots=True)
class Staging:
    """A registered buffer for staged copies: `size_bytes` from `address`. One request at a time fills it."""

    address: int
    size_bytes: int
    taken: threading.Lock = field(default_factory=threading.Lock)

    @property
    def half_bytes(self) -> int:
        """Bytes of one half, which one batch fills."""
        return self.size_bytes // NUM_HALVES

    def half(self, number: int) -> int:
        """Address of the half that the batch of this number fills."""
        return self.address + number % NUM_HALVES * self.half_bytes


def reads_into(address: int, batch: Batch) -> CopyList:
    """The reads of a batch into the half at an address."""
    reads = batch.reads
    return replace(reads, dst_address=reads.dst_address + address)
