"""Is nothing read that the source did not seal, and is a digest asked of the pages that the source knows?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faulty_memory import Fault
from tests.pairs.small import request
from tests.unit.session.world import (
    KEY,
    LEASE,
    REMOTE,
    SLOT,
    WORD,
    World,
    at_once,
    collect,
    make_world,
    meet,
    order_load,
    seal,
)

from kvreshard.model.changed import replace
from kvreshard.model.tables import Request
from kvreshard.session.commands import Acquire, Load, Publish, Revoke
from kvreshard.session.lease import Lease
from kvreshard.session.seal import Seal
from kvreshard.testing.oracle import differing_bytes, write_values
from kvreshard.tools.observer import ObserverOptions
from kvreshard.tools.recorder import Recorder
from kvreshard.transport.base import Transfer

CHECKED = ObserverOptions(digest_share=1.0, digest_timeout_s=20.0)
MINE, THEIRS = [1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15]


@pytest.fixture(params=[(1, 1), (1, 2), (4, 2)], ids=lambda sizes: f"{sizes[0]}->{sizes[1]}")
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = make_world(*request.param, recorder=Recorder(tmp_path, 4, submit=at_once), watched=CHECKED)
    made.acquire_and_publish()
    yield made
    made.close()


def wanted(world: World, src_pages: list[int]) -> Request:
    return request(world.src.layout, world.dst.layout, 21, src_pages=src_pages, new_pages=[2, 3, 4, 5])


def posts(world: World) -> list[Transfer]:
    """Everything that the reader's ranks post from now on."""
    seen: list[Transfer] = []
    for transport in world.dst.transports.values():
        real = transport.post

        def post(*args: object, real: object = real) -> Transfer:
            seen.append(real(*args))  # type: ignore[operator]
            return seen[-1]

        transport.post = post  # type: ignore[method-assign, assignment]
    return seen


def load(world: World, transfer: Request, said: Seal, lease: Lease = LEASE, name: str = "d") -> None:
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load(name, REMOTE, lease, transfer, said, gives_back=True))
    world.turn()
    meet(world)
    world.turn(20)


@pytest.mark.parametrize(
    "said",
    [
        lambda forged, honest: seal(honest),
        lambda forged, honest: seal(forged, key=bytes(32)),
        lambda forged, honest: seal(forged, LEASE._replace(word=1)),
        lambda forged, honest: Seal(b"other facts", seal(forged).code),
        lambda forged, honest: Seal(b"", b""),
        lambda forged, honest: Seal(b"", seal(forged).code[:-1]),
    ],
)
def test_pages_that_were_not_sealed_are_not_read(world: World, said: object, tmp_path: Path) -> None:
    """Nothing is posted, no byte changes, nothing is recorded; requests beside it go on."""
    forged, before = wanted(world, THEIRS), {p: content.copy() for p, content in world.dst.memory.items()}
    seen = posts(world)
    load(world, forged, said(forged, wanted(world, MINE)))  # type: ignore[operator]
    received, failed, _ = collect(world.dst)
    assert (received, {name: failure.kind for name, failure in failed.items()}) == (set(), {"d": "seal"})
    assert "were not sealed by that engine" in failed["d"].text
    assert (seen, differing_bytes(before, world.dst.memory)) == ([], {})
    assert not failed["d"].is_quarantined
    assert list(tmp_path.iterdir()) == []
    assert [len(endpoint._scratch) for endpoint in world.dst.endpoints.values()] == [0] * len(world.dst.endpoints)
    world.acquire_and_publish()
    order_load(world, "honest")
    world.turn(20)
    assert collect(world.dst)[:2] == ({"honest"}, {})


def test_a_load_of_nothing_must_be_sealed_too(world: World) -> None:
    """With it the source would be told that its pages are not needed."""
    nothing = replace(wanted(world, MINE), intervals={name: [] for name in wanted(world, MINE).intervals})
    load(world, nothing, Seal(b"", b""))
    assert collect(world.dst)[1]["d"].kind == "seal"


