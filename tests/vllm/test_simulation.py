"""Every kernel finds its input, whatever vLLM's schedulers, the network and the clients do.

Engines without kernels (`simulation/`): vLLM's own schedulers with this connector, its sessions and planner on plain memory, and a runner
that knows what every token's cache must hold. A world has two to four engines and twenty requests; `python -m tests.vllm.simulation
SEED SECONDS` goes on for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation.base import LONGEST, base_config
from tests.vllm.simulation.draw import MODELS, draw
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.text import VOCABULARY, Text
from tests.vllm.simulation.world import Weather, World
from vllm.v1.core.sched.interface import PauseState

from kvreshard.vllm import idle
from kvreshard.vllm.versions import find_version, minor

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's clock is turned by hand."""
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)


# vLLM 0.30 stands still in this world: failed loads and prefills in one small pool (docs/versions.md).
STANDS_STILL = {1009} if minor(find_version() or "") == (0, 30) else set()


def live(seed: int, num_requests: int = 20) -> World:
    _, shapes, weather = draw(seed)
    world = World(shapes, base_config(), seed, weather)
    try:
        world.run(num_requests)
    finally:
        world.close()
    return world


@pytest.mark.parametrize("batch", range(12))
def test_every_kernel_finds_what_it_looks_for(batch: int, run_seed: int) -> None:
    seeds = {batch * 4, *(run_seed % 10**6 + 1000 + batch * 4 + i for i in range(3))} - STANDS_STILL
    worlds = [live(seed) for seed in sorted(seeds)]
    # Four worlds load some 35 requests; one draw of five thousand loads five.
    assert sum(world.num_loaded for world in worlds) > 0
    assert sum(engine.runner.num_tokens_looked_at for world in worlds for engine in world.by_name.values()) > 5000


@pytest.mark.parametrize(
    ("weather", "seed"), [(Weather(delays=2, jumps=0.02), 1), (Weather(delays=4, failures=0.3), 4)]
)
def test_a_request_whose_load_failed_does_not_hold_up_those_that_hold_blocks(weather: Weather, seed: int) -> None:
    """vLLM computes it, left first among them: where it needs their blocks, nobody would go on (`kvreshard.vllm.admission`)."""
    layers = next(model for model in MODELS if model.kind == "windows").layers(16, 20)
    shapes = {
        "p": Shape(layers, blocks=400, role="kv_producer"),
        "d": Shape(layers, blocks=60, max_requests=8, role="kv_consumer"),
    }
    world = World(shapes, base_config(), seed, weather)
    try:
        world.run(30, ticks_between=5)
    finally:
        world.close()


@pytest.mark.parametrize("seed", [700031, 700324])
def test_a_loaded_request_that_wants_more_blocks_than_vllm_keeps_free_holds_up_nobody(seed: int) -> None:
    """In a chunk, and with aligned states: the load behind it has the blocks and is not reached (`kvreshard.vllm.admission`)."""
    live(seed)


@pytest.mark.parametrize("seed", [1004, 1006, 1010, 1016, 1029, 1033])
def test_a_request_whose_load_failed_is_reached_behind_more_important_ones(seed: int) -> None:
    """vLLM keeps its blocks reserved, beside which they do not fit, and looks no further (`kvreshard.vllm.admission`)."""
    layers = MODELS[0].layers(16, 0)
    shapes = {
        "p": Shape(layers, blocks=300, role="kv_producer"),
        "d": Shape(layers, blocks=12, max_requests=8, role="kv_consumer", order_policy="priority"),
    }
    world = World(shapes, base_config(), seed, Weather(delays=3, failures=0.3))
    try:
        world.run(20, ticks_between=3)
        assert world.by_name["d"].failed
    finally:
        world.close()


def test_a_load_that_never_fits_into_a_free_pool_is_computed() -> None:
    """vLLM wants blocks for a step of drafts beside a load, which a pool of the largest request does not have."""
    layers = next(model for model in MODELS if model.kind == "ring").layers(16, 20, 1, 1)
    shapes = {
        "p": Shape(layers, order="BLHNC", blocks=100, num_drafts=1, role="kv_producer"),
        "d": Shape(layers, order="BLHNC", blocks=13, num_drafts=1, role="kv_consumer"),
    }
    world = World(shapes, base_config(), 1)
    world.make_prompt = lambda: [world.rng.randrange(VOCABULARY) for _ in range(LONGEST)]
    try:
        world.run(6)
        assert len(world.by_name["d"].given_up) == world.num_loaded > 0  # all that wanted to be
    finally:
        world.close()


