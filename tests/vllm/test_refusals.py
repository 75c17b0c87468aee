"""Requests that can be neither loaded nor computed, in vLLM's own scheduler, which must not begin with them and must not stop at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Engine, Shape
from tests.vllm.simulation.pictures import PLACEHOLDER
from tests.vllm.simulation.world import World
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

pytestmark = pytest.mark.vllm

TOKENS = [1, 2, PLACEHOLDER, PLACEHOLDER, 5, 6, 7, 8]
NO_PREFILL = {"do_remote_prefill": True}


@pytest.fixture
def world() -> Iterator[World]:
    found = World({name: Shape(MODELS[0].layers(16, 0), blocks=64) for name in ("p", "d")}, base_config(), 0)
    found.by_name["d"].connector._scheduler._consumer.missing_items._placeholders = frozenset({PLACEHOLDER})
    yield found
    found.close()


def ask(engine: Engine, name: str, tokens: list[int], params: dict[str, Any] | None, num_logprobs: int | None) -> None:
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=num_logprobs, extra_args=extra)
    engine.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=engine.hasher))


@pytest.mark.parametrize("num_logprobs", [None, 1])
def test_a_picture_that_nobody_has_is_refused(world: World, num_logprobs: int | None) -> None:
    """With log-probabilities of the prompt vLLM begins with a request of which a connector knows nothing yet."""
    engine = world.by_name["d"]
    ask(engine, "blind", TOKENS, NO_PREFILL, num_logprobs)
    ask(engine, "other", [1, 2, 3], None, None)
    assert engine.scheduler.schedule().num_scheduled_tokens.keys() == {"other"}
    engine.scheduler.schedule()
    assert set(engine.scheduler.grammar_compile_error_reqs) == {"blind"}


def test_a_picture_of_a_prefill_that_is_not_known_yet_is_refused_where_vllm_does_not_wait(world: World) -> None:
    engine, source = world.by_name["d"], world.by_name["p"].address
    params = NO_PREFILL | {"transfer_id": "x", "remote_host": source.host, "remote_port": source.port}
    ask(engine, "blind", TOKENS, params, 1)
    ask(engine, "seeing", TOKENS[:2], params, 1)
    assert engine.scheduler.schedule().num_scheduled_tokens.keys() == {"seeing"}
    engine.scheduler.schedule()
    assert set(engine.scheduler.grammar_compile_error_reqs) == {"blind"}


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize("name", ["p", "d"])
@pytest.mark.parametrize("place", ["other", "remote_host", "transfer_id", "kvreshard"])
def test_parameters_nested_as_deep_as_json_may_be_end_no_engine(name: str, place: str, world: World) -> None:
    """Whatever they say, the request is served."""
    engine, source = world.by_name[name], world.by_name["p"].address
    good = NO_PREFILL | {"transfer_id": "x", "remote_host": source.host, "remote_port": source.port}
    for levels in (100, 600, 900):
        ask(engine, f"deep-{levels}", [1, 2, 3], {**good, place: nested(levels)}, None)
    engine.scheduler.schedule()


@pytest.mark.parametrize("name", ["p", "d"])
@pytest.mark.parametrize("params", ["x", 7, [1], [["do_remote_prefill", True]]])
def test_parameters_that_are_no_map_are_ignored(name: str, params: Any, world: World) -> None:
    """vLLM passes `vllm_xargs` on as they are."""
    engine = world.by_name[name]
    ask(engine, "strange", [1, 2, 3], params, None)
    assert engine.scheduler.schedule().num_scheduled_tokens.keys() == {"strange"}


def test_nothing_is_loaded_of_a_prompt_whose_log_probabilities_are_wanted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where vLLM would load it, as 0.30 does: there would be none of the tokens that are loaded."""
    engine = world.by_name["d"]
    side = engine.connector._scheduler
    monkeypatch.setattr(side._consumer, "count_loadable", lambda request, num_computed: 7)
    for num_logprobs, expected in ((None, 7), (1, 0)):
        ask(engine, f"asks {num_logprobs}", TOKENS, None, num_logprobs)
        asked = engine.scheduler.requests[f"asks {num_logprobs}"]
        assert side.count_loadable(asked, 0) == expected
