"""One trial of a pair of engines: a cache moves over a real transport and is compared byte for byte.

Ranks are processes (NIXL) or all in this process (memory). All memory is the processor's, or all is a device's.

1. Give every rank its memory, place the layouts' regions there, fill all of it with random bytes, and newly allocated
   destination pages with 0xFF (NaN in every float format), so that bytes that nobody writes show. What the requests move is
   written cell by cell, so that several source ranks that hold one cell hold the same value.
2. Send both layouts to every rank in wire form; each compiles its own routes.
3. Start all requests on all ranks at once, and wait.
4. Compare every byte of every destination rank's memory with what the slow oracle leaves, pages of others included; and
   every source rank's reports with its reporter set.
5. Time a plain copy of as many bytes in the same run, to compare with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout, Region, wire
from kvreshard.model.tables import Request
from kvreshard.plan import elect, match_fields
from kvreshard.plan.cost import CostModel, Way
from kvreshard.testing.oracle import Memory, apply_request, differing_bytes, fill_new_pages, write_values
from kvreshard.testing.rank_memory import PLAIN_COPY_BYTES, time_plain_copy
from kvreshard.testing.rank_mover import Load, Outcome
from kvreshard.testing.ranks import Ranks

Progress = Callable[[str, int, int], None]
"""Takes the stage's name, steps done and steps in all."""
REGION_ALIGN = 4096
STAGING_BYTES = 32 << 20
POISON = 0xFF
# Random bytes that are made at once.
FILLED_BYTES = 64 << 20
# Measured: a process over NIXL takes 20 MB, shared pages counted once; the process that compares takes 200.
RANK_BYTES, OWN_BYTES = 32 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Wrong:
    """Bytes of a destination rank that differ from the oracle's: half-open ranges in a region."""

    rank: int
    region: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Counts, times and findings of a trial. Seconds are wall time of a stage.

    `num_bytes`: of cache that arrived; `num_read_bytes`: what was read or written for it, gaps of staged reads included.
    """

    num_requests: int
    num_bytes: int
    num_read_bytes: int
    num_copies: int
    num_staged_bytes: int
    compile_s: float
    transfer_s: float
    plain_copy_s: float
    num_bytes_compared: int
    errors: tuple[str, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    missing_reports: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every request arrived, every byte is right, and every source rank has all reports."""
        return not (self.errors or self.wrong or self.missing_reports)


def memory_needed(src: EngineLayout, dst: EngineLayout) -> int:
    """Bytes of memory that each rank of a trial needs, staging included."""
    return max(_place(rank.regions)[1] for layout in (src, dst) for rank in layout.ranks) + STAGING_BYTES


def trial_bytes(src: EngineLayout, dst: EngineLayout) -> int:
    """About how many bytes of this machine a trial takes at its peak: both engines' memory, the oracle's copy of the destination's, and the
    buffers of `time_plain_copy`.
    """
    src_bytes, dst_bytes = (
        sum(region.size_bytes for rank in layout.ranks for region in rank.regions) for layout in (src, dst)
    )
    copied_bytes = 2 * min(dst_bytes, PLAIN_COPY_BYTES)
    return src_bytes + 2 * dst_bytes + copied_bytes + OWN_BYTES + RANK_BYTES * (len(src.ranks) + len(dst.ranks))


def run_trial(
    ranks: Ranks,
    src: EngineLayout,
    dst: EngineLayout,
    requests: Sequence[Request],
    *,
    push: bool = False,
    way: Way | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (frozen)
    seed: int = 0,
    timeout_s: float = 120.0,
    progress: Progress = lambda stage, done, total: None,
) -> TrialResult:
    """Move `requests` between two engines on `ranks`, which are connected and as many as both engines have together.

    Ranks are the source's in order, then the destination's. Region addresses of the layouts are ignored.
    """
    trial = _Trial(ranks, src, dst, progress)
    src_memory, dst_memory = trial.memory(trial.src), trial.memory(trial.dst)
    trial.fill(src_memory, dst_memory, requests, seed)
    expected = {place: content.copy() for place, content in dst_memory.items()}
    compile_s = trial.load(way, cost)
    started_s = time.monotonic()
    outcomes = trial.move(requests, push, timeout_s)
    transfer_s = time.monotonic() - started_s
    failed = any(outcome.error is not None for outcome in outcomes)
    missing = () if push or failed else trial.find_missing_reports(len(requests))
    for done, request in enumerate(requests):
        progress("oracle", done, len(requests))
        apply_request(trial.src, trial.dst, src_memory, expected, request)
    progress("oracle", len(requests), len(requests))
    wrong = differing_bytes(expected, trial.memory(trial.dst))
    num_bytes = sum(outcome.moved.num_bytes for outcome in outcomes)
    return TrialResult(
        len(requests),
        num_bytes,
        sum(outcome.moved.num_read_bytes for outcome in outcomes),
        sum(outcome.moved.num_copies for outcome in outcomes),
        sum(outcome.moved.num_staged_bytes for outcome in outcomes),
        compile_s,
        transfer_s,
        time_plain_copy(num_bytes, ranks.device(0)),
        sum(len(content) for content in expected.values()),
        tuple(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)),
        tuple(Wrong(rank, region, tuple(ranges)) for (rank, region), ranges in wrong.items()),
        missing,
    )


