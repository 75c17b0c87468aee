"""Is a cache that no reader could use left unpublished, and does the log say why? And are leases and held pages given back where others end badly?"""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm")
from tests.vllm.schedulers import KEY, TOKENS, blocks, full, groups, producer, request, state
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.text import Text
from tests.vllm.simulation.world import BEYOND, Weather, World
from tests.vllm.test_answers import publish, turn
from vllm.v1.request import RequestStatus

from kvreshard.session.commands import Failure, Load, Release, Revoke
from kvreshard.vllm import idle

pytestmark = pytest.mark.vllm


def test_a_prefill_whose_state_went_on_is_not_published_and_told(caplog: pytest.LogCaptureFixture) -> None:
    side = producer(groups(full(64), state(64, "none")), backoff=1)
    asked = request("p-1", TOKENS, max_tokens=8)
    side.arrive(asked)
    list(side.schedule(asked))
    asked.num_computed_tokens, asked.num_in_flight_tokens = len(TOKENS) + 1, 1
    asked.status = RequestStatus.FINISHED_STOPPED
    with caplog.at_level(logging.WARNING):
        params, command = side.finish(asked, [[1, 2, 3, 4, 5], [6]])
    assert (params, type(command)) == (None, Revoke)
    assert "its cache is not published, since a step behind its prompt" in caplog.text


def test_pages_that_were_freed_between_others_are_not_published_and_told(caplog: pytest.LogCaptureFixture) -> None:
    side = producer(groups(full(64)))
    asked = request("p-1", TOKENS)
    side.arrive(asked)
    list(side.schedule(asked))
    asked.num_computed_tokens, asked.status = len(TOKENS), RequestStatus.FINISHED_LENGTH_CAPPED
    with caplog.at_level(logging.WARNING):
        params, command = side.finish(asked, [[1, 2, 0, 4, 5]])
    assert (params, type(command)) == (None, Revoke)
    assert "vLLM has freed pages between those that a reader needs" in caplog.text


def test_a_source_that_was_loaded_from_is_released_though_the_last_request_could_not_meet_it() -> None:
    params, _ = publish(groups(full(64)))
    side = turn().side
    given = {**params, "do_remote_decode": True, "do_remote_prefill": False}
    one, two = (request(name, [*TOKENS, 7], kv_transfer_params=dict(given)) for name in ("0_p", "1_p"))
    for asked in (one, two):
        list(side.arrive(asked, asked.kv_transfer_params))
    list(side.meet({"0_p": KEY}, {}))
    (load,) = side.allocate(one, blocks([1, 2, 3, 4, 5]), side.count_loadable(one, 0))
    assert isinstance(load, Load)
    assert not any(isinstance(command, Release) for command in side.ended("0_p"))  # the other still uses it
    list(side.meet({}, {"1_p": Failure("transfer", "READ failed")}))
    assert side.count_loadable(two, 0) == 0
    assert any(isinstance(command, Release) for command in side.allocate(two, blocks([6, 7, 8, 9, 10]), 0))


@pytest.mark.parametrize("num_prompt", [49, 50, 51, 52])
def test_a_forced_reset_gets_held_pages_back(monkeypatch: pytest.MonkeyPatch, num_prompt: int) -> None:
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)
    layers = next(model for model in MODELS if model.kind == "window").layers(16, 20)
    shapes = {
        "p": Shape(layers, blocks=100, role="kv_producer", max_tokens_per_step=24),
        "d": Shape(layers, blocks=100, role="kv_consumer"),
    }
    engine = World(shapes, base_config(), 1, Weather()).by_name["p"]
    prompt = [(7 * i) % 60 + 1 for i in range(num_prompt)]
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    engine.add("r", Text(prompt, 1 + BEYOND), num_prompt, 1, params)
    held = engine.connector._scheduler._producer.last_pages._held
    for _ in range(3):
        engine.advance()
        if any(held.values()) and not engine.pending:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            return
    assert num_prompt != 51  # of which a page is held in its last chunk
