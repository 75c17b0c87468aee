"""A fleet is scaled to zero and up again under load, one role after the other and both at once.

Without a decode engine requests wait at the router; without a prefill engine decode engines compute them. None is lost, none is wrong.
"""

from __future__ import annotations

import time

import pytest
from tests.e2e.engine import RELEASE, EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.fleet import LENGTHS, MODEL, TP_DECODE, Fleet, Place, check_clean, spec
from tests.e2e.prompts import prompt

LEAST_EACH = 6
PLACES: tuple[Place, ...] = (("p", 0), ("d", 0), ("p", 1), ("d", 1))
STILL_S = 2.0


@pytest.mark.timeout(1800)
def test_a_fleet_is_scaled_to_zero_and_up_under_load(nursery: Nursery) -> None:
    nursery.stop_all()
    prompts = [prompt(length, 78) for length in LENGTHS]
    ordinary = EngineSpec(MODEL, tp=TP_DECODE)
    expected = [output.tokens for output in nursery.engine(ordinary).generate(prompts)]
    nursery.stop(ordinary)
    fleet, num_loads = Fleet(prompts, expected), 0.0

    def scale_up(places: tuple[Place, ...]) -> None:
        for place in places:
            fleet.add(place, nursery.engine(spec(place, RELEASE)))

    def scale_down(places: tuple[Place, ...]) -> float:
        """How many parts of loads their ranks have done."""
        num_loads = 0.0
        for place in places:
            former = fleet.take_out(place)
            num_loads += check_clean(former)
            nursery.stop(former.spec)
        return num_loads

    scale_up(PLACES)
    prefills, decodes = PLACES[::2], PLACES[1::2]
    with fleet.under_load():
        for places in (prefills, decodes, PLACES):
            fleet.go_on(LEAST_EACH)
            num_loads += scale_down(places)
            if places is prefills:
                before = fleet.num_alone
                fleet.go_on(LEAST_EACH)
                assert fleet.num_alone > before
            else:
                before = fleet.num_answered
                time.sleep(STILL_S)
                assert fleet.num_answered == before
            scale_up(places)
        fleet.go_on(LEAST_EACH)
    num_loads += sum(check_clean(engine) for engine in fleet.taking.values())
    assert fleet.faults == []
    assert num_loads == TP_DECODE * fleet.pairs.total()
