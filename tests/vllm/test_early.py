"""Both sides' schedulers where a router sends a request to both engines at once: what is loaded early, and what is computed here instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.unit.session.prefills import LocalFollower
from tests.unit.session.world import Clock
from tests.vllm.schedulers import KEY, TOKENS, Decode, blocks, full, groups, picture, producer, request, window
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS, draw
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import Weather, World
from vllm.v1.request import RequestStatus

from kvreshard.session.commands import Acquire, Cancel, Load, Publish, Release, Renew, Results, Revoke
from kvreshard.session.progress import StepProgress
from kvreshard.session.pull import TransferStats
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.vllm import idle
from kvreshard.vllm.following import Following
from kvreshard.vllm.idle import Idle, find_arrivals
from kvreshard.vllm.options import read_options
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.sources import SourceHosts
from kvreshard.vllm.step_metadata import ReshardWorkerMetadata
from kvreshard.vllm.waiting import LEAD_FACTOR, MIN_LEAD_S, TransferPace
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm

DECODE = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 5}
PREFILL = {"do_remote_decode": True, "transfer_id": "x"}


class Both:
    """A prefill and a decode side that hear of one another without a network."""

    def __init__(self, *specs: Any, **decode: Any) -> None:
        self.shown, self.lost = Rendezvous(KEY), list[bool]()
        self.source: Producer = producer(groups(*specs))
        self.source.early._rendezvous = self.shown
        self.clock = Clock()
        follower = LocalFollower(self.shown, self.lost)
        self.decode = Decode(*specs, **decode)
        following = self.decode.side.following = Following("d", None, 30.0, self.clock, follower)
        self.decode.side.waiting._following = following
        self.source.early._clock = self.clock
        self.decode.side.waiting.max_early_blocks = 1000
        self.held: dict[str, list[list[Any]]] = {}

    def prefill(self, tokens: list[int] = TOKENS, name: str = "p-1", **more: Any) -> Any:
        """A request arrives and is scheduled."""
        asked = request(name, tokens, kv_transfer_params=dict(PREFILL), num_computed_tokens=0, **more)
        self.source.arrive(asked)
        (lease,) = self.source.schedule(asked)
        assert isinstance(lease, Acquire)
        return asked

    def step(self, asked: Any, num_tokens: int, *ids: list[int]) -> list[StepProgress]:
        """A step computes so many tokens, with these blocks of each group."""
        held = [{asked.request_id: [SimpleNamespace(block_id=one) for one in of_group]} for of_group in ids]
        managers = [SimpleNamespace(req_to_blocks=of_group) for of_group in held]
        manager: Any = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
        found = list(self.source.early.step({asked.request_id: num_tokens}, manager))
        asked.num_computed_tokens += num_tokens
        return found

    def arrive(self, tokens: list[int] = TOKENS, **more: Any) -> Any:
        return self.decode.arrive(DECODE | more, tokens)

    def hear(self) -> list[Any]:
        return list(self.decode.side.on_answers())


def test_a_load_begins_while_the_prompt_is_computed() -> None:
    both = Both(full(64))
    asked = both.arrive()
    assert both.decode.side.count_loadable(asked, 0) is None
    assert both.hear() == []
    source = both.prefill()
    leased = both.source.leases.find("p-1")
    assert leased is not None
    assert both.step(source, 100, [1, 2]) == [StepProgress(0, leased.lease.word, 0, 100)]
    (renew,) = both.hear()
    assert isinstance(renew, Renew)
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1
    load = both.decode.load(asked, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    assert (load.transfer_id, load.transfer.src_tables["g0"].pages.tolist()) == ("x", [1, 2])
    assert load.transfer.intervals == {"g0": [(0, len(TOKENS) - 1)]}
    assert both.decode.side.waiting.num_early == 1


def test_one_that_waits_for_blocks_until_its_prefill_has_ended_is_loaded_like_any_other() -> None:
    both = Both(full(64))
    asked, source = both.arrive(), both.prefill()
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    source.status = RequestStatus.FINISHED_LENGTH_CAPPED
    both.source.finish(source, [[1, 2, 3, 4, 5]])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1
    load = both.decode.load(asked, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    assert (load.transfer_id, load.transfer.src_tables["g0"].pages.tolist()) == ("", [1, 2, 3, 4, 5])


def test_loads_that_begin_early_hold_a_share_of_the_blocks() -> None:
    both = Both(full(64))
    both.decode.side.waiting.max_early_blocks = 4
    asked, source = both.arrive(), both.prefill()
    both.step(source, 100, [1, 2])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) is None  # 5 blocks
    assert both.decode.side.waiting.wait_for_prefills()
    both.decode.side.waiting.max_early_blocks = 5
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1


def near(both: Both, asked: Any) -> bool:
    """Whether the load may begin, after what there is to hear."""
    assert both.hear() == []
    return both.decode.side.count_loadable(asked, 0) is not None


def test_blocks_are_taken_when_the_prefill_is_about_to_end() -> None:
    both = Both(full(64))
    both.decode.side.waiting._pace.note(0.03, 100)  # 2 * 0.09 + 0.5 s before the end
    both.source.early._seconds_per_token = 1 / 60  # of a former prefill
    asked, source = both.arrive(), both.prefill()
    both.step(source, 60, [1])
    (renew,) = both.hear()
    assert isinstance(renew, Renew)
    assert both.decode.side.count_loadable(asked, 0) is None
    assert both.decode.side.waiting.wait_for_prefills()
    for _ in range(3):
        both.clock.now_s += 1.0
        both.step(source, 60, [1])
        assert not near(both, asked)
    both.clock.now_s += 1.0
    both.step(source, 60, [1])
    assert near(both, asked)


def test_the_second_step_of_an_asynchronous_engine_says_nothing_of_its_pace() -> None:
    both = Both(full(64))
    both.decode.side.waiting._pace.note(0.03, 100)
    both.source.early._seconds_per_token = 1 / 60
    asked, source = both.arrive(), both.prefill()
    both.step(source, 60, [1])
    both.step(source, 60, [1])  # scheduled while the first is computed
    both.hear()
    assert not near(both, asked)
    both.clock.now_s += 0.06  # and then each as it is computed
    both.step(source, 60, [1])
    assert near(both, asked)


def test_a_load_begins_at_once_where_nobody_knows_how_long_it_takes() -> None:
    for has_pace, has_former in ((False, True), (True, False)):
        both = Both(full(64))
        if has_pace:
            both.decode.side.waiting._pace.note(0.03, 100)
        both.source.early._seconds_per_token = 1.0 if has_former else float("nan")
        asked, source = both.arrive(), both.prefill()
        both.step(source, 60, [1])
        both.hear()
        assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1


@pytest.mark.parametrize("left_s", [float("nan"), float("inf"), 1e300])
def test_a_source_whose_end_is_never_near_is_read_when_it_has_ended(
    left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(full(64))
    both.decode.side.waiting._pace.note(0.03, 100)
    monkeypatch.setattr(both.source.early, "_expect", lambda *step: left_s)
    asked, source = both.arrive(), both.prefill()
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert not near(both, asked)
    source.status = RequestStatus.FINISHED_LENGTH_CAPPED
    both.source.finish(source, [[1, 2, 3, 4, 5]])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1


def test_what_its_prompt_shares_is_counted_once_however_often_a_source_is_heard() -> None:
    both = Both(full(64))
    both.decode.side.waiting._pace.note(0.03, 100)
    both.source.early._seconds_per_token = 1.0
    asked, source = both.arrive(TOKENS[:96] + [7] * 204), both.prefill()
    both.step(source, 60, [1])
    assert [type(command) for command in both.hear()] == [Renew]
    assert both.decode.side.count_loadable(asked, 0) is None
    both.step(source, 240, [1, 2, 3, 4, 5])
    source.status = RequestStatus.FINISHED_LENGTH_CAPPED
    both.source.finish(source, [[1, 2, 3, 4, 5]])
    assert both.hear() == []  # the lease is renewed already
    assert both.decode.side.count_loadable(asked, 0) == 96
    assert both.decode.not_loaded == [("prompt", 204)]
    load = both.decode.load(asked, blocks([11, 12, 13, 14, 15]), 96)
    assert (load.transfer_id, load.transfer.src_tables["g0"].pages.tolist()) == ("", [1, 2, 3, 4, 5])


def test_a_prefill_that_becomes_slower_does_not_take_the_blocks_back() -> None:
    both = Both(full(64))
    both.decode.side.waiting._pace.note(0.03, 100)
    both.source.early._seconds_per_token = 0.001
    asked, source = both.arrive(), both.prefill()
    both.step(source, 60, [1])
    both.hear()
    assert near(both, asked)
    both.decode.load(asked, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    both.clock.now_s += 60.0
    both.step(source, 60, [1])
    assert both.hear() == []
    assert both.decode.side.waiting.num_early == 1


def test_a_preempted_prefill_loses_its_lease_and_takes_another() -> None:
    """Trap 2. Its readers hear of the other one."""
    both = Both(full(64))
    source = both.prefill()
    both.step(source, 100, [1, 2])
    leased = both.source.leases.find("p-1")
    assert leased is not None
    first = leased.lease
    assert list(both.source.preempt(["p-1", "unknown"])) == [Revoke(first)]
    source.num_computed_tokens = 0
    (second,) = both.source.schedule(source)
    assert isinstance(second, Acquire)
    assert second.lease.word != first.word
    assert both.step(source, 64, [7])[0].word == second.lease.word


def test_a_prefill_that_is_preempted_and_goes_on_in_one_step_is_published_all_the_same() -> None:
    """vLLM preempts what runs when its caches are reset, and gives it blocks again before the connector hears of it."""
    both = Both(full(64))
    source = both.prefill()
    both.step(source, 100, [1, 2])
    leased = both.source.leases.find("p-1")
    assert leased is not None
    first = leased.lease
    source.num_computed_tokens = 0
    assert list(both.source.schedule(source)) == []  # the former lease is still there
    revoked, acquired = both.source.preempt(["p-1"], {"p-1": 64})
    assert revoked == Revoke(first)
    assert isinstance(acquired, Acquire)
    assert acquired.lease.word != first.word
    assert both.step(source, 64, [7])[0].word == acquired.lease.word
    source.num_computed_tokens = len(TOKENS)
    params, published = both.source.finish(source, [[7, 8, 9, 10, 11]])
    assert params is not None
    assert isinstance(published, Publish)


def test_a_window_holds_back_only_itself() -> None:
    """Trap 10: its pages go while the prompt is computed; those of the other group are listed as they come."""
    both = Both(full(64), window(64))
    asked, source = both.arrive(), both.prefill()
    both.step(source, 128, [1, 2], [21, 22])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1
    load = both.decode.load(asked, blocks([11, 12, 13, 14, 15], [0, 0, 0, 34, 35]), len(TOKENS) - 1)
    assert load.transfer.src_tables.keys() == {"g0"}
    (interval,) = load.transfer.intervals["g1"]
    assert interval[1] == len(TOKENS) - 1


def test_engines_that_wait_for_one_another_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 5: early loads hold blocks and wait, as requests that wait for blocks do."""
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)
    layers = MODELS[0].layers(16, 0)
    for seed in range(4):
        world = World({name: Shape(layers, blocks=16) for name in ("p", "d")}, base_config(), seed, Weather(early=1.0))
        try:
            world.run(20, ticks_between=4)
            assert world.num_early > 0
            waits = [engine.connector._scheduler._consumer.waiting for engine in world.by_name.values()]
            assert any(one._pace.lead_s(1) < float("inf") for one in waits), "no load has told how long it took"
        finally:
            world.close()


