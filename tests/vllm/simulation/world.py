"""Engines that exchange requests through a router, at random but repeatable, and what must always hold.

1. `submit`: a text is prefilled on one engine and decoded on another, on several, or on none; or it is only computed somewhere.
2. `tick`: somebody does something: a step of an engine, a turn of its sessions, bytes move, engines meet, a request is aborted.
3. `drain`: everybody goes on until nothing is left to do; leases that nobody wanted run out.

Checked throughout: kernels find what their texts have (`runner.WrongCache`), every answer is what its text says. In the end: every
block is free, every lease slot and session is. Where nothing fails, everything that can be loaded is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tests.faulty_memory import Fault, FaultyFabric
from tests.unit.session.world import Clock, ScriptedPeers
from tests.vllm.simulation.base import LONGEST, MOST_SAID
from tests.vllm.simulation.engine import Engine, Shape
from tests.vllm.simulation.text import VOCABULARY, Picture, Text
from vllm.v1.core.sched.interface import PauseState

from kvreshard.plan import compile_route
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.endpoint import REST_IDLE_S
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address, HandshakeError, TransferQuestion
from kvreshard.session.mover import Mover
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.statement import Answer, read_reply
from kvreshard.transport.base import Transfer
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS
from kvreshard.vllm.versions import find_version, minor

ENDS = ("length", "stop")
# Drafts may be right beyond the end.
BEYOND = 10

# vLLM 0.31 loads whole blocks only where a window is replayed, also of a prefill that has all of it.
CUT_BY_VLLM = ("vllm",) if minor(find_version() or "") == (0, 31) else ()


@dataclass(frozen=True)
class Weather:
    """Shares of what goes otherwise than planned. `delays`: steps that bytes take; `failures`: transfers that fail; `jumps`: one engine
    stands still for seconds; `stops`: longer
    prefills that end with a token of their own; `misrouted`: prefills sent to an engine that only prefills; `connector_resets`: caches
    reset for new weights, what is offered and waits to be loaded included; `pauses`: an engine is paused in some way, or goes on;
    `odd_names`: requests with ids that no peer takes; `prefill_choices`: prefills that are asked for several choices; `sleeps`: an engine is
    put to sleep, or wakes up; `early`: requests that are sent to both engines at once; `unheard`: of these, those whose prefill never comes, or
    is not the only one of its id; and answers of listeners that are lost.
    """

    delays: int = 0
    failures: float = 0.0
    unmet: float = 0.0
    aborts: float = 0.0
    unwanted: float = 0.0
    retried: float = 0.0
    choices: float = 0.0
    other_prompts: float = 0.0
    jumps: float = 0.0
    longer_prefills: float = 0.0
    stops: float = 0.0
    misrouted: float = 0.0
    cache_resets: float = 0.0
    connector_resets: float = 0.0
    pauses: float = 0.0
    odd_names: float = 0.0
    prefill_choices: float = 0.0
    sleeps: float = 0.0
    early: float = 0.0
    unheard: float = 0.0

    @property
    def is_calm(self) -> bool:
        """Nothing that keeps a load from ending well."""
        return not (
            self.failures
            or self.unmet
            or self.aborts
            or self.other_prompts
            or self.jumps
            or self.connector_resets
            or self.sleeps
            or self.unheard
        )


@dataclass
class Asked:
    """One request of an engine."""

    name: str
    engine: Engine
    text: Text
    num_prompt: int
    num_tokens: int
    wants_load: bool
    then: Callable[[dict[str, Any] | None], None] | None = None
    stop: int | None = None
    params: dict[str, Any] | None = None
    is_aborted: bool = False

    @property
    def expected(self) -> list[int]:
        """What it is to say."""
        said = self.text.tokens[self.num_prompt : self.num_prompt + self.num_tokens]
        return said[: said.index(self.stop) + 1] if self.stop in said else said


class WorldPeers(ScriptedPeers):
    """Engines of one process meet when the world lets them."""

    def __init__(self, world: World, engine: Engine, rank: int) -> None:
        super().__init__(world.meetings)
        self._world, self._engine, self._rank = world, engine, rank
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def _ask(self, peer: Peer) -> None:
        if not self._is_closed and self._world.rng.random() < self._world.weather.unmet:
            self.forget(peer.remote, peer)

    def _meet(self, me: LocalRank, remote: RemoteEngine, future: Future[Peer]) -> None:
        if self._is_closed:
            return
        if self._world.rng.random() < self._world.weather.unmet:
            del self.known[remote]
            future.set_exception(HandshakeError("nobody is there today"))
            return
        source = self._world.by_name[remote.engine]
        if source.is_asleep or source.engine_metadata.instance_id != remote.instance_id:
            future.set_exception(HandshakeError("it sleeps, or has slept"))
            return
        route = self._world.route(source, self._engine, self._rank)
        names = {rank.rank: f"{remote.instance_id[:8]}-{rank.rank}" for rank in source.engine_metadata.ranks}
        for rank in source.engine_metadata.ranks:
            me.transport.add_peer(names[rank.rank], rank.transport_metadata)
        future.set_result(
            Peer(
                remote,
                source.engine_metadata,
                source.side.layout,
                route,
                Mover(me.transport, me.memory, names, me.staging),
            )
        )


class WorldFollower(Follower):
    """Asks the rendezvous of the world's engines."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, tuple[Address, TransferQuestion]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def follow(self, name: str, address: Address, known: TransferQuestion) -> None:
        self._known[name] = address, known

    def drop(self, name: str) -> None:
        self._known.pop(name, None)

    def take(self) -> list[tuple[str, Answer | HandshakeError]]:
        found: list[tuple[str, Answer | HandshakeError]] = []
        rng, weather = self._world.rng, self._world.weather
        for name, (address, known) in list(self._known.items()):
            source = next(engine for engine in self._world.by_name.values() if engine.address == address)
            if source.is_asleep or rng.random() < weather.unheard / 4:
                found.append((name, HandshakeError("nobody listens")))
                continue
            shown = source.connector._scheduler._handshake.rendezvous
            reply = shown.answer([known], is_last=rng.random() < 0.5)
            answers = {} if reply is None else read_reply(reply)
            if 0 in answers:
                found.append((name, answers[0]))
        for name, _ in found:
            del self._known[name]
        return found

    def ask(self) -> float:
        return 1.0

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class World:
    """`shapes`: one engine each, by name. Prompts have up to `LONGEST` tokens."""

    shapes: dict[str, Shape]
    base_config: Any
    seed: int
    weather: Weather = Weather()
    by_name: dict[str, Engine] = field(default_factory=dict)
    meetings: list[Callable[[], None]] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    num_loaded: int = 0
    num_misrouted: int = 0
    num_early: int = 0
    num_ended: int = 0
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock, self.fabric = Clock(), FaultyFabric(shuffle_seed=self.seed)
        self.began_s = self.clock.now_s
        self._routes: dict[tuple[str, str, int], Any] = {}
        self._texts: list[list[int]] = []
        self._later: list[Callable[[], None]] = []
        # Prefills whose lease may run out before a decode engine asks: the router waits for the last choice.
        self._read_late: set[str] = set()
        self._count = self._num_transfers = 0
        options = EndpointOptions(load_timeout_s=300.0, settle_timeout_s=20.0, heartbeat_s=5.0, retry_s=5.0)
        for number, (name, shape) in enumerate(self.shapes.items()):
            self.by_name[name] = Engine(
                name, shape, self.base_config, self.clock, self.fabric, Address("127.0.0.1", number + 1), options,
                lambda engine, rank: WorldPeers(self, engine, rank), lambda: WorldFollower(self), self._fault, lambda: self.rng.random() < 0.6, self._meanwhile,
                lambda num_drafts: self.rng.randint(0, num_drafts),
            )  # fmt: skip
        self.can_prefill = [e for e in self.by_name.values() if e.shape.role != "kv_consumer"]
        self.can_decode = [e for e in self.by_name.values() if e.shape.role != "kv_producer"]

    def _fault(self, _index: int, _transfer: Transfer) -> Fault:
        delay = self.rng.randrange(self.weather.delays + 1)
        if self.rng.random() < self.weather.failures:
            return Fault(delay_steps=delay, fail_after_copies=0)
        return Fault(delay_steps=delay)

    def _meanwhile(self) -> None:
        """Loads may end between the launch of a step and the end of the one before it."""
        while self.rng.random() < 0.5:
            if self.meetings:
                self.meetings.pop()()
            for engine in self.by_name.values():
                engine.turn()
            self.fabric.step()

    def route(self, src: Engine, dst: Engine, rank: int) -> Any:
        key = (src.name, dst.name, rank)
        if key not in self._routes:
            self._routes[key] = compile_route(src.side.layout, dst.side.layout, rank)
        return self._routes[key]

    def make_prompt(self) -> list[int]:
        """A new text, or one that begins like another."""
        rng, prompt = self.rng, list[int]()
        if self._texts and rng.random() < 0.5:
            other = rng.choice(self._texts)
            prompt = other[: rng.choice([len(other), rng.randint(1, len(other))])]
        room = LONGEST - len(prompt)
        if not prompt or rng.random() < 0.7:
            prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, max(1, room)))]
        return prompt[:LONGEST]

    def submit(self) -> None:
        rng, prompt = self.rng, self.make_prompt()
        num_tokens = rng.randint(1, MOST_SAID)
        text = Text(prompt, num_tokens + BEYOND)
        self._texts.append(text.tokens[: len(prompt) + rng.choice([0, num_tokens])])
        if rng.random() < 0.2:
            self._ask(rng.choice(list(self.by_name.values())), text, len(prompt), num_tokens, None, False, None)
            return
        src = rng.choice(self.can_prefill)
        longer = rng.randint(2, 8) if rng.random() < self.weather.longer_prefills else 1
        params = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        prefill_text = Text(prompt, longer + BEYOND)
        stop = rng.choice(prefill_text.tokens[len(prompt) :][:longer]) if rng.random() < self.weather.stops else None
        then: Callable[[dict[str, Any] | None], None] = lambda answer: self._prefilled(  # noqa: E731
            src, prompt, num_tokens, answer, longer == 1
        )
        if self.weather.early and rng.random() < self.weather.early:
            self._submit_early(src, prefill_text, prompt, longer, num_tokens, params)
            return
        if rng.random() < self.weather.prefill_choices:
            self._ask_choices(src, prefill_text, len(prompt), longer, params, then, rng.randint(2, 3))
            return
        self._ask(src, prefill_text, len(prompt), longer, params, False, then, stop)

    def _submit_early(
        self, src: Engine, prefill_text: Text, prompt: list[int], longer: int, num_tokens: int, params: dict[str, Any]
    ) -> None:
        """To both engines, in either order. Of some ids no prefill comes, of some two."""
        self._num_transfers += 1
        rng, transfer = self.rng, {"transfer_id": f"xfer-{self._num_transfers}"}
        is_odd = rng.random() < self.weather.unheard
        where = {"remote_host": src.address.host, "remote_port": src.address.port}
        num_prefills = rng.choice([0, 2]) if is_odd else 1
        others = [engine for engine in self.can_decode if engine is not src or rng.random() < 0.1]
        targets = [rng.choice(others)] if rng.random() >= self.weather.unwanted else []
        if targets and rng.random() < self.weather.choices:
            targets += [targets[0]] * rng.randint(1, 3)
        for _ in range(num_prefills):
            self._later.append(
                lambda: self._ask(src, prefill_text, len(prompt), longer, {**params, **transfer}, False, None)
            )
        for dst in targets:
            mine = list(prompt)
            if rng.random() < self.weather.other_prompts:
                mine = rng.choice([mine[:-1] or mine, [*mine, 7], [*mine[: len(mine) // 2 + 1], 3, 5]])
            is_same = mine == prompt and not is_odd and longer == 1 and len(targets) == 1 and dst is not src
            is_same = is_same and dst in self.can_decode
            text = Text(mine, num_tokens + BEYOND)
            given = {"do_remote_prefill": True, "do_remote_decode": False, **transfer, **where}
            self.num_early += is_same
            self._later.append(
                lambda dst=dst, text=text, mine=mine, given=given, is_same=is_same: self._ask(
                    dst, text, len(mine), num_tokens, given, is_same, None
                )
            )
        rng.shuffle(self._later)

    def _ask_choices(
        self,
        src: Engine,
        text: Text,
        num_prompt: int,
        num_tokens: int,
        params: dict[str, Any],
        then: Callable[[dict[str, Any] | None], None],
        count: int,
    ) -> None:
        """vLLM makes a request of each, and the router gets what the last one says."""
        ended_s: list[float] = []
        parent = f"{src.name}-of-{self._count}"

        def one_is_over(answer: dict[str, Any] | None) -> None:
            ended_s.append(self.clock.now_s)
            if len(ended_s) == count:
                if answer is not None and ended_s[-1] - ended_s[0] > src.shape.lease_s / 2:
                    self._read_late.add(answer["remote_request_id"])
                then(answer)

        for number in range(count):
            self._ask(src, text, num_prompt, num_tokens, dict(params), False, one_is_over, None, f"{number}_{parent}")

    def _prefilled(
        self, src: Engine, prompt: list[int], num_tokens: int, answer: dict[str, Any] | None, is_usual: bool
    ) -> None:
        rng = self.rng
        others = [engine for engine in self.can_decode if engine is not src or rng.random() < 0.1]
        if rng.random() < self.weather.misrouted:
            others = [engine for engine in self.can_prefill if engine is not src] or others
        targets = [rng.choice(others)] if rng.random() >= self.weather.unwanted else []
        if targets and rng.random() < self.weather.retried:
            targets.append(rng.choice(others))
        if targets and rng.random() < self.weather.choices:
            targets += [targets[0]] * rng.randint(1, 3)  # vLLM makes a request of each choice
        for number, dst in enumerate(targets):
            mine = list(prompt)
            if rng.random() < self.weather.other_prompts:
                mine = rng.choice([mine[:-1] or mine, [*mine, 7], [*mine[: len(mine) // 2 + 1], 3, 5]])
            # Of several choices one may come when the others are over, and their source has its blocks back.
            is_first = number == 0 and targets.count(dst) == 1
            is_same = mine == prompt and answer is not None and is_first and is_usual and dst is not src
            is_same = is_same and dst in self.can_decode
            self.num_misrouted += dst not in self.can_decode and answer is not None
            text = Text(mine, num_tokens + BEYOND)
            self._later.append(
                lambda dst=dst, text=text, mine=mine, is_same=is_same: self._ask(
                    dst, text, len(mine), num_tokens, answer, is_same, None
                )
            )

    def _ask(
        self,
        engine: Engine,
        text: Text,
        num_prompt: int,
        num_tokens: int,
        params: dict[str, Any] | None,
        wants_load: bool,
        then: Callable[[dict[str, Any] | None], None] | None,
        stop: int | None = None,
        name: str | None = None,
        picture: Picture | None = None,
    ) -> None:
        self._count += 1
        name = name or f"{engine.name}-{self._count}"
        if self.rng.random() < self.weather.odd_names:
            name += self.rng.choice(["\n", "x" * 300])
        self.asked[name] = Asked(name, engine, text, num_prompt, num_tokens, wants_load, then, stop, params)
        engine.add(name, text, num_prompt, num_tokens, params, stop, self.rng.randrange(3), picture)

    def tick(self) -> None:
        """Somebody does something."""
        rng, weather = self.rng, self.weather
        self.clock.now_s += 0.02
        engine = rng.choice(list(self.by_name.values()))
        what = rng.random()
        if what < 0.55:
            engine.advance()
            engine.sleep_if_still()
        elif what < 0.8:
            engine.turn()
        elif what < 0.9:
            self.fabric.step()
        elif what < 0.95 and self.meetings:
            self.meetings.pop(rng.randrange(len(self.meetings)))()
        elif self._later:
            self._later.pop(rng.randrange(len(self._later)))()
        if rng.random() < weather.jumps:
            self._stand_still(engine, rng.choice([6.0, 40.0]))
        if self.asked and rng.random() < weather.aborts:
            asked = rng.choice(list(self.asked.values()))
            asked.is_aborted = True
            asked.engine.abort(asked.name)
        if rng.random() < weather.cache_resets:
            engine.scheduler.reset_prefix_cache()
        if rng.random() < weather.connector_resets:
            engine.reset(is_running_reset=rng.random() < 0.5)
        if weather.sleeps and rng.random() < weather.sleeps:
            self._sleep_or_wake(engine)
        if rng.random() < weather.pauses:
            engine.scheduler.set_pause_state(rng.choice(list(PauseState)))
        self._hear()

    def _sleep_or_wake(self, engine: Engine) -> None:
        if engine.is_asleep:
            engine.wake_up()
        elif not engine.falls_asleep:
            engine.fall_asleep()
            for asked in self.asked.values():
                asked.is_aborted |= asked.engine is engine

    def _stand_still(self, stopped: Engine, seconds: float) -> None:
        """One engine does nothing for so long, and of the others only the sessions."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += REST_IDLE_S
            for engine in self.by_name.values():
                if engine is not stopped:
                    engine.turn()

    def _hear(self) -> None:
        for name, asked in list(self.asked.items()):
            answer = asked.engine.finished.pop(name, None)
            if answer is None:
                if asked.is_aborted and name not in asked.engine.scheduler.requests:
                    del self.asked[name]
                continue
            del self.asked[name]
            self.num_ended += 1
            is_failed = asked.engine.shape.failure_policy == "fail" and name in asked.engine.failed
            if asked.text.is_blind and answer.reason == "error":
                is_failed, self.num_refused = True, self.num_refused + 1
            if not asked.is_aborted and not is_failed:
                assert answer.reason in ENDS, (name, answer)
            if answer.reason in ENDS:
                self._check_answer(asked, answer.tokens)
            if is_failed and asked.params is not None:
                asked.engine.turn_away(asked.params)
            if asked.then is not None:
                asked.then(answer.params)
            if (asked.params or {}).get("remote_request_id") in self._read_late:
                asked.engine.failed.discard(name)
            elif asked.wants_load and not is_failed:
                self._check_loaded(asked)

    def _check_answer(self, asked: Asked, said: list[int]) -> None:
        # A prefill that drops the last tokens of a prompt, which the decode side computes, says the first of them again.
        is_prefill = (asked.params or {}).get("do_remote_decode")
        is_shorter = is_prefill and asked.engine.connector._scheduler._producer._config.num_backoff_tokens > 0
        assert is_shorter or said == asked.expected, (asked.name, said, asked.expected)

    def _check_loaded(self, asked: Asked) -> None:
        self.num_loaded += 1
        if self.weather.is_calm and asked.name not in asked.engine.given_up:
            # Everything but what vLLM computes in any case.
            there = asked.engine.loadable.get(asked.name, 0)
            backoff = max(
                MIN_COMPUTED_TOKENS,
                *(engine.connector._scheduler._consumer._config.num_backoff_tokens for engine in self.by_name.values()),
            )
            assert there >= asked.num_prompt - backoff, (asked.name, there, asked.num_prompt)
            # A prompt of one token has no state to load, and of two engines that read one prefill one may come too late.
            is_whole = asked.num_prompt > backoff and not self.weather.retried
            cause = asked.engine.partial.get(asked.name)
            assert not is_whole or cause in (None, *CUT_BY_VLLM), (asked.name, asked.engine.partial)

    def route_and_meet(self) -> None:
        """Nothing stays at the router, and nobody waits to meet another."""
        while self.meetings:
            self.meetings.pop()()
        while self._later:
            self._later.pop()()

    def drain(self, max_rounds: int = 4000) -> None:
        """Everybody goes on until nothing is left; then what nobody wanted runs out."""
        for engine in self.by_name.values():
            if engine.is_asleep:
                engine.wake_up()
            engine.falls_asleep = False
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for patience in range(max_rounds):
            self.clock.now_s += 0.02
            self.route_and_meet()
            busy = [engine.advance() for engine in self.by_name.values()]
            for engine in self.by_name.values():
                engine.turn()
            self.fabric.step()
            self._hear()
            if not any(busy) and not self.asked and not self._later and not self.meetings:
                break
            if patience > 300:
                self.clock.now_s += 1.0
        else:
            raise AssertionError(f"never at rest: {list(self.asked)}")
        for engine in self.by_name.values():
            self._check_rest(engine)
            # Two engines that read one prefill may come one after the other.
            failed = engine.failed - engine.read_back.keys()  # answers may be given up while they are read
            assert not failed or not self.weather.is_calm or self.weather.retried, (engine.name, engine.failed)
            for worker in engine.workers:  # no weather makes an order that cannot be carried out
                assert "request" not in worker.stats.data["counts"]["failures"], (engine.name, engine.failed)

    def _check_rest(self, engine: Engine) -> None:
        scheduling = engine.connector._scheduler
        assert not engine.scheduler.requests, engine.name
        assert engine.num_free_blocks == engine.num_blocks_at_rest, (engine.name, engine.num_free_blocks)
        assert not any(scheduling._producer.last_pages._held.values()), engine.name
        assert not scheduling._producer.last_pages._expected, engine.name
        assert not scheduling._producer.leases._leases, engine.name
        assert not scheduling._consumer.waiting, (engine.name, scheduling._consumer.waiting)
        assert not scheduling._admission._failed, engine.name
        assert not scheduling._admission._behind, engine.name
        assert not scheduling._admission._wanted, engine.name
        assert not any(scheduling._admission._all_wanted), engine.name
        assert not scheduling._consumer.waiting._num_early_blocks, engine.name
        assert not scheduling._consumer.missing_items._needed, engine.name
        for endpoint in engine.endpoints:
            assert len(endpoint._jobs._given_up) == 0, engine.name
            assert len(endpoint._scratch) == 0, engine.name
            assert not any(source.loaded for source in endpoint._remote_leases._sources.values()), engine.name

    def run(self, num_requests: int, ticks_between: int = 25) -> None:
        """A whole life."""
        for _ in range(num_requests):
            self.submit()
            for _ in range(self.rng.randrange(2 * ticks_between)):
                self.tick()
        self.drain()

    def close(self) -> None:
        for engine in self.by_name.values():
            engine.close()