@pytest.mark.parametrize(
    "lease",
    [
        Lease("r", SLOT, WORD + 1),
        Lease("s", SLOT, WORD),
        Lease("r", SLOT + 1, WORD),
    ],
)
def test_a_sealed_load_under_another_lease_is_not_read(world: World, lease: Lease) -> None:
    seen, mine = posts(world), wanted(world, MINE)
    load(world, mine, seal(mine), lease)
    assert collect(world.dst)[1]["d"].kind == "seal"
    assert seen == []


def test_a_digest_is_of_the_pages_that_the_source_offered(world: World) -> None:
    """Even if a reader loads other pages, with a seal that holds: what it asks for is the request's, not what it has read."""
    rng_pages = wanted(world, THEIRS)
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted(world, MINE), 3)
    write_values(world.src.layout, world.dst.layout, world.src.memory, rng_pages, 4)
    load(world, rng_pages, seal(rng_pages))
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    assert [list(found.received) for found in results] == [[]] * len(results)
    assert {found.failed["d"].kind for found in results} == {"digest"}
    assert {found.checks["d"] for found in results} == {"different"}


def test_pages_in_another_order_are_not_equal(world: World) -> None:
    turned = wanted(world, [2, 1, *MINE[2:]])
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted(world, MINE), 3)
    load(world, turned, seal(turned))
    assert {found.checks["d"] for found in (e.collect() for e in world.dst.endpoints.values())} == {"different"}


def test_a_digest_request_before_the_offer_waits_for_it() -> None:
    """A reader may be faster than the source's next step: the lease is granted, and its pages are not yet known."""
    world = make_world(1, 2, watched=CHECKED)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("r", SLOT, WORD)))
    mine = order_load(world)
    write_values(world.src.layout, world.dst.layout, world.src.memory, mine, 3)
    world.turn()
    meet(world)
    world.turn(20)
    assert collect(world.dst)[:2] == (set(), {})
    (endpoint,) = world.src.endpoints.values()
    assert endpoint.turn() > 0.0, "a session with nothing to answer rests"
    endpoint.submit(Publish("r", 30.0, mine.src_tables))
    world.turn(20)
    assert collect(world.dst)[:2] == ({"d"}, {})
    world.close()


@pytest.mark.parametrize("end", [Revoke(Lease("r", SLOT, WORD)), Acquire(Lease("r", SLOT, WORD + 1))])
def test_a_digest_request_whose_lease_ends_before_the_offer_gets_no_digest(end: Revoke | Acquire) -> None:
    world = make_world(1, 1, watched=CHECKED)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("r", SLOT, WORD)))
    order_load(world)
    world.turn()
    meet(world)
    world.turn(20)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(end)
    world.turn(20)
    (failure,) = collect(world.dst)[1].values()
    assert (failure.kind, "the source no longer keeps the request's pages" in failure.text) == ("digest", True)
    world.close()


def test_the_key_stands_in_no_record_and_in_no_text(tmp_path: Path) -> None:
    world = make_world(1, 1, recorder=Recorder(tmp_path, 4, submit=at_once))
    world.acquire_and_publish()
    world.faults[-1] = Fault(fail_after_copies=0)
    order_load(world)
    world.turn()
    meet(world)
    world.turn(10)
    (failure,) = collect(world.dst)[1].values()
    (record,) = tmp_path.iterdir()
    assert failure.kind == "transfer"
    assert KEY not in record.read_bytes()
    engine_metadata = world.src.engine_metadata()
    assert engine_metadata.key == KEY
    for shown in (
        repr(engine_metadata),
        str(engine_metadata),
        repr(world.dst.endpoints[0]._peers.met(REMOTE)),
        failure.text,
    ):
        assert repr(KEY)[2:-1] not in shown
        assert KEY.hex() not in shown
    world.close()
