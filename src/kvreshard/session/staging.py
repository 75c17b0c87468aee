"""Where in the staging buffer does each batch of a load lie?

The buffer is used as two halves in turn: while one is permuted, the other is read into. The reads of many batches are placed at
once, as parts of one list per source rank, so that a transport checks each list once and not once per batch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvreshard.model.loops import shifted
from kvreshard.plan.copies import CopyList, Int64s
from kvreshard.plan.stage import Batch
from kvreshard.transport.base import Copies, CopiesPart

# What is known of so many reads takes 5 MB; a request of 128k tokens may have millions, and its first batch should not wait for them.
MAX_READS = 1 << 16


class PlacedBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch, the address of the half that it fills, and its reads as the destination's transport sees them."""

    batch: Batch
    address: int
    reads: CopiesPart


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
            if waiting and num_reads + batch.stop - batch.first > MAX_READS:
                yield from _place(waiting)
                waiting, num_reads = [], 0
            waiting.append((self.address + number % 2 * self.half_bytes, batch))
            num_reads += batch.stop - batch.first
        if waiting:
            yield from _place(waiting)


def _place(batches: Sequence[tuple[int, Batch]]) -> list[PlacedBatch]:
    """Batches with the addresses of their halves."""
    by_rank: defaultdict[int, list[tuple[int, Batch]]] = defaultdict(list)
    for one in batches:
        by_rank[one[1].src_rank].append(one)
    rows = {rank: _reads(found).part for rank, found in by_rank.items()}
    done = dict.fromkeys(rows, 0)
    placed = []
    for address, batch in batches:
        rank = batch.src_rank
        first = done[rank]
        done[rank] = stop = first + batch.stop - batch.first
        placed.append(PlacedBatch(batch, address, rows[rank](first, stop)))
    return placed


def _reads(batches: Sequence[tuple[int, Batch]]) -> Copies:
    """All reads of batches from one source rank, into their halves, as one list."""
    listed: list[tuple[CopyList, int, int]] = []
    for _, batch in batches:
        if listed and listed[-1][0] is batch.listed and listed[-1][2] == batch.first:
            listed[-1] = batch.listed, listed[-1][1], batch.stop
        else:
            listed.append((batch.listed, batch.first, batch.stop))
    parts = [one.part(first, stop) for one, first, stop in listed]
    dst = _joined([part.dst_address for part in parts])
    counts, halves = [batch.stop - batch.first for _, batch in batches], [address for address, _ in batches]
    src, length = _joined([part.src_address for part in parts]), _joined([part.length for part in parts])
    return Copies.of(shifted(dst, counts, halves), src, length)


def _joined(arrays: list[Int64s]) -> Int64s:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