def test_of_loads_that_stand_still_the_youngest_gives_its_blocks_back() -> None:
    both = Both(full(64))
    asked, source = both.arrive(), both.prefill()
    both.step(source, 100, [1, 2])
    both.hear()
    both.decode.side.count_loadable(asked, 0)
    both.decode.load(asked, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    assert list(both.decode.side.give_up_longest()) == []
    assert list(both.decode.side.give_up_early()) == [Cancel("d-1", is_aborted=False)]


def test_an_early_load_gives_its_blocks_to_a_request_that_is_preempted_again_and_again() -> None:
    """The prefill waits for blocks that are held for requests behind that one (seed 720113 stood still)."""
    _, shapes, weather = draw(720113)
    world = World(shapes, base_config(), 720113, weather)
    try:
        world.run(20)
    finally:
        world.close()


def test_an_id_that_nobody_prefills_is_computed_here() -> None:
    both = Both(full(64))
    asked = both.arrive()
    both.clock.now_s += 29.0
    assert both.hear() == []
    assert both.decode.side.count_loadable(asked, 0) is None
    both.clock.now_s += 2.0
    assert both.hear() == []
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["unheard"])


def test_one_that_waits_in_the_source_s_queue_waits_here() -> None:
    both = Both(full(64))
    asked = both.arrive()
    both.source.arrive(request("p-1", TOKENS, kv_transfer_params=dict(PREFILL)))
    for _ in range(5):
        both.clock.now_s += 29.0
        assert both.hear() == []
        assert both.decode.side.count_loadable(asked, 0) is None


