"""A fleet of two prefill and two decode engines is upgraded to another release of vLLM, engine by engine, under load.

As in a cluster: an engine that is to be replaced gets no new requests, ends those that it has, and its successor has started by then. The other
role's engines, of either release, go on all the time. No request is lost, none is wrong, and every one is loaded.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from tests import releases
from tests.e2e.cases import OURS
from tests.e2e.engine import RELEASE, Engine, EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import route
from tests.releases import INSTALLED, NEWEST

MODEL, TP_DECODE = "gemma3", 2
NUM_CLIENTS = 3
LENGTHS = (17, 40, 63, 64, 65, 130, 257)
LEAST_EACH = 5
"""Requests between two steps of the upgrade."""


def spec(role: str, number: int, release: str) -> EngineSpec:
    """One engine of the fleet; `number` tells it from its like."""
    tp, connector_role = (1, "kv_producer") if role == "p" else (TP_DECODE, "kv_consumer")
    named = (("KVRESHARD_FLEET_NUMBER", str(number)),)
    return EngineSpec(MODEL, tp=tp, connector=OURS, role=connector_role, vllm=release, environment=named)


@dataclass
class Fleet:
    """Engines that take requests, by (role, number), and what came of the requests. Clients are threads."""

    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]
    taking: dict[tuple[str, int], Engine] = field(default_factory=dict)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    answered: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_over: bool = False
    _busy: Counter[Engine] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def client(self, seed: int) -> None:
        """One request after the other, each through a pair drawn at random."""
        rng = random.Random(seed)
        while not self.is_over:
            with self._taken(rng) as (prefill, decode):
                number = rng.randrange(len(self.prompts))
                (answer,) = route(prefill, decode, [self.prompts[number]])
                releases_of = prefill.spec.vllm, decode.spec.vllm
                if answer.decode.error or answer.decode.tokens != list(self.expected[number]):
                    self.faults.append(f"{releases_of}, {len(self.prompts[number])} tokens: {answer}")
                with self._changed:
                    self.pairs[releases_of] += 1
                    self._changed.notify_all()

    @contextmanager
    def _taken(self, rng: random.Random):  # type: ignore[no-untyped-def]
        with self._changed:
            chosen = [
                rng.choice([engine for (role, _), engine in self.taking.items() if role == side]) for side in "pd"
            ]
            self._busy.update(chosen)
        try:
            yield chosen
        finally:
            with self._changed:
                self._busy.subtract(chosen)
                self._changed.notify_all()

    def replace(self, place: tuple[str, int], successor: Engine) -> Engine:
        """Route to the successor, and return the former engine once it has answered all that it had."""
        with self._changed:
            former, self.taking[place] = self.taking[place], successor
            assert self._changed.wait_for(lambda: not self._busy[former], timeout=120)
        return former

    def go_on(self, num_requests: int) -> None:
        """Let some requests pass."""
        with self._changed:
            wanted = self.pairs.total() + num_requests
            assert self._changed.wait_for(lambda: self.pairs.total() >= wanted, timeout=240), "the clients stand still"


@pytest.mark.skipif(RELEASE != INSTALLED, reason="it names its releases itself")
@pytest.mark.timeout(1800)
def test_a_fleet_is_upgraded_under_load(nursery: Nursery) -> None:
    releases.fetch(NEWEST)
    nursery.stop_all()
    prompts = [prompt(length, 77) for length in LENGTHS]
    ordinary = EngineSpec(MODEL, tp=TP_DECODE)
    expected = [output.tokens for output in nursery.engine(ordinary).generate(prompts)]
    nursery.stop(ordinary)
    places = [(role, number) for number in (0, 1) for role in "pd"]
    fleet = Fleet(prompts, expected)
    for place in places:
        fleet.taking[place] = nursery.engine(spec(*place, INSTALLED))
    clients = [threading.Thread(target=fleet.client, args=(seed,), daemon=True) for seed in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    num_loads = 0.0
    try:
        for place in places:
            fleet.go_on(LEAST_EACH)
            former = fleet.replace(place, nursery.engine(spec(*place, NEWEST)))
            num_loads += check_clean(former)
            nursery.stop(former.spec)
        fleet.go_on(LEAST_EACH)
    finally:
        fleet.is_over = True
        for client in clients:
            client.join(timeout=120)
    assert not any(client.is_alive() for client in clients)
    num_loads += sum(check_clean(engine) for engine in fleet.taking.values())
    assert fleet.faults == []
    assert num_loads == TP_DECODE * fleet.pairs.total()
    # Requests went through both releases alone, and through a pair of both.
    assert fleet.pairs[INSTALLED, INSTALLED] > 0 < fleet.pairs[NEWEST, NEWEST]
    assert fleet.pairs[INSTALLED, NEWEST] + fleet.pairs[NEWEST, INSTALLED] > 0


def check_clean(engine: Engine) -> float:
    """How many parts of loads the engine's ranks have done; nothing failed, and nothing was computed that was to be loaded."""
    for name in ("kvreshard_failures_total", "kvreshard_fallbacks_total", 'kvreshard_leases_total{end="expired"'):
        assert total(engine, name) == 0, (str(engine.spec), name)
    return await_total(engine, "kvreshard_load_seconds_count", 0)
