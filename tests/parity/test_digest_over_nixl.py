"""Do digest requests and answers cross real NIXL, and is a byte that was changed found there too?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from tests.unit.session import world as worlds
from tests.unit.session.world import World, collect, make_world, meet, order_load

from kvreshard.tools import digest_check
from kvreshard.tools.observer import ObserverOptions
from kvreshard.transport.nixl import NixlTransport

pytestmark = pytest.mark.nixl
CHECKED = ObserverOptions(digest_share=1.0)
# Turns are as fast as this machine; only a failing test runs out of them.
MANY_TURNS = 200_000


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Two ranks read from one, all in this process, each with a NIXL agent of its own."""
    if "UCX_NET_DEVICES" not in os.environ:
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with contextlib.ExitStack() as stack:

        def transport(fabric: object, name: str, faults: object) -> NixlTransport:
            made = NixlTransport(name)
            stack.callback(made.close)
            return made

        monkeypatch.setattr(worlds, "FaultyTransport", transport)
        made = make_world(1, 2, watched=CHECKED)
        stack.callback(made.close)
        yield made


def run_until_over(world: World) -> tuple[set[str], set[str], set[str]]:
    """(received, failure kinds, ends of comparisons) of the destination's ranks, once both have one."""
    received, failed, checks, ended = set[str](), set[str](), set[str](), 0
    for _ in range(MANY_TURNS):
        world.turn(1)
        for endpoint in world.dst.endpoints.values():
            found = endpoint.collect()
            ended += len(found.received) + len(found.failed)
            received |= set(found.received)
            failed |= {failure.kind for failure in found.failed.values()}
            checks |= set(found.checks.values())
        if ended == len(world.dst.endpoints):
            break
    return received, failed, checks


def start(world: World) -> None:
    world.acquire_and_publish()
    order_load(world)
    world.turn()
    meet(world)


def test_an_honest_load_is_equal(world: World) -> None:
    start(world)
    assert run_until_over(world) == ({"d"}, set(), {"equal"})
    assert collect(world.src)[1] == {}


def test_a_byte_that_changes_after_it_was_read_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = digest_check.make_requests

    def change(*args: object) -> object:
        for content in world.src.memory.values():
            content[:] += 1
        return real(*args)

    monkeypatch.setattr(digest_check, "make_requests", change)
    start(world)
    received, failed, checks = run_until_over(world)
    assert (received, failed) == (set(), {"digest"})
    assert checks == {"different"}
