"""How does a soak go, from the first engine's start to the last count?

1. Start every engine, count everything once a fifth of the time is over.
2. Send requests, let faults happen, until the time is over and enough has happened; a slow machine takes longer for that.
3. Bring everybody back, wait until every request and every lease has ended, and count again: no page, lease, job, handle or
   quarantine may be left, and no free page may have been written to.
4. End the engines; each must end by itself.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

from tests.soak.engine import Counters
from tests.soak.members import PATIENCE_S, Member
from tests.soak.router import BOUND_S, LEASE_S, OPTIONS, ROUTE_S, Router
from tests.soak.shapes import SHAPES
from tests.soak.stalls import Stalls
from tests.soak.tally import MAX_GROWTH_BYTES, Tally
from tests.soak.weather import ELDERS, Weather

# Without InfiniBand: where the system has its libibverbs beside the one in NIXL's wheel, a process that has loaded both ends with a
# segmentation fault, in a library's last words after everything of ours is over (NIXL 1.5.1).
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "fatal"}
# What must be nothing when everything has ended.
AT_REST = ("leases", "quarantined", "jobs", "scratch_places", "pages_missing", "pages_trespassed", "handles")
TURN_S = 0.005
# Eight processes that start at once took 60 s on two cores that had four other things to do.
BIRTH_S = 180.0
# How many times as long a soak may take in which not enough happens.
MAX_TIMES = 15
COUNT_EVERY_S = 1.0
# Measured: none in tens of thousands. A machine that stands still for seconds has some.
MAX_INNOCENT = 0.002


class Soak:
    """One run. The clock is real: everything here is about processes. `is_enough`: whether it has seen what it is there for."""

    def __init__(
        self, seconds: float, seed: int, log: Path, is_enough: Callable[[Tally], bool] = lambda tally: True
    ) -> None:
        os.environ.update(ENVIRONMENT)
        self.tally = Tally(seed, seconds)
        self._rng = random.Random(seed)
        self._members = {shape.name: Member(shape, OPTIONS, str(log)) for shape in SHAPES}
        self._stalls = Stalls()
        self._router = Router(self._members, self._rng, self.tally, self._stalls)
        self._weather = Weather(list(self._members.values()), self._router, self._rng, self.tally)
        self._seconds, self._is_enough = seconds, is_enough

    def run(self) -> Tally:
        """From start to end; whatever happens, no process is left."""
        try:
            for member in self._members.values():
                member.start(self._rng.getrandbits(32))
            self._until(lambda: all(member.is_born for member in self._members.values()), BIRTH_S, "were not born")
            self._storm()
            self._weather.calm(0.0, at_once=True)
            self._weather.close()  # waits for a client that may be at an engine that was stopped
            self._until(lambda: not self._router.flights, BOUND_S + ROUTE_S + PATIENCE_S, "have requests")
            self._until(lambda: all(member.is_born for member in self._members.values()), BIRTH_S, "did not return")
            self._take_stock()
            self._end()
        finally:
            self._stalls.close()
            self.tally.stalls_s = [stop - start for start, stop in self._stalls.intervals]
            for member in self._members.values():
                if member.process is not None:
                    member.process.kill()
        return self.tally

    def _storm(self) -> None:
        started_s = now_s = time.monotonic()
        is_counted = False
        while now_s < started_s + self._seconds or not (
            self._is_enough(self.tally) or now_s > started_s + MAX_TIMES * self._seconds
        ):
            self._router.launch(now_s)
            self._router.abort(now_s)
            self._weather.blow(now_s)
            self._weather.calm(now_s)
            if not is_counted and now_s > started_s + self._seconds / 5:
                is_counted = True
                for name in ELDERS:
                    self._members[name].counts_asked += 1
                    self._members[name].say("count")
            self._listen()
            now_s = time.monotonic()

    def _listen(self) -> None:
        pipes = {member.pipe: member for member in self._members.values() if member.process is not None}
        open_pipes = [pipe for pipe in pipes if pipe is not None and not pipe.closed]
        for pipe in connection.wait(open_pipes, TURN_S):
            member = pipes[pipe]
            try:
                while not pipe.closed and pipe.poll():
                    self._hear(member, *pipe.recv())
            except (EOFError, ConnectionError):
                self._crashed(member)
        self._router.lose(time.monotonic())

    def _hear(self, member: Member, word: str, *parts: object) -> None:
        if word == "born":
            member.port, member.is_born = int(str(parts[0])), True
        elif word == "counted":
            member.counted.append(parts)
        else:
            self._router.hear(member, word, *parts)

    def _crashed(self, member: Member) -> None:
        """A process that ended though nobody killed it."""
        member.bury()
        code = member.process.exitcode if member.process is not None else None
        self.tally.complain(f"engine {member.shape.name} ended by itself with {code}")
        self._router.died(member)
        member.start(self._rng.getrandbits(32))

    def _until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self._router.abort(time.monotonic())
            self._listen()
            if time.monotonic() > deadline_s:
                self.tally.complain(f"after {timeout_s:g} s some engines still {what}")
                return

    def _take_stock(self) -> None:
        """Count until all are at rest; leases of readers that died end by time."""
        deadline_s = time.monotonic() + 2 * LEASE_S + BOUND_S + PATIENCE_S
        waiting = list(self._members.values())
        while waiting and time.monotonic() < deadline_s:
            for member in waiting:
                member.counts_asked += 1
                member.say("count")
            self._until(self._has_counted, PATIENCE_S, "do not count")
            waiting = [member for member in waiting if member.counted and not _is_at_rest(member.counted[-1])]
            again_s = time.monotonic() + COUNT_EVERY_S
            while waiting and time.monotonic() < again_s:
                self._listen()
        for member in waiting:
            self.tally.complain(f"engine {member.shape.name} did not come to rest: {member.counted[-1]}")
        if self.tally.innocent > MAX_INNOCENT * self.tally.num_ended:
            self.tally.complain(f"{self.tally.innocent} loads failed though their source and reader were well")
        for member in self._members.values():
            if member.counted:
                self.tally.leases.update(member.counted[-1][2])
        for name in ELDERS:
            first, last = self._members[name].counted[0][0], self._members[name].counted[-1][0]
            self.tally.growth_bytes[name] = last.resident_bytes - first.resident_bytes
            self.tally.growth_fds[name] = last.fds - first.fds
            if self.tally.growth_bytes[name] > MAX_GROWTH_BYTES:
                self.tally.complain(f"engine {name} grew by {self.tally.growth_bytes[name] / 1e6:.0f} MB")

    def _has_counted(self) -> bool:
        return all(len(member.counted) >= member.counts_asked for member in self._members.values())

    def _end(self) -> None:
        for member in self._members.values():
            member.say("end")
        for member in self._members.values():
            if member.process is not None:
                member.process.join(PATIENCE_S)
                if member.process.exitcode != 0:
                    self.tally.complain(f"engine {member.shape.name} ended with {member.process.exitcode}")


def _is_at_rest(counted: tuple[Counters, tuple[int, ...], dict[str, int]]) -> bool:
    counters, live, _ = counted
    return not any(live) and not any(getattr(counters, name) for name in AT_REST)