def test_two_prefills_of_one_id_are_computed_here() -> None:
    both = Both(full(64))
    asked = both.arrive()
    both.prefill()
    both.source.arrive(request("p-2", TOKENS, kv_transfer_params=dict(PREFILL)))
    both.hear()
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["prefill"])


def test_a_listener_that_cannot_be_asked_is_asked_again_for_a_while() -> None:
    both = Both(full(64))
    both.lost[:] = [True] * 1000
    asked = both.arrive()
    for _ in range(3):
        both.hear()
        both.clock.now_s += 11.0
        assert both.decode.side.count_loadable(asked, 0) is None
    both.hear()
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["unheard"])


def test_one_lost_answer_of_a_source_that_has_the_prefill_is_no_reason_to_give_up() -> None:
    """A listener holds a question for seconds: its silence begins with the answer that is lost, not with the one before."""
    both = Both(full(64))
    asked = both.arrive()
    both.source.arrive(request("p-1", TOKENS, kv_transfer_params=dict(PREFILL)))
    both.hear()
    both.clock.now_s += 31.0
    both.lost[:] = [True]
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) is None
    both.lost[:] = [True] * 1000
    for _ in range(2):
        both.hear()
        both.clock.now_s += 31.0
    both.hear()
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["unheard"])


def test_a_reset_computes_what_waits_for_a_prefill_that_is_not_known_yet() -> None:
    both = Both(full(64))
    asked = both.arrive()
    assert list(both.decode.side.reset()) == []
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["reset"])
    source = both.prefill()
    both.step(source, 100, [1, 2])
    assert both.hear() == []
    assert both.decode.side.count_loadable(asked, 0) == 0