def _place(regions: Sequence[Region]) -> tuple[dict[str, int], int]:
    """Offset of each region in a rank's memory, and where they end."""
    offsets, end = {}, 0
    for region in regions:
        offsets[region.name] = end
        end += -(-region.size_bytes // REGION_ALIGN) * REGION_ALIGN
    return offsets, end


class _Trial:
    """Two engines on ranks, their regions placed in the ranks' memory. The source's ranks come first."""

    def __init__(self, ranks: Ranks, src: EngineLayout, dst: EngineLayout, progress: Progress) -> None:
        self._ranks, self._num_src, self._progress = ranks, len(src.ranks), progress
        self.src, self.dst = self._relocated(src, 0), self._relocated(dst, self._num_src)

    def _relocated(self, layout: EngineLayout, first: int) -> EngineLayout:
        addresses = {}
        for number, rank in enumerate(layout.ranks, start=first):
            offsets, _ = _place(rank.regions)
            addresses[rank.rank] = {name: self._ranks.address(number) + offset for name, offset in offsets.items()}
        return relocate(layout, addresses, self._ranks.device(first))

    def memory(self, layout: EngineLayout) -> dict[tuple[int, str], NDArray[np.uint8]]:
        """The present bytes of each region of one engine."""
        found = {}
        for number, rank in enumerate(layout.ranks, start=0 if layout is self.src else self._num_src):
            offsets, _ = _place(rank.regions)
            memory = self._ranks.memory(number)
            for region in rank.regions:
                start = offsets[region.name]
                found[rank.rank, region.name] = memory[start : start + region.size_bytes]
        return found

    def fill(self, src_memory: Memory, dst_memory: Memory, requests: Sequence[Request], seed: int) -> None:
        """Fill all memory: random bytes, poison in new pages, the cells of the requests at the source."""
        rng = np.random.default_rng(seed)
        places = [*src_memory.values(), *dst_memory.values()]
        for done, content in enumerate(places):
            self._progress("fill", done, len(places))
            for start in range(0, len(content), FILLED_BYTES):
                part = content[start : start + FILLED_BYTES]
                part[:] = rng.integers(0, 1 << 64, -(-len(part) // 8), dtype=np.uint64).view(np.uint8)[: len(part)]
        for request in requests:
            fill_new_pages(self.dst, dst_memory, request, POISON)
        self._progress("fill", len(places), len(places))
        for number, request in enumerate(requests):
            self._progress("values", number, len(requests))
            write_values(self.src, self.dst, src_memory, request, seed + number)
        for number in range(self._num_src + len(self.dst.ranks)):
            self._ranks.give(number)

    def load(self, way: Way | None, cost: CostModel) -> float:
        """Send the layouts; returns the longest time in seconds that a rank took to decode, elect, compile and prove."""
        src, dst, num_src = wire.encode(self.src), wire.encode(self.dst), self._num_src
        numbers, longest_s = [rank.rank for rank in (*self.src.ranks, *self.dst.ranks)], 0.0
        for number, rank in enumerate(numbers):
            self._progress("compile", number, len(numbers))
            is_source = number < num_src
            first_peer, staging_bytes = (num_src, 0) if is_source else (0, STAGING_BYTES)
            staging = self._ranks.address(number) + self._ranks.memory_bytes - STAGING_BYTES
            load = Load(src, dst, is_source, rank, first_peer, way, staging, staging_bytes, cost)
            longest_s = max(longest_s, self._ranks.call(number, "load", load))
        self._progress("compile", len(numbers), len(numbers))
        return longest_s

    def move(self, requests: Sequence[Request], push: bool, timeout_s: float) -> list[Outcome]:
        """Start all requests on all ranks that take part, and wait for the outcomes."""
        first = 0 if push else self._num_src
        movers = range(first, self._num_src + len(self.dst.ranks))
        jobs = []
        for index, request in enumerate(requests):
            report = f"request {index}".encode()
            jobs += [(number, self._ranks.call(number, "start_request", request, report, push)) for number in movers]
        outcomes: list[Outcome] = []
        for number, job in jobs:
            self._progress("transfer", len(outcomes), len(jobs))
            outcomes.append(self._ranks.call(number, "wait_request", job, timeout_s, timeout_s=timeout_s + 60.0))
        self._progress("transfer", len(jobs), len(jobs))
        return outcomes

    def find_missing_reports(self, num_requests: int) -> tuple[str, ...]:
        """A sentence for each source rank that did not get every reporter's report of every request exactly once."""
        reporters = elect(self.src, self.dst, match_fields(self.src, self.dst).names).reporters
        number_of = {rank.rank: self._num_src + index for index, rank in enumerate(self.dst.ranks)}
        found = []
        for number, rank in enumerate(self.src.ranks):
            wanted = sorted(
                (f"rank{number_of[reporter]}", f"request {index}".encode())
                for reporter in reporters[rank.rank]
                for index in range(num_requests)
            )
            got = sorted(self._ranks.notifications(number, len(wanted)))
            if got != wanted:
                found.append(f"source rank {rank.rank} got {len(got)} reports of {len(wanted)}: {got[:4]}")
        return tuple(found)