def test_engines_that_wait_for_one_another_in_a_circle_go_on() -> None:
    """Both have filled their pools with what the other shall read (`kvreshard.vllm.admission`)."""
    layers, num_given_up = MODELS[0].layers(16, 0), 0
    shapes = {name: Shape(layers, blocks=16) for name in ("p", "d")}
    for seed in range(6):
        world = World(shapes, base_config(), seed)
        world.run(30, ticks_between=4)
        num_given_up += sum(len(engine.given_up) for engine in world.by_name.values())
        world.close()
    assert num_given_up > 0


def test_nothing_is_loaded_where_a_step_may_still_write() -> None:
    """Where an engine only prefills, vLLM frees an aborted request's blocks although a step of it is under way."""
    shapes = {
        name: Shape(MODELS[0].layers(8, 0), blocks=24, is_async=True, max_requests=4, role="kv_producer")
        for name in ("p", "q")
    }
    num_misrouted = 0
    for seed in range(12):
        world = World(shapes, base_config(), seed, Weather(aborts=0.15, misrouted=1.0))
        world.run(25, 30)
        num_misrouted += world.num_misrouted
        world.close()
    assert num_misrouted > 50


def test_a_ring_that_has_gone_on_is_not_loaded() -> None:
    """A prefill that ends early, with a token of its own, while its next step is under way."""
    layers = next(model for model in MODELS if model.kind == "ring").layers(16, 20, 0, 1)
    shapes = {
        "p": Shape(layers, order="BLHNC", is_async=True, role="kv_producer"),
        "d": Shape(layers, order="BLHNC", role="kv_consumer"),
    }
    for seed in range(2, 6):
        world = World(shapes, base_config(), seed, Weather(longer_prefills=1.0, stops=1.0))
        world.run(25, 30)
        assert world.num_ended > 20
        world.close()


def test_a_longer_ring_has_no_more_of_an_entry_after_a_prefill() -> None:
    """The decode engine's prompt is one token shorter, or differs at its end, and the entry before it is not complete."""
    model = next(model for model in MODELS if model.kind == "ring")
    shapes = {
        "p": Shape(model.layers(16, 20, 1, 2), order="BLHNC", blocks=200, num_drafts=1, role="kv_producer"),
        "d": Shape(model.layers(16, 20, 1, 1), order="BLHNC", blocks=200, num_drafts=1, role="kv_consumer"),
    }
    for seed in range(2):
        world = World(shapes, base_config(), seed, Weather(other_prompts=1.0))
        world.make_prompt = lambda rng=world.rng: [rng.randrange(VOCABULARY) for _ in range(rng.choice([17, 33, 49]))]
        world.run(15, 10)
        assert world.by_name["d"].fallbacks["window"]
        world.close()


def test_the_layers_of_a_replayed_window_have_the_last_of_a_prompt_only() -> None:
    """A prompt that agrees with the source's up to less than that needs tokens of its pages that nobody has written."""
    layers = next(model for model in MODELS if model.is_replayed).layers(32, 24, 0, 1)
    shapes = {
        "p": Shape(layers, order="BLHNC", blocks=200, is_v2=True, role="kv_producer"),
        "d": Shape(layers, order="BLHNC", blocks=200, is_v2=True, role="kv_consumer"),
    }
    for seed in range(2):
        world = World(shapes, base_config(), seed, Weather(other_prompts=0.8))
        world.run(25, 10)
        assert world.num_ended > 20
        world.close()


@pytest.mark.parametrize(("kept_s", "asked_s"), [(2.0, 3600.0), (1.0, 30.0)])
def test_requests_that_wait_keep_their_source_whatever_its_lease_time_is(kept_s: float, asked_s: float) -> None:
    """One at a time is decoded, and the others wait for longer than their source would keep its blocks without a sign of them."""
    shapes = {
        "p": Shape(MODELS[0].layers(16, 0), blocks=400, role="kv_producer", lease_s=kept_s),
        "d": Shape(MODELS[0].layers(16, 0), max_requests=1, role="kv_consumer", lease_s=asked_s),
    }
    world = World(shapes, base_config(), 3)
    for _ in range(20):
        world.submit()
        for _ in range(5):
            world.tick()
            world.route_and_meet()
    world.drain()
    assert world.num_loaded > 10
    assert world.clock.now_s - world.began_s > 2 * kept_s
    world.close()


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
def test_requests_that_arrive_in_a_pause_keep_their_source(state: PauseState) -> None:
    """`pause_generation` makes no step for them, and lasts for longer than a lease."""
    layers = MODELS[0].layers(16, 0)
    shapes = {"p": Shape(layers, blocks=400, role="kv_producer"), "d": Shape(layers, tp=2, role="kv_consumer")}
    world = World(shapes, base_config(), 5)
    decode = world.by_name["d"]
    decode.scheduler.set_pause_state(state)
    for number in range(300):
        if number < 12:
            world.submit()
        world.clock.now_s += 0.4
        world.route_and_meet()
        for engine in world.by_name.values():
            engine.advance()
            engine.turn()
        world._hear()
    num_waiting = sum(asked.wants_load for asked in world.asked.values())
    assert num_waiting > 3
    assert not decode.advance()
    world.drain()
    assert (world.num_loaded, decode.failed) == (num_waiting, set())
    world.close()