def test_an_aborted_prefill_is_computed_here() -> None:
    both = Both(full(64))
    asked, source = both.arrive(), both.prefill()
    both.step(source, 100, [1, 2])
    both.hear()
    source.status = RequestStatus.FINISHED_ABORTED
    both.source.finish(source, [[1, 2]])
    both.hear()
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["prefill"])


def test_an_id_of_another_tenant_brings_what_both_prompts_share() -> None:
    """Ids are no secret. What is read is decided by what the source seals, and by this engine's own prompt."""
    both = Both(full(64))
    mine = TOKENS[:96] + [7] * 204
    asked, source = both.arrive(mine), both.prefill()
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == 96
    other = Both(full(64))
    asked, source = other.arrive([9] * 300), other.prefill()
    other.step(source, 300, [1, 2, 3, 4, 5])
    other.hear()
    assert (other.decode.side.count_loadable(asked, 0), other.decode.fallbacks) == (0, ["prompt"])


@pytest.mark.parametrize(
    ("mine", "tokens", "expected"),
    [("cat", TOKENS, len(TOKENS) - 1), (None, TOKENS, 0), ("cow", TOKENS, 0), (None, [9] * 300, 0)],
)
def test_a_picture_is_loaded_by_those_that_have_it(mine: str | None, tokens: list[int], expected: int) -> None:
    """The tokens of all pictures are the same: without the picture, whoever has the id would read another tenant's. Of another text nothing is needed."""
    both = Both(full(64))
    asked = both.decode.arrive(dict(DECODE), tokens, mm_features=[] if mine is None else [picture(mine, 20, 64)])
    source = both.prefill(mm_features=[picture("cat", 20, 64)])
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == expected
    reason = both.decode.side.missing_items.why_refused(asked, 0, expected)
    assert ("send the same to both engines" in reason) == (expected == 0 and tokens == TOKENS)


