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
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout, Region, wire
from kvreshard.model.request_form import to_form
from kvreshard.model.tables import Request
from kvreshard.plan import elect, match_fields
from kvreshard.plan.cost import CostModel, Way
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values
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
    missing_reports: tuple[str, ...] = field(default=())

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
    num_src = len(src.ranks)
    src, dst = _relocated(ranks, src, 0), _relocated(ranks, dst, num_src)
    src_memory, dst_memory = _memory(ranks, src, 0), _memory(ranks, dst, num_src)
    _fill(src_memory, dst_memory, dst, requests, seed, progress)
    for number, request in enumerate(requests):
        progress("values", number, len(requests))
        write_values(src, dst, src_memory, request, seed + number)
    for number in range(num_src + len(dst.ranks)):
        ranks.give(number)
    expected = {place: content.copy() for place, content in dst_memory.items()}
    compile_s = _load(ranks, src, dst, way, cost, progress)
    started_s = time.monotonic()
    outcomes = _move(ranks, src, dst, requests, push, timeout_s, progress)
    transfer_s = time.monotonic() - started_s
    failed = any(outcome.error is not None for outcome in outcomes)
    missing = () if push or failed else _missing_reports(ranks, src, dst, len(requests))
    for done, request in enumerate(requests):
        progress("oracle", done, len(requests))
        apply_request(src, dst, src_memory, expected, request)
    progress("oracle", len(requests), len(requests))
    wrong = differing_bytes(expected, _memory(ranks, dst, num_src))
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


def _relocated(ranks: Ranks, layout: EngineLayout, first: int) -> EngineLayout:
    addresses = {}
    for number, rank in enumerate(layout.ranks, start=first):
        offsets, _ = _place(rank.regions)
        addresses[rank.rank] = {name: ranks.address(number) + offset for name, offset in offsets.items()}
    return relocate(layout, addresses, ranks.device(first))


def _memory(ranks: Ranks, layout: EngineLayout, first: int) -> dict[tuple[int, str], NDArray[np.uint8]]:
    found = {}
    for number, rank in enumerate(layout.ranks, start=first):
        offsets, _ = _place(rank.regions)
        memory = ranks.memory(number)
        for region in rank.regions:
            start = offsets[region.name]
            found[rank.rank, region.name] = memory[start : start + region.size_bytes]
    return found


def _fill(
    src_memory: dict[tuple[int, str], NDArray[np.uint8]],
    dst_memory: dict[tuple[int, str], NDArray[np.uint8]],
    dst: EngineLayout,
    requests: Sequence[Request],
    seed: int,
    progress: Progress,
) -> None:
    rng = np.random.default_rng(seed)
    places = [*src_memory.values(), *dst_memory.values()]
    for done, content in enumerate(places):
        progress("fill", done, len(places))
        for start in range(0, len(content), FILLED_BYTES):
            part = content[start : start + FILLED_BYTES]
            part[:] = rng.integers(0, 1 << 64, -(-len(part) // 8), dtype=np.uint64).view(np.uint8)[: len(part)]
    for request in requests:
        for group in dst.groups:
            pages = request.dst_new_pages.get(group.name, np.zeros(0, dtype=np.int64)).tolist()
            for rank in dst.ranks:
                for slab in (slab for slab in rank.slabs if slab.pool == group.pool):
                    for page in pages:
                        start = slab.offset_bytes + page * slab.page_stride_bytes
                        dst_memory[rank.rank, slab.region][start : start + slab.page_bytes] = POISON
    progress("fill", len(places), len(places))


def _load(
    ranks: Ranks, src: EngineLayout, dst: EngineLayout, way: Way | None, cost: CostModel, progress: Progress
) -> float:
    """Send the layouts; returns the longest time in seconds that a rank took to decode, elect, compile and prove."""
    src_wire, dst_wire, num_src = wire.encode(src), wire.encode(dst), len(src.ranks)
    total, longest_s = num_src + len(dst.ranks), 0.0
    for number in range(total):
        progress("compile", number, total)
        is_source = number < num_src
        rank = (src.ranks[number] if is_source else dst.ranks[number - num_src]).rank
        staging = ranks.address(number) + ranks.memory_bytes - STAGING_BYTES
        load = Load(
            src_wire, dst_wire, is_source, rank, num_src if is_source else 0, way, staging,
            0 if is_source else STAGING_BYTES, cost,
        )  # fmt: skip
        longest_s = max(longest_s, ranks.call(number, "load", load))
    progress("compile", total, total)
    return longest_s


def _move(
    ranks: Ranks,
    src: EngineLayout,
    dst: EngineLayout,
    requests: Sequence[Request],
    push: bool,
    timeout_s: float,
    progress: Progress,
) -> list[Outcome]:
    first = 0 if push else len(src.ranks)
    movers = range(first, len(src.ranks) + len(dst.ranks))
    jobs = []
    for index, request in enumerate(requests):
        form = to_form(request)
        for number in movers:
            jobs.append((number, ranks.call(number, "start_request", form, f"request {index}".encode(), push)))
    outcomes: list[Outcome] = []
    for number, job in jobs:
        progress("transfer", len(outcomes), len(jobs))
        outcomes.append(ranks.call(number, "wait_request", job, timeout_s, timeout_s=timeout_s + 60.0))
    progress("transfer", len(jobs), len(jobs))
    return outcomes


def _missing_reports(ranks: Ranks, src: EngineLayout, dst: EngineLayout, num_requests: int) -> tuple[str, ...]:
    """A sentence for each source rank that did not get every reporter's report of every request exactly once."""
    reporters = elect(src, dst, match_fields(src, dst).names).reporters
    number_of = {rank.rank: len(src.ranks) + index for index, rank in enumerate(dst.ranks)}
    found = []
    for number, rank in enumerate(src.ranks):
        wanted = sorted(
            (f"rank{number_of[reporter]}", f"request {index}".encode())
            for reporter in reporters[rank.rank]
            for index in range(num_requests)
        )
        got = sorted(ranks.notifications(number, len(wanted)))
        if got != wanted:
            found.append(f"source rank {rank.rank} got {len(got)} reports of {len(wanted)}: {got[:4]}")
    return tuple(found)
