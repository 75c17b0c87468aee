"""A prefill engine reads back what a decode engine has of the conversation: vLLM's schedulers, stub kernels that check every byte."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.vllm.simulation import turns
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS, draw
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.runner import WrongCache
from tests.vllm.simulation.turns import FIRST, TurnWorld
from tests.vllm.simulation.world import Weather

from kvreshard.model.changed import replace
from kvreshard.vllm import idle, scheduler
from kvreshard.vllm.producer import Producer

pytestmark = pytest.mark.vllm
BY_KIND = {model.kind: model for model in MODELS}
ANSWER_LEASE_S = 60.0


@pytest.fixture(autouse=True)
def never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's clock is turned by hand."""
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)


def reading_back(shape: Shape, **more: object) -> Shape:
    return replace(shape, **{"reads_back": True, "answer_lease_s": ANSWER_LEASE_S, **more})


def pair(
    kind: str = "full", prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> dict[str, Shape]:
    """A prefill engine at TP 2 in pages of 8 tokens and a decode engine at TP 1 in pages of 16."""
    layers = BY_KIND[kind].layers
    return {
        "p": reading_back(Shape(layers(8, 24), tp=2, blocks=400, role="kv_producer"), **(prefill or {})),
        "d": reading_back(Shape(layers(16, 24), blocks=400, role="kv_consumer"), **(decode or {})),
    }


def live(world: TurnWorld, num_requests: int = 14, ticks_between: int = 25) -> TurnWorld:
    try:
        world.run(num_requests, ticks_between)
    finally:
        world.close()
    return world


@pytest.mark.one_release
@pytest.mark.parametrize("kind", [model.kind for model in MODELS])
@pytest.mark.parametrize(("roles", "tp"), [(("kv_producer", "kv_consumer"), (2, 1)), (("kv_both", "kv_both"), (1, 4))])
def test_turns_of_every_kind_are_read_back(kind: str, roles: tuple[str, str], tp: tuple[int, int]) -> None:
    """Every answer is read back whole, but for its last token, where nothing goes wrong and histories are not changed."""
    pages = (32, 16) if kind not in ("full", "latent", "window") else (8, 32)
    order = "BLHNC" if "ring" in kind else "LBHNC"
    model, shapes = BY_KIND[kind], {}
    for name, role, size, page in zip("pd", roles, tp, pages, strict=True):
        shapes[name] = reading_back(
            Shape(
                model.layers(page, 24, 0, 1), tp=size, order=order, blocks=400, role=role, kv_heads=model.heads,
                window_heads=model.window_heads, is_aligned=model.is_aligned, is_v2=model.is_replayed,
                has_prefix_caching=model.is_aligned or not model.has_states,
            )
        )  # fmt: skip
    world = live(TurnWorld(shapes, base_config(), 5))
    assert world.num_turns["same"] > 10
    assert world.num_read_back > 100
    assert not world.not_there
    assert not any(engine.failed or engine.fallbacks.keys() - {"itself"} for engine in world.by_name.values())


# Worlds in which hundreds of tokens are read back.
READ_BACK = (3, 200, 202, 203)


@pytest.mark.parametrize("batch", range(len(READ_BACK)))
def test_kernels_find_what_they_look_for_in_conversations(batch: int, run_seed: int) -> None:
    """Whatever histories, parameters and the weather are."""
    num_read_back = 0
    for seed in (READ_BACK[batch], *(run_seed % 10**6 + 5000 + batch * 3 + i for i in range(2))):
        model, shapes, weather = draw(seed)
        rng = random.Random(seed)
        # vLLM 0.32 counts blocks of windows wrong: loads of a pool that is hardly large enough may stand still (docs/design/0070).
        more = 1 if model.num_groups == 1 else 3
        shapes = {
            name: reading_back(shape, recompute_threshold=rng.choice([0, 0, 20]), blocks=shape.blocks * more)
            for name, shape in shapes.items()
        }
        edits, twice = rng.choice([0.0, 0.4]), rng.choice([0.0, 0.2])
        num_read_back += live(TurnWorld(shapes, base_config(), seed, weather, edits=edits, twice=twice)).num_read_back
    assert num_read_back > 0


def test_histories_that_were_changed_are_read_back_as_far_as_they_are_the_same() -> None:
    world = live(TurnWorld(pair(prefill={"has_prefix_caching": False}), base_config(), 3, edits=1.0), 30)
    assert {"again", "shorter", "other", "stripped"} <= world.num_turns.keys()
    assert world.num_read_back > 100
    assert not world.by_name["p"].failed


@pytest.mark.parametrize("has_prefix_caching", [True, False])
def test_what_the_prefill_engine_has_is_not_read_again(has_prefix_caching: bool) -> None:
    """Its own prefix cache has all whole pages of the last prompt, or nothing."""
    world = TurnWorld(pair(prefill={"has_prefix_caching": has_prefix_caching}), base_config(), 1)
    prompts = [[*range(40)], [*range(100, 137)]]
    world.make_prompt = lambda: list(prompts[len(world.asked) % 2])
    live(world, 6)
    read = [count for name, count in world.by_name["p"].read_back.items()]
    assert not world.not_there
    assert max(read) < 30 if has_prefix_caching else min(read) > 30


def test_fewer_tokens_than_the_threshold_are_computed() -> None:
    worlds = [live(TurnWorld(pair(prefill={"recompute_threshold": n}), base_config(), 1)) for n in (0, 1000)]
    assert [world.num_read_back > 0 for world in worlds] == [True, False]
    assert not worlds[1].by_name["p"].fallbacks
    # What is not read is given back at once: the leases of answers that nobody goes on from are all that runs out.
    assert all(engine.num_free_blocks == engine.num_blocks_at_rest for engine in worlds[1].by_name.values())


def test_an_engine_without_the_option_gives_answers_back() -> None:
    world = live(TurnWorld(pair(prefill={"reads_back": False}), base_config(), 2))
    assert world.num_read_back == 0
    assert world.by_name["p"].fallbacks.keys() == {"answer"}
    without = live(TurnWorld(pair(decode={"reads_back": False}), base_config(), 2))
    assert without.num_turns.keys() == {"first"}


def test_loads_wait_for_steps_that_may_write_where_an_engine_only_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that vLLM scheduled before the load got its blocks may be at work in them (`simulation.engine`)."""

    def run() -> TurnWorld:
        shapes = pair(prefill={"is_async": True, "has_prefix_caching": False})
        return live(TurnWorld(shapes, base_config(), 3, Weather(aborts=0.02)), 25, 30)

    assert run().num_read_back > 100
    made = scheduler.DelayedLoads
    monkeypatch.setattr(scheduler, "DelayedLoads", lambda _num_steps: made(0))
    with pytest.raises(AssertionError, match=r"\('p', 'p-"):
        run()


def test_what_a_load_left_out_of_a_page_is_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is loaded begins inside a page of this engine, and with drafts fewer tokens are published than were loaded."""

    monkeypatch.setattr(turns, "MAX_SAID", 1)

    def run() -> TurnWorld:
        world = TurnWorld(pair("window", {"has_prefix_caching": False}, {"num_drafts": 3}), base_config(), 0)
        world.make_prompt = lambda: [*range(40 + len(world.asked) % 16)]
        return live(world, 16)

    assert run().num_read_back > 100
    monkeypatch.setattr(Producer, "note_first", lambda *_: None)
    with pytest.raises(WrongCache):
        run()


def test_answers_give_way_to_requests_that_need_blocks() -> None:
    """A pool of a few requests, and answers that would be held for an hour."""
    shapes = pair(decode={"blocks": 24, "answer_lease_s": 3600.0})
    world = TurnWorld(shapes, base_config(), 4, Weather(unwanted=0.7))
    for _ in range(30):
        world.submit()
        for _ in range(20):
            world.tick()
            world.route_and_meet()
    for _ in range(2000):
        world.tick()
        world.route_and_meet()
    assert not world.asked
    decode = world.by_name["d"].connector._scheduler
    assert 0 < len(decode._producer.answers) < 12
    assert world.clock.now_s - world.began_s < 100
    world.drain(20000)
    world.close()


def test_an_answer_that_was_given_up_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine reads the lease word before it loads: nothing fails, whatever its policy is."""
    world = TurnWorld(pair(prefill={"failure_policy": "fail"}), base_config(), 6)
    decode = world.by_name["d"]
    begin = world._begin_turn

    def late(*turn: object) -> None:
        decode.connector._scheduler.reset()
        for _ in range(6):
            decode.advance()
            decode.turn()
        begin(*turn)  # type: ignore[arg-type]

    monkeypatch.setattr(world, "_begin_turn", late)
    live(world)
    prefill = world.by_name["p"]
    assert not prefill.failed
    assert world.num_read_back == 0
    assert prefill.fallbacks.keys() == {"ended"}


def test_a_decode_engine_that_is_gone_costs_a_prefill_nothing_but_time() -> None:
    world = TurnWorld(pair(prefill={"failure_policy": "fail"}), base_config(), 7, Weather(unmet=0.5))
    live(world)
    assert not world.by_name["p"].failed
    assert world.by_name["p"].fallbacks["unmet"]


def test_which_of_several_choices_the_conversation_goes_on_with_is_not_known() -> None:
    world = TurnWorld(pair(), base_config(), 8)
    asking = world._ask
    world._ask = lambda engine, *rest: asking(
        engine, *rest, *[None] * (7 - len(rest)), f"{len(world.asked)}_{world._count}"
    )
    live(world)
    assert world.num_turns.keys() == {"first"}


def test_the_first_turn_of_routers_names_nobody() -> None:
    world = TurnWorld(pair(), base_config(), 9, Weather(unwanted=1.0))
    world.submit()
    live(world, 4)
    assert FIRST["remote_block_ids"] is None
    assert not world.by_name["p"].fallbacks