def test_another_salt_is_loaded_by_nobody() -> None:
    both = Both(full(64))
    asked = both.decode.arrive(dict(DECODE), TOKENS, cache_salt="mine")
    source = both.prefill(cache_salt="theirs")
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_port": "5"},
        {"remote_host": "a;b"},
        {"remote_host": 7},
    ],
)
def test_an_address_that_is_none_is_computed_here(wrong: dict[str, Any]) -> None:
    both = Both(full(64))
    asked = both.arrive(**wrong)
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["params"])


def test_a_host_that_is_not_allowed_is_not_asked() -> None:
    both = Both(full(64), hosts=SourceHosts(["10.0.0.0/8"]))
    asked = both.arrive()
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["host"])


@pytest.mark.parametrize("transfer", ["", None, 7, ["x"]])
def test_what_is_no_id_is_none(transfer: Any) -> None:
    """Then the parameters are those of a sequential router, and here they lack its fields."""
    both = Both(full(64))
    asked = both.arrive(transfer_id=transfer)
    assert (both.decode.side.count_loadable(asked, 0), both.decode.fallbacks) == (0, ["params"])


@pytest.mark.parametrize("transfer", ["x" * 5000, "a\nb", "\udc80", "ä" * 300])
def test_odd_ids_meet(transfer: str) -> None:
    both = Both(full(64))
    asked = both.arrive(transfer_id=transfer)
    source = request("p-1", TOKENS, kv_transfer_params=PREFILL | {"transfer_id": transfer}, num_computed_tokens=0)
    both.source.arrive(source)
    list(both.source.schedule(source))
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1


