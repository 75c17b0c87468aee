"""The loads of one rank that are not over: which of them must be looked at in a turn?

1. Those of which something has happened: they were ordered or stopped, their handshake has ended, a transfer has settled (`wake`).
2. Those whose time has come: too late, or not at rest in time. The times stand in a heap.
3. Those that wait for something that does not wake them (`Job.is_polling`).

A load that was given up is kept until its reads have come to rest. Loads are known by numbers: a request may be loaded again.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from kvreshard.session.commands import Failure
from kvreshard.session.job import Job
from kvreshard.session.peer import Peer


class Jobs:
    """Used from the session's thread, but for what it hands to `make` in `add`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._under_way: dict[int, Job] = {}
        self._given_up: dict[int, Job] = {}
        self._of_request: dict[str, set[int]] = {}
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int]] = []
        self._happened: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._polled: set[int] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._under_way.values())

    @property
    def num_given_up(self) -> int:
        """Loads that were given up and whose reads have not settled."""
        return len(self._given_up)

    def peers(self) -> set[Peer]:
        """Those that loads use."""
        return {job.peer for job in (*self._under_way.values(), *self._given_up.values()) if job.peer is not None}

    def add(self, meeting: Future[Peer], make: Callable[[Callable[[], None]], Job]) -> None:
        """A load is ordered. `make`: the job, given what wakes it."""
        number = next(self._numbers)

        def wake() -> None:
            self._happened.put(number)
            self._wake()

        job = self._under_way[number] = make(wake)
        self._of_request.setdefault(job.load.request, set()).add(number)
        heapq.heappush(self._deadlines, (job.deadline_s, number))
        self._happened.put(number)
        meeting.add_done_callback(lambda _: wake())

    def stop(self, request: str, failure: Failure, now_s: float) -> None:
        """Let the loads of a request come to their end."""
        for number in self._of_request.get(request, ()):
            self._stop(number, failure, now_s)

    def stop_all(self, failure: Failure, now_s: float) -> None:
        """Let all come to their end."""
        for number, job in self._under_way.items():
            if not job.is_stopped:
                self._stop(number, failure, now_s)

    def advance(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """Take those that must be looked at as far as they go: (those that are over by now, those given up that are at rest)."""
        over, at_rest = list[Job](), list[Job]()
        for number in self._take_due(now_s):
            job = self._under_way.get(number)
            if job is not None:
                self._advance(number, job, now_s)
                if job.outcome is not None:
                    self._end(number, job)
                    over.append(job)
            elif number in self._given_up and self._given_up[number].is_settled:
                at_rest.append(self._given_up.pop(number))
        return over, at_rest

    def _stop(self, number: int, failure: Failure, now_s: float) -> None:
        job = self._under_way[number]
        job.stop(failure, now_s)
        heapq.heappush(self._deadlines, (job.deadline_s, number))
        self._happened.put(number)

    def _take_due(self, now_s: float) -> list[int]:
        due, self._polled = self._polled, set()
        with contextlib.suppress(queue.Empty):
            while True:
                due.add(self._happened.get_nowait())
        while self._deadlines and self._deadlines[0][0] <= now_s:
            due.add(heapq.heappop(self._deadlines)[1])
        return sorted(due)

    def _advance(self, number: int, job: Job, now_s: float) -> None:
        deadline_s = job.deadline_s
        job.advance(now_s)
        if job.is_polling:
            self._polled.add(number)
        if job.deadline_s != deadline_s:
            heapq.heappush(self._deadlines, (job.deadline_s, number))

    def _end(self, number: int, job: Job) -> None:
        del self._under_way[number]
        self._polled.discard(number)
        self._of_request[job.load.request].discard(number)
        if not self._of_request[job.load.request]:
            del self._of_request[job.load.request]
        job.is_given_up = isinstance(job.outcome, Failure) and not job.is_settled
        if job.is_given_up:
            self._given_up[number] = job
