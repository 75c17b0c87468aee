"""Choices of one request in an engine without a process of its own share vLLM's sampling parameters. Is each loaded, and none of them left over?"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

pytest.importorskip("vllm")
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.text import Text
from tests.vllm.simulation.world import BEYOND, Weather, World
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvreshard.vllm import idle

pytestmark = pytest.mark.vllm
PROMPT = [(7 * i) % 60 + 1 for i in range(60)]


def turn(world: World, num_turns: int) -> None:
    for _ in range(num_turns):
        world.clock.now_s += 0.02
        world.route_and_meet()
        for engine in world.by_name.values():
            engine.advance()
            engine.turn()
        world.fabric.step()
        world._hear()


@pytest.mark.parametrize("is_shared", [False, True])
def test_both_choices_end(monkeypatch: pytest.MonkeyPatch, *, is_shared: bool) -> None:
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)
    layers = MODELS[0].layers(16, 0)
    shapes = {name: Shape(layers, blocks=100, role=role) for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))}
    world = World(shapes, base_config(), 1, Weather())
    prefill, decode = world.by_name["p"], world.by_name["d"]
    got: list[Any] = []
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    world._ask(prefill, Text(PROMPT, 1 + BEYOND), 60, 1, asked, False, got.append)
    turn(world, 60)
    given = {"kv_transfer_params": json.loads(json.dumps(got[0]))}
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=given)
    for name in ("0_x", "1_x"):
        decode.texts[name] = Text(PROMPT, 3 + BEYOND)
        own = sampling if is_shared else copy.deepcopy(sampling)
        decode.scheduler.add_request(Request(name, list(PROMPT), own, None, block_hasher=decode.hasher))
    turn(world, 200)
    assert not decode.scheduler.requests
    assert {"0_x", "1_x"} <= decode.finished.keys()
    assert decode.num_free_blocks == decode.num_blocks_at_rest
