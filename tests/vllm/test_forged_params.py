"""Clients that change their `kv_transfer_params`, mix those of two requests, or send them again.

Two prefill engines and a decode engine without kernels (`simulation/`): vLLM's own schedulers with this connector. A client knows everything
that travels, and not the engines' keys. Whatever it sends: no byte moves, nothing enters the prefix cache, and all blocks are free again.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.changed import leaves, other
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Engine, Finished, Shape
from tests.vllm.simulation.text import Text
from tests.vllm.simulation.world import World

from kvreshard.session.seal import instance_id_of
from kvreshard.vllm import idle
from kvreshard.vllm.leases import Leases
from kvreshard.vllm.params import KEY, read_params

pytestmark = pytest.mark.vllm

NUM_TOKENS = 70
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
# Where the engine is found may be rewritten on the way; what is for routers only is not read.
NOT_SEALED = {
    *("remote_host", "remote_port", "do_remote_prefill", "do_remote_decode"),
    *("tp_size", "dcp_size", "pp_size", "transfer_mode", "remote_blocks_expiry_time", "remote_block_ids"),
    "remote_prefill_cached_tokens",  # vLLM adds it
}


class Fleet:
    """Prefill engines `p` and `q`, a decode engine `d` that fails requests whose loads fail, and what `d` has posted."""

    def __init__(self, prefill_role: str = "kv_producer", decode_role: str = "kv_consumer") -> None:
        layers = MODELS[0].layers(16, 0)
        self.world = World(
            {
                "p": Shape(layers, blocks=200, role=prefill_role),
                "q": Shape(layers, blocks=200, role=prefill_role),
                "d": Shape(layers, blocks=60, role=decode_role, failure_policy="fail"),
            },
            base_config(),
            0,
        )
        self.count, self.posted = 0, list[object]()
        self.decode, self.fallbacks = self.world.by_name["d"], list[str]()
        self.decode.connector._scheduler._log._count = self._count
        for name in ("p", "q"):  # as many as the tables of the simulation's ranks
            self.world.by_name[name].connector._scheduler._producer.leases = Leases(64)
        for endpoint in self.decode.endpoints:
            real = endpoint._transport.post
            endpoint._transport.post = lambda *args, real=real: self.posted.append(args) or real(*args)

    def _count(self, counter: str, label: str, _amount: int) -> None:
        if counter == "fallbacks":
            self.fallbacks.append(label)

    def ask(self, name: str, tokens: list[int], params: dict[str, Any], request: str = "") -> Finished:
        """One request from its beginning to its end. `request`: its id, if not one of ours."""
        engine, self.count = self.world.by_name[name], self.count + 1
        request = request or f"{name}-{self.count}"
        engine.add(request, Text(tokens, 20), len(tokens), 1, params)
        for _ in range(300):
            self.world.clock.now_s += 0.02
            self.world.route_and_meet()
            for one in self.world.by_name.values():
                one.advance()
                one.turn()
            self.world.fabric.step()
            if request in engine.finished:
                return engine.finished.pop(request)
        raise AssertionError(f"{request} has no end")

    def prefill(self, name: str, seed: int) -> tuple[list[int], dict[str, Any]]:
        """A text, and what the router gets for it."""
        tokens = [(seed * 37 + i * 11) % 256 for i in range(NUM_TOKENS)]
        answer = self.ask(name, tokens, PREFILL)
        assert answer.params is not None
        return tokens, json.loads(json.dumps(answer.params))

    @property
    def failures(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for one in self.decode.workers:
            for cause, amount in one.stats.data["counts"]["failures"].items():
                counts[cause] = counts.get(cause, 0) + amount
        return counts

    def check_nothing_came(self, tokens: list[int], params: dict[str, Any], cause: str | None = "seal") -> None:
        """The request fails with `cause`, or is computed from its own tokens (None: either); nothing is read or kept."""
        posted, failures, fallbacks = len(self.posted), self.failures, len(self.fallbacks)
        cached = {block.block_id for block in self.cached}  # before a request that is computed adds its own
        answer = self.ask("d", tokens, params)
        has_failed = str(answer.reason) == "error"
        if cause is not None or has_failed:
            gained = {
                name: n - failures.get(name, 0) for name, n in self.failures.items() if n != failures.get(name, 0)
            }
            assert gained == {cause or "seal": len(self.decode.workers)}, (answer, gained)
            assert has_failed
            assert {block.block_id for block in self.cached} == cached
        else:
            assert len(self.fallbacks) == fallbacks + 1
        assert len(self.posted) == posted
        self.settle()

    @property
    def cached(self) -> list[Any]:
        """Blocks of `d` that serve prefix hits."""
        return [block for block in self.decode.scheduler.kv_cache_manager.block_pool.blocks if block.block_hash]

    def settle(self) -> None:
        """Everything comes to rest, and leases run out."""
        for _ in range(20):
            self.world.clock.now_s += 2.0
            self.world.route_and_meet()
            for engine in self.world.by_name.values():
                engine.advance()
                engine.turn()
            self.world.fabric.step()
        assert self.decode.num_free_blocks == self.decode.num_blocks_at_rest
        assert not self.decode.scheduler.requests
        assert self.decode.scheduler.reset_prefix_cache()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(idle, "PATIENCE_S", 0.0)
    made = Fleet()
    yield made
    made.world.close()


def old_seal(params: dict[str, Any]) -> str:
    """The seal without a key of former days, which anybody can make."""
    read = read_params(params)
    referred = (
        (read.remote.engine, read.remote.instance_id),
        (read.lease.request, read.lease.slot, read.lease.word),
        (read.num_tokens, read.groups, read.pages, read.prompt),
    )
    return hashlib.blake2b(json.dumps(msgspec.to_builtins(referred)).encode(), digest_size=16).hexdigest()


def guessed_seal(params: dict[str, Any]) -> str:
    """A seal with a key of the client's own."""
    return read_params(params).make_seal(bytes(32)).code.hex()


