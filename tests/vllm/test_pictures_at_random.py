"""Whatever picture the decode engine has, or none: its text is the prefill's, and no prefix hit serves another picture's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.pictures import PictureWorld
from tests.vllm.simulation.world import Weather

from kvreshard.vllm import idle

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's clock is turned by hand."""
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)


class CrowdedWorld(PictureWorld):
    """Requests that have been loaded lose their blocks, as to more important ones, and find some of them again."""

    def tick(self) -> None:
        super().tick()
        for engine in self.can_decode:
            running = engine.scheduler.running
            if running and self.rng.random() < 0.05:
                engine.scheduler._preempt_request(running.pop(), 0.0)


def live(
    seed: int,
    weather: Weather,
    kind: str,
    blocks: int = 400,
    policy: str = "recompute",
    world_class: type[PictureWorld] = PictureWorld,
) -> PictureWorld:
    model = next(model for model in MODELS if model.kind == kind)
    layers = model.layers(16, 20)
    more: dict[str, Any] = {"is_aligned": model.is_aligned}
    if model.is_replayed:
        more |= {"order": "BLHNC", "is_v2": True}
    shapes = {
        "p": Shape(layers, blocks=400, role="kv_producer", **more),
        "d": Shape(layers, tp=2, blocks=blocks, role="kv_both", is_async=seed % 2 == 1, failure_policy=policy, **more),
    }
    world = world_class(shapes, base_config(), seed, weather)
    try:
        world.run(40, 12)
    finally:
        world.close()
    return world


@pytest.mark.parametrize("kind", ["full", "windows"])
@pytest.mark.parametrize("seed", range(4))
def test_all_that_was_prefilled_is_loaded_whatever_picture_is_here(seed: int, kind: str) -> None:
    world = live(seed, Weather(delays=2), kind)
    assert min(world.num_asked[kind] for kind in ("same", "none", "another")) > 0
    assert world.num_loaded > 3
    assert world.num_refused == world.num_asked["blind, itself"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("seed", range(4))
def test_what_can_be_neither_loaded_nor_computed_is_refused(seed: int, policy: str) -> None:
    """Failed loads, preemptions, engines that have read their source before."""
    world = live(seed, Weather(delays=3, failures=0.3, choices=0.2, retried=0.2), "full", blocks=14, policy=policy)
    assert world.num_refused > 0


@pytest.mark.parametrize("kind", ["full", "windows", "aligned", "aligned, window", "replayed, ring"])
@pytest.mark.parametrize("seed", range(3))
def test_a_preempted_request_never_computes_a_picture_that_is_not_here(seed: int, kind: str) -> None:
    """Its attention finds all of its blocks again; a state may be gone, and a window be computed again (`MissingItems.why_refused`)."""
    world = live(seed, Weather(delays=2), kind, world_class=CrowdedWorld)
    assert sum(engine.num_preempted for engine in world.can_decode) > 0
