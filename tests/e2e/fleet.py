"""Engines of two roles behind a router, clients that go on all the time, and engines that come and go meanwhile.

As in a cluster: an engine that is to go gets no new requests, and ends those that it has.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.e2e.cases import OURS
from tests.e2e.engine import Engine, EngineSpec
from tests.e2e.metrics import await_total, total
from tests.e2e.router import route

MODEL, TP_DECODE = "gemma3", 2
NUM_CLIENTS = 3
LENGTHS = (17, 40, 63, 64, 65, 130, 257)
Place = tuple[str, int]
"""A role, `p` or `d`, and a number."""


def spec(place: Place, release: str) -> EngineSpec:
    """One engine of the fleet; the number tells it from its like."""
    role, number = place
    tp, connector_role = (1, "kv_producer") if role == "p" else (TP_DECODE, "kv_consumer")
    named = (("KVRESHARD_FLEET_NUMBER", str(number)),)
    return EngineSpec(MODEL, tp=tp, connector=OURS, role=connector_role, vllm=release, environment=named)


@dataclass
class Fleet:
    """Engines that take requests, and what came of the requests. Clients are threads.

    A request waits while there is no decode engine. Without a prefill engine, the decode engine computes it. `pairs`: requests by the releases of both
    engines; `num_alone`: those that a decode engine computed.
    """

    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]
    taking: dict[Place, Engine] = field(default_factory=dict)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_alone: int = 0
    faults: list[str] = field(default_factory=list)
    is_over: bool = False
    _busy: Counter[Engine] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Clients ask as long as this lasts."""
        clients = [threading.Thread(target=self._client, args=(seed,), daemon=True) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()
            for client in clients:
                client.join(timeout=120)
        assert not any(client.is_alive() for client in clients)

    def _client(self, seed: int) -> None:
        """One request after the other, each through engines drawn at random."""
        rng = random.Random(seed)
        while not self.is_over:
            with self._taken(rng) as engines:
                if engines:
                    self._ask(rng.randrange(len(self.prompts)), engines)

    def _ask(self, number: int, engines: Sequence[Engine]) -> None:
        *prefills, decode = engines
        words = self.prompts[number]
        answer = route(prefills[0], decode, [words])[0].decode if prefills else decode.generate([words])[0]
        releases_of = tuple(engine.spec.vllm for engine in engines)
        with self._changed:
            if answer.error or answer.tokens != list(self.expected[number]):
                self.faults.append(f"{releases_of}, {len(words)} tokens: {answer}")
            if prefills:
                self.pairs[prefills[0].spec.vllm, decode.spec.vllm] += 1
            else:
                self.num_alone += 1
            self._changed.notify_all()

    @contextmanager
    def _taken(self, rng: random.Random) -> Iterator[Sequence[Engine]]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._of_role("d")) or self.is_over)
            chosen = [rng.choice(found) for found in map(self._of_role, "pd") if found] if self._of_role("d") else []
            self._busy.update(chosen)
        try:
            yield chosen
        finally:
            with self._changed:
                self._busy.subtract(chosen)
                self._changed.notify_all()

    def _of_role(self, role: str) -> list[Engine]:
        return [engine for place, engine in self.taking.items() if place[0] == role]

    def add(self, place: Place, engine: Engine) -> None:
        """Route to an engine too."""
        with self._changed:
            self.taking[place] = engine
            self._changed.notify_all()

    def take_out(self, place: Place, successor: Engine | None = None) -> Engine:
        """Route to the successor if there is one, and return the former engine once it has answered all that it had."""
        with self._changed:
            former = self.taking.pop(place)
            if successor is not None:
                self.taking[place] = successor
            assert self._changed.wait_for(lambda: not self._busy[former], timeout=120)
        return former

    def go_on(self, num_requests: int) -> None:
        """Let some requests pass."""
        with self._changed:
            wanted = self.num_answered + num_requests
            assert self._changed.wait_for(lambda: self.num_answered >= wanted, timeout=240), "the clients stand still"

    @property
    def num_answered(self) -> int:
        return self.pairs.total() + self.num_alone


def check_clean(engine: Engine) -> float:
    """How many parts of loads the engine's ranks have done; nothing failed, and nothing was computed that was to be loaded."""
    for name in ("kvreshard_failures_total", "kvreshard_fallbacks_total", 'kvreshard_leases_total{end="expired"'):
        assert total(engine, name) == 0, (str(engine.spec), name)
    return await_total(engine, "kvreshard_load_seconds_count", 0)
