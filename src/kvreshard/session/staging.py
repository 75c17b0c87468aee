"""Where in the staging buffer does each batch of a load lie?

The buffer is used as two halves in turn: while one is permuted, the other is read into. The reads of many batches are placed at
once, as parts of one list per source rank, so that a transport checks each list once and not once per batch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from kvreshard.plan.stage import Batch
from kvreshard.transport.base import Copies

# What is known of so many reads takes 5 MB; a request of 128k tokens may have millions, and its first batch should not wait for them.
MAX_READS = 1 << 16


class PlacedBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch, the address of the half that it fills, and its reads as the destination's transport sees them."""

    batch: Batch
    address: int
    reads: Copies


@dataclass(frozen=True, slots=True)
class Staging:
    """A registered buffer for staged lanes: `size_bytes` from `address`. One request at a time fills it."""

    address: int
    size_bytes: int
    taken: threading.Lock = field(default_factory=threading.Lock)

    @property
    def half_bytes(self) -> int:
        """Bytes of one half, which one batch fills."""
        return self.size_bytes // 2

    def place(self, batches: Sequence[Batch]) -> Iterator[PlacedBatch]:
        """The batches in their order, in one half and the other. Raises TransportError where reads are none."""
        waiting: list[tuple[int, Batch]] = []
        num_reads = 0
        for number, batch in enumerate(batches):
            if waiting and num_reads + len(batch.reads.length) > MAX_READS:
                yield from _place(waiting)
                waiting, num_reads = [], 0
            waiting.append((self.address + number % 2 * self.half_bytes, batch))
            num_reads += len(batch.reads.length)
        yield from _place(waiting)


def _place(batches: Sequence[tuple[int, Batch]]) -> list[PlacedBatch]:
    """Batches with the addresses of their halves."""
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for number, (_, batch) in enumerate(batches):
        by_rank[batch.reads.src_rank].append(number)
    placed: dict[int, PlacedBatch] = {}
    for numbers in by_rank.values():
        halves, reads = [batches[number][0] for number in numbers], [batches[number][1].reads for number in numbers]
        lengths = [len(one.length) for one in reads]
        whole = Copies.of(
            np.concatenate([one.dst_address for one in reads]) + np.repeat(halves, lengths),
            np.concatenate([one.src_address for one in reads]),
            np.concatenate([one.length for one in reads]),
        )
        ends = pairwise([0, *np.add.accumulate(lengths).tolist()])
        for number, (first, stop) in zip(numbers, ends, strict=True):
            address, batch = batches[number]
            placed[number] = PlacedBatch(batch, address, whole.part(first, stop))
    return [placed[number] for number in range(len(batches))]
