"""What goes wrong during a soak, and when? Kills, stops and hostile clients, drawn from the seed.

1. `kill -9`, and a restart at the same address a moment later.
2. SIGSTOP, and SIGCONT after less or more than a load may take.
3. A hostile client at an engine's listener (`tests/faults/hostile.py`), which keeps its connections until the next one comes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from tests.faults.hostile import CLIENTS, Client
from tests.soak.members import Member
from tests.soak.router import OPTIONS, Router
from tests.soak.tally import Tally

# They live all the time, so that their memory can be compared.
ELDERS = ("heads-p0", "latent-d0")
KILL_EVERY_S, STOP_EVERY_S, HOSTILE_EVERY_S = 7.0, 4.0, 1.5
STOPS_S = (0.3, 2.0, OPTIONS.load_timeout_s + OPTIONS.settle_timeout_s + 1.5)
AWAY_S = (0.0, 0.3, 1.0)


@dataclass
class Weather:
    """All faults of a soak. Times are seconds of the monotonic clock."""

    members: Sequence[Member]
    router: Router
    rng: random.Random
    tally: Tally
    next_s: dict[str, float] = field(default_factory=dict)
    returns: list[tuple[float, Member]] = field(default_factory=list)
    wakes: list[tuple[float, Member]] = field(default_factory=list)
    _client: Client | None = None
    _attack: Future[object] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def blow(self, now_s: float) -> None:
        """New faults that are due."""
        for name, every_s in (("kill", KILL_EVERY_S), ("stop", STOP_EVERY_S), ("hostile", HOSTILE_EVERY_S)):
            if now_s >= self.next_s.setdefault(name, now_s + self.rng.uniform(0.0, every_s)):
                self.next_s[name] = now_s + self.rng.expovariate(1.0 / every_s)
                getattr(self, f"_{name}")(now_s)

    def calm(self, now_s: float, at_once: bool = False) -> None:
        """Bring back what is due to come back, or everything."""
        for when_s, member in list(self.wakes):
            if at_once or now_s >= when_s:
                self.wakes.remove((when_s, member))
                member.go_on()
        for when_s, member in list(self.returns):
            if at_once or now_s >= when_s:
                self.returns.remove((when_s, member))
                member.start(self.rng.getrandbits(32))

    def _kill(self, now_s: float) -> None:
        member = self.rng.choice([m for m in self.members if m.shape.name not in ELDERS])
        if not member.is_born:
            return
        self.wakes = [(when_s, other) for when_s, other in self.wakes if other is not member]
        member.kill()
        self.router.died(member)
        self.tally.faults["kill -9, prefill" if member.shape.is_prefill else "kill -9, decode"] += 1
        self.returns.append((now_s + self.rng.choice(AWAY_S), member))

    def _stop(self, now_s: float) -> None:
        member = self.rng.choice(self.members)
        if not member.is_born or member.is_stopped:
            return
        seconds = self.rng.choice(STOPS_S)
        member.stop()
        self.tally.faults[
            "SIGSTOP, short" if seconds < OPTIONS.load_timeout_s else "SIGSTOP, longer than a load may take"
        ] += 1
        self.wakes.append((now_s + seconds, member))

    def _hostile(self, now_s: float) -> None:
        if self._attack is not None and not self._attack.done():
            return
        self._drop()
        name, member = self.rng.choice(sorted(CLIENTS)), self.rng.choice(self.members)
        self._client = Client(member.port)
        self._attack = self._pool.submit(CLIENTS[name], self._client)
        self.tally.faults["hostile client"] += 1

    def _drop(self) -> None:
        if self._attack is not None and self._client is not None:
            with self._client, suppress(OSError):  # nobody was there just then
                self._attack.result()
            self._attack = self._client = None

    def close(self) -> None:
        """The last client goes."""
        self._drop()
        self._pool.shutdown()