SEALS: tuple[Callable[[dict[str, Any]], str], ...] = (lambda params: str(params[KEY]["seal"]), old_seal, guessed_seal)


def put(params: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(params)
    inner: Any = changed
    for place in path[:-1]:
        inner = inner[place]
    inner[path[-1]] = value
    return changed


def test_an_honest_request_is_loaded(fleet: Fleet) -> None:
    tokens, params = fleet.prefill("p", 1)
    answer = fleet.ask("d", tokens, params)
    assert (answer.reason, fleet.failures, bool(fleet.posted)) == ("length", {}, True)
    assert fleet.cached
    key = fleet.world.by_name["p"].engine_metadata.key
    assert key.hex() not in json.dumps(params)


def test_another_requests_pages_are_not_read(fleet: Fleet) -> None:
    """The client has a lease of its own, and names the pages of another."""
    for seal in SEALS:
        _, victim = fleet.prefill("p", 1)
        tokens, mine = fleet.prefill("p", 2)
        forged = put(mine, (KEY, "pages"), victim[KEY]["pages"])
        assert forged != mine
        fleet.check_nothing_came(tokens, put(forged, (KEY, "seal"), seal(forged)))


def test_no_field_can_be_changed_alone(fleet: Fleet) -> None:
    """Each to another value, and to values that are too large, with the seal as it was, without a key, and with a guessed key."""
    _, example = fleet.prefill("p", 1)
    tried = 0
    for path, value in leaves(example):
        # Another engine or instance id is another address book: see the tests of mixed parameters and of a restart.
        if path[0] in NOT_SEALED or path in {("remote_engine_id",), (KEY, "instance_id"), (KEY, "seal")}:
            continue
        huge = [2**40, 2**63, 2**64 - 1] if isinstance(value, int) else ["f" * 300, "f" * 10**6]
        for made in (other(value), *huge):
            for seal in SEALS:
                tokens, params = fleet.prefill("p", 1)
                changed = put(params, path, other(dict(leaves(params))[path]) if made == other(value) else made)
                try:
                    forged = put(changed, (KEY, "seal"), seal(changed))
                except Exception:  # noqa: BLE001  parameters that cannot be read have no seal to make
                    forged = changed
                fleet.check_nothing_came(tokens, forged, None)
                tried += 1
    assert tried > 180


@pytest.mark.parametrize("seal", [None, 7, "", [], {}, "0" * 32, "é" * 32, "0" * 10**6])
def test_a_seal_that_is_none_is_refused(fleet: Fleet, seal: Any) -> None:
    tokens, params = fleet.prefill("p", 1)
    fleet.check_nothing_came(tokens, put(params, (KEY, "seal"), seal), None)


def test_a_missing_seal_is_refused(fleet: Fleet) -> None:
    tokens, params = fleet.prefill("p", 1)
    del params[KEY]["seal"]
    fleet.check_nothing_came(tokens, params, None)


@pytest.mark.parametrize(
    "mixed",
    [
        (KEY, "pages"), ("remote_request_id",), ("remote_num_tokens",), (KEY, "slot"), (KEY, "word"), (KEY, "prompt"), (KEY, "seal"),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_of_two_requests_are_not_mixed(fleet: Fleet, mixed: tuple[str, ...]) -> None:
    tokens, first = fleet.prefill("p", 1)
    _, second = fleet.prefill("p", 2)
    taken: Any = second
    for place in mixed:
        taken = taken[place]
    forged = put(first, mixed, taken)
    if forged != first:  # both have as many tokens
        fleet.check_nothing_came(tokens, forged)


@pytest.mark.parametrize(
    "seal", [lambda p, q: SEALS[0](p), lambda p, q: SEALS[1](p), lambda p, q: SEALS[2](p), lambda p, q: SEALS[0](q)]
)
def test_parameters_of_one_engine_are_not_taken_by_another(fleet: Fleet, seal: Callable[..., str]) -> None:
    """The block ids of a request of `p`, asked of `q`, where they are somebody else's."""
    tokens, of_p = fleet.prefill("p", 1)
    _, of_q = fleet.prefill("q", 2)
    forged = copy.deepcopy(of_p)
    for name in ("remote_engine_id", "remote_host", "remote_port"):
        forged[name] = of_q[name]
    forged[KEY]["instance_id"] = of_q[KEY]["instance_id"]
    fleet.check_nothing_came(tokens, put(forged, (KEY, "seal"), seal(forged, of_q)))


def restart(engine: Engine) -> None:
    """Another instance id of the engine, with the same request, lease and pages in it."""
    key = bytes(range(1, 33))
    engine.engine_metadata = msgspec.structs.replace(engine.engine_metadata, key=key, instance_id=instance_id_of(key))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_parameters_of_a_former_incarnation_are_not_taken(fleet: Fleet, is_renamed: bool) -> None:
    """That instance is not met any more. Under the name of the one that is there, its seal does not hold."""
    tokens, params = fleet.prefill("p", 1)
    restart(fleet.world.by_name["p"])
    if is_renamed:
        params = put(params, (KEY, "instance_id"), fleet.world.by_name["p"].engine_metadata.instance_id)
    fleet.check_nothing_came(tokens, params, "seal" if is_renamed else "handshake")


def test_parameters_of_a_lease_that_is_over_are_not_served(fleet: Fleet) -> None:
    """Their seal holds: what was read is thrown away when the lease's word is not there."""
    tokens, params = fleet.prefill("p", 1)
    fleet.settle()
    answer = fleet.ask("d", tokens, params)
    assert (str(answer.reason), set(fleet.failures)) == ("error", {"stale lease"})
    assert fleet.cached == []
    fleet.settle()
