"""Does each failed request leave one line in the scheduler's log, on two ranks and under either policy?"""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")

from tests.faulty_memory import Fault
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import Weather, World

pytestmark = pytest.mark.vllm
NEVER = 10_000


@pytest.mark.parametrize(("policy", "told"), [("fail", "it ends with an error"), ("recompute", "it is computed here")])
def test_a_request_that_fails_on_both_ranks_is_one_line(
    policy: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the policy `fail` vLLM ends the request before the connector hears of the failure."""
    caplog.set_level(logging.INFO, "kvreshard")
    layers = MODELS[0].layers(16, 0)
    shapes = {
        "p": Shape(layers, role="kv_producer"),
        "d": Shape(layers, tp=2, role="kv_consumer", failure_policy=policy),
    }
    world = World(shapes, base_config(), 1, Weather(jumps=1e-9))
    decode = world.by_name["d"]
    for endpoint in decode.endpoints:
        endpoint._transport._faults = lambda index, transfer: Fault(delay_steps=NEVER)
    world.make_prompt = lambda: list(range(80))
    while not decode.failed:
        if not world.asked:
            world.submit()
        world.tick()
        world.route_and_meet()
        world.clock.now_s += 5.0
    for _ in range(5):
        decode.advance()
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "load_failed"]
    assert record.getMessage().endswith(f"(timeout, ranks 0, 1); {told}")
    for _ in range(NEVER):
        world.fabric.step()
    world.close()
