"""A fleet of two prefill and two decode engines is upgraded to another release of vLLM, engine by engine, under load.

An engine's successor has started before it goes. The other role's engines, of either release, go on all the time. No request is lost, none is
wrong, and every one is loaded.
"""

from __future__ import annotations

import pytest
from tests import releases
from tests.e2e.engine import RELEASE, EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.fleet import LENGTHS, MODEL, TP_DECODE, Fleet, check_clean, spec
from tests.e2e.prompts import prompt
from tests.releases import INSTALLED, NEWEST

LEAST_EACH = 5
"""Requests between two steps of the upgrade."""


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
        fleet.add(place, nursery.engine(spec(place, INSTALLED)))
    num_loads = 0.0
    with fleet.under_load():
        for place in places:
            fleet.go_on(LEAST_EACH)
            former = fleet.take_out(place, nursery.engine(spec(place, NEWEST)))
            num_loads += check_clean(former)
            nursery.stop(former.spec)
        fleet.go_on(LEAST_EACH)
    num_loads += sum(check_clean(engine) for engine in fleet.taking.values())
    assert fleet.faults == []
    assert num_loads == TP_DECODE * fleet.pairs.total()
    # Requests went through both releases alone, and through a pair of both.
    assert fleet.pairs[INSTALLED, INSTALLED] > 0 < fleet.pairs[NEWEST, NEWEST]
    assert fleet.pairs[INSTALLED, NEWEST] + fleet.pairs[NEWEST, INSTALLED] > 0