def test_choices_share_a_prefill_and_what_is_known_of_it() -> None:
    both = Both(full(64))
    first = request("0_d", TOKENS, kv_transfer_params=dict(DECODE))
    second = request("1_d", TOKENS, kv_transfer_params=dict(DECODE))
    for asked in (first, second):
        list(both.decode.side.arrive(asked, asked.kv_transfer_params))
    source = both.prefill()
    both.step(source, 100, [1, 2])
    assert [type(command) for command in both.hear()] == [Renew, Renew]
    for asked in (first, second):
        assert both.decode.side.count_loadable(asked, 0) == len(TOKENS) - 1
    (load,) = both.decode.side.allocate(first, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    assert isinstance(load, Load)
    assert list(both.decode.side.ended("0_d")) == []  # the other one still wants it


def test_an_idle_engine_rests_until_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(full(64))
    both.arrive()
    waited: list[float] = []
    following = both.decode.side.following
    monkeypatch.setattr(following, "wait", lambda seconds: waited.append(seconds) or False)
    resting = Idle(clock=iter(range(10**6)).__next__)
    assert resting.wait(both.decode.side, {"d-1", "another"}) == idle.PATIENCE_S  # that one may wait for blocks
    assert resting.wait(both.decode.side, {"d-1"}, [Cancel("d-1")]) == idle.PATIENCE_S  # a command is not kept waiting
    assert waited == []
    assert resting.wait(both.decode.side, {"d-1"}) == 0.0
    assert both.decode.side.following is following
    both.source.arrive(request("p-1", TOKENS, kv_transfer_params=dict(PREFILL)))
    source = both.prefill(name="p-1")
    both.step(source, 300, [1, 2, 3, 4, 5])
    both.hear()
    assert resting.wait(both.decode.side) == idle.PATIENCE_S  # it waits for blocks now


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_engine_rests_less_long_while_loads_are_under_way(monkeypatch: pytest.MonkeyPatch, is_loading: bool) -> None:
    """Only a step tells that one has failed."""
    both = Both(full(64))
    asked, source = both.arrive(), both.prefill()
    both.step(source, 100, [1, 2])
    both.hear()
    if is_loading:
        both.decode.side.count_loadable(asked, 0)
        both.decode.load(asked, blocks([11, 12, 13, 14, 15]), len(TOKENS) - 1)
    else:
        both.decode.side.waiting.max_early_blocks = 0
    now_s = [0.0]

    def wait(seconds: float) -> bool:
        now_s[0] += seconds
        return False

    monkeypatch.setattr(both.decode.side.following, "wait", wait)
    monkeypatch.setattr(idle, "find_arrivals", lambda: lambda: False)
    resting = Idle(clock=lambda: now_s[0])
    longest_s = 0.0
    for _ in range(12):
        began_s = now_s[0]
        resting.wait(both.decode.side)
        longest_s = max(longest_s, now_s[0] - began_s)
    assert longest_s == pytest.approx(idle.LOADING_S if is_loading else idle.LONGEST_S)


def test_arrivals_are_found_among_the_callers() -> None:
    import queue

    class Engine:
        def __init__(self) -> None:
            self.input_queue: queue.Queue[int] = queue.Queue()

        def step(self) -> Any:
            return find_arrivals()

    assert find_arrivals() is None
    engine = Engine()
    has_arrivals = engine.step()
    assert not has_arrivals()
    engine.input_queue.put(1)
    assert has_arrivals()


def test_the_pace_is_that_of_the_last_loads() -> None:
    pace = TransferPace()
    assert pace.lead_s(1000) == float("inf")
    pace.note(10.0, 1000)
    for _ in range(10):
        pace.note(1.0, 1000)
    assert pace.lead_s(1000) == pytest.approx(LEAD_FACTOR * 1.0 + MIN_LEAD_S, rel=0.01)
    pace.note(0.004, 2)  # a short one takes longer for each token, and counts for little
    assert pace.lead_s(1000) == pytest.approx(LEAD_FACTOR * 1.0 + MIN_LEAD_S, rel=0.01)


def test_a_rank_tells_how_long_it_has_read() -> None:
    """Before the end of the prefill and behind it. A rank that had nothing to read says nothing of the pace."""
    rank = WorkerSide(None, None, "d", read_options({}))
    early = TransferStats(100, 100, 1, 0, 0.0, 0.25, num_early_bytes=60, early_s=1.5)
    rank._note(
        Results(
            received={
                "early": early,
                "later": TransferStats(9, 9, 1, 0, 0.0, 0.5),
                "none": TransferStats(0, 0, 0, 0, 0.0, 0.1),
            }
        )
    )
    told = rank.take_metadata()
    assert told is not None
    assert told.reading_s == {"early": 1.75, "later": 0.5}
    slower = ReshardWorkerMetadata(reading_s={"later": 0.75, "other": 1.0})
    assert told.aggregate(slower).reading_s == {"early": 1.75, "later": 0.75, "other": 1.0}


def go_on_without_a_load(both: Both, asked: Any) -> None:
    """vLLM gives it blocks and loads nothing, as of every request whose prefix hits it must not read."""
    assert list(both.decode.side.allocate(asked, blocks([11, 12, 13, 14, 15]), 0)) == []
    asked.kv_transfer_params["do_remote_prefill"] = False  # as `SchedulerSide.allocate` does


def test_a_request_that_is_computed_before_its_prefill_is_known_gives_it_back() -> None:
    """With log-probabilities of the prompt vLLM does not wait for an answer. Its source would hold the blocks until the last token here."""
    both = Both(full(64))
    asked, source = both.arrive(), both.prefill()
    assert both.decode.side.count_loadable(asked, 0) is None
    go_on_without_a_load(both, asked)
    both.step(source, 100, [1, 2])
    assert [type(command) for command in both.hear()] == [Release]
    assert not len(both.decode.side.waiting)
    assert (both.decode.fallbacks, both.decode.side.following.num_open) == ([], 0)


def test_a_request_that_is_computed_already_is_not_lost_with_its_prefill() -> None:
    both = Both(full(64))
    asked = both.arrive()
    go_on_without_a_load(both, asked)
    both.clock.now_s += 31.0
    assert (both.hear(), both.decode.fallbacks) == ([], [])


def test_a_prefill_of_this_very_engine_is_counted_once_and_given_back_when_it_has_ended() -> None:
    both = Both(full(64), engine="p", own_key=KEY)
    asked, source = both.arrive(), both.prefill()
    both.step(source, 300, [1, 2, 3, 4, 5])
    assert [type(command) for command in both.hear()] == [Release]
    assert both.decode.side.count_loadable(asked, 0) == 0
    go_on_without_a_load(both, asked)
    source.status = RequestStatus.FINISHED_LENGTH_CAPPED
    both.source.finish(source, [[1, 2, 3, 4, 5]])
    assert [type(command) for command in both.hear()] == [Release]
    assert both.decode.fallbacks == ["itself"]