def prefilled(world: World, weather_end: int = 4000) -> None:
    """All that was asked of engine `p` has been computed, and its router has not sent it on."""
    for _ in range(weather_end):
        world.by_name["p"].advance()
        world.by_name["p"].turn()
        world._hear()
        if not world.asked:
            return
    raise AssertionError(list(world.asked))


@pytest.mark.parametrize("name", ["x" * 300, "a\nb", "\ud800"])
def test_a_request_is_loaded_whatever_its_id_is(name: str) -> None:
    """Each rank names it as vLLM does: a MultiConnector around this one counts there who has not sent a request yet."""
    layers = MODELS[0].layers(16, 0)
    shapes = {"p": Shape(layers, tp=2, role="kv_producer"), "d": Shape(layers, role="kv_consumer")}
    world = World(shapes, base_config(), 1)
    sent = list[str]()
    for worker in world.by_name["p"].workers:
        collect = worker.collect

        def collected(collect: Callable[[], Any] = collect) -> Any:
            results = collect()
            sent.extend(results.finished_sending)
            return results

        worker.collect = collected  # type: ignore[method-assign]
    asking = world._ask
    world._ask = lambda engine, *rest: asking(engine, *rest, *[None] * (7 - len(rest)), f"{engine.name}{name}")
    text = Text(list(range(40)), 20)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    world._ask(
        world.by_name["p"], text, 40, 1, params, False,
        lambda answer: world._prefilled(world.by_name["p"], list(range(40)), 5, answer, True),
    )  # fmt: skip
    world.drain()
    assert world.num_loaded == 1
    assert sent == [f"p{name}"] * 2
    world.close()


def test_choices_of_a_prefill_share_one_lease() -> None:
    """The router gets the parameters of one of them, and nobody ever reads the others."""
    layers = MODELS[0].layers(16, 0)
    for has_prefix_caching in (True, False):
        shapes = {
            "p": Shape(layers, blocks=100, role="kv_producer", has_prefix_caching=has_prefix_caching),
            "d": Shape(layers, role="kv_consumer"),
        }
        world = World(shapes, base_config(), 1, Weather(prefill_choices=1.0))
        prompt = [world.rng.randrange(VOCABULARY) for _ in range(96)]
        world.make_prompt = lambda prompt=prompt: list(prompt)
        while not world.asked:
            world.submit()
        source = world.by_name["p"]
        prefilled(world)
        assert len(source.connector._scheduler._producer.leases.published) == 1
        assert source.num_blocks_at_rest - source.num_free_blocks == 6
        world.drain()
        assert world.num_loaded == 1
        world.close()


def test_a_request_that_failed_is_not_counted_again_when_its_server_cleans_up() -> None:
    layers = MODELS[0].layers(16, 0)
    shapes = {
        "p": Shape(layers, role="kv_producer"),
        "d": Shape(layers, role="kv_consumer", failure_policy="fail"),
    }
    world = World(shapes, base_config(), 2, Weather(failures=0.8))
    world.run(15, 10)
    decode = world.by_name["d"]
    assert len(decode.failed) > 3
    assert not decode.fallbacks
    world.close()


def test_engines_that_are_paused_are_not_taken_for_a_circle() -> None:
    """Each holds what the other waits for, and neither computes anything: for new weights, say."""
    layers = MODELS[0].layers(16, 0)
    shapes = {name: Shape(layers, blocks=300, max_requests=4) for name in ("p", "d")}
    world = World(shapes, base_config(), 7)
    for _ in range(12):
        world.submit()
    for engine in world.by_name.values():
        while not any(asked.engine is engine and asked.wants_load for asked in world.asked.values()):
            world.submit()
            for (
                one
            ) in world.by_name.values():  # what has been prefilled goes to a decode engine, which is paused by then
                one.advance()
                one.turn()
            world._hear()
            for later in world._later:
                later()
            world._later.clear()
    for engine in world.by_name.values():
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    waiting = {name for name, asked in world.asked.items() if asked.wants_load}
    for _ in range(300):
        world.clock.now_s += 0.4
        world.route_and_meet()
        for engine in world.by_name.values():
            engine.advance()
            engine.turn()
        world._hear()
    assert waiting <= set(world.asked)
    world.drain()
    assert all(not engine.given_up and not engine.failed for engine in world.by_name.values())
    world.close()
