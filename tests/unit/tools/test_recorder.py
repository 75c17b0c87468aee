"""Does a failed load leave one record that can be read back, and does nothing grow, wait or fail because of it?"""

from __future__ import annotations

import logging
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faulty_memory import Fault
from tests.pairs.small import request
from tests.unit.session.prefills import LocalFollower, Prefill, rendezvous
from tests.unit.session.world import (
    LEASE,
    LIFE,
    OPTIONS,
    REMOTE,
    WORD,
    Clock,
    World,
    at_once,
    collect,
    make_world,
    meet,
    meet_engine,
    order_load,
    seal,
)
from tests.work import count_bytecodes

from kvreshard.model import BindError, KvReshardError, LayoutMismatch, WireError, wire
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import bind, compile_route
from kvreshard.session.commands import Cancel, Failure, Load, RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.peer import LocalRank
from kvreshard.tools import flight as form
from kvreshard.tools.flight import Flight, FlightSide, decode_flight, encode_flight
from kvreshard.tools.recorder import (
    MAX_EVENT_TEXT,
    MAX_EVENTS,
    MIN_INTERVAL_S,
    PART,
    PART_AGE_S,
    SUFFIX,
    Events,
    Recorder,
)
from kvreshard.tools.replay import replay, summarize
from kvreshard.transport.local import HostMemory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(tmp_path: Path, clock: Clock) -> Recorder:
    return Recorder(tmp_path / "flights", 3, clock, lambda: NOW_S + clock.now_s, at_once)


NOW_S = 1_700_000_000.0


@pytest.fixture
def world(recorder: Recorder) -> World:
    return make_world(2, 1, recorder=recorder)


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "flights").glob(f"*{SUFFIX}"))


def fail(world: World, name: str = "d") -> None:
    world.acquire_and_publish()
    world.faults[-1] = Fault(fail_after_copies=0)
    order_load(world, name)
    world.turn()
    meet(world)
    world.turn()


def test_a_failed_load_leaves_a_record_from_which_its_copies_follow(world: World, tmp_path: Path) -> None:
    fail(world)
    (path,) = records(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    flight = decode_flight(path.read_bytes())
    assert (flight.request, flight.source_request, flight.rank, flight.failure.kind) == ("d", "r", 0, "transfer")
    assert {"ordered", "met", "bound", "posted", "transfer failed", "failed"} <= {event.name for event in flight.events}
    assert flight.src is not None
    route = compile_route(wire.decode(flight.src.layout), wire.decode(flight.dst.layout), flight.rank)
    (endpoint,) = world.dst.endpoints.values()
    assert endpoint._me is not None
    then = compile_route(world.src.layout, world.dst.layout, 0)
    wanted = request(world.src.layout, world.dst.layout, 21, new_pages=[2, 3, 4, 5])
    assert summarize(bind(route, flight.transfer)) == summarize(bind(then, wanted))
    assert flight.is_routed


def test_the_record_of_an_early_load_has_the_pages_that_were_read(recorder: Recorder, tmp_path: Path) -> None:
    """Few of them were known when it was ordered."""
    shown = rendezvous()
    world = make_world(2, 1, recorder=recorder, follower=lambda: LocalFollower(shown, []))
    prefill = Prefill(world, shown, 40, Random(0))
    prefill.begin()
    load = prefill.order()
    for number in range(12):
        for rank in world.src.endpoints:
            while prefill.go_on(rank):
                pass
        if number == 6:
            prefill.publish()
            world.faults[-1] = Fault(fail_after_copies=0)
        meet(world)
        world.turn(1)
        world.fabric.step(4)
        world.clock.now_s += 0.03
    flight = decode_flight(records(tmp_path)[0].read_bytes())
    assert flight.failure.kind == "transfer"
    assert flight.src is not None
    route = compile_route(wire.decode(flight.src.layout), wire.decode(flight.dst.layout), flight.rank)
    with pytest.raises(BindError):
        list(bind(route, load.transfer))
    assert list(bind(route, flight.transfer))
    world.close()


def test_a_record_holds_no_word_and_no_cached_byte(world: World, tmp_path: Path) -> None:
    for content in world.src.memory.values():
        content[:] = 0xA7
    fail(world)
    message = records(tmp_path)[0].read_bytes()
    assert b"\xa7" * 8 not in message
    assert msgspec.msgpack.encode(WORD) not in message
    assert b"lease" not in encode_flight(msgspec.structs.replace(decode_flight(message), events=[]))


def test_the_card_of_a_pair_that_is_refused_is_kept_for_the_record(world: World) -> None:
    engine_metadata = msgspec.structs.replace(world.src.engine_metadata(), compatibility={"model": "large"})
    mine = msgspec.structs.replace(world.dst.engine_metadata(), compatibility={"model": "small"})
    listener = HandshakeServer(Address("127.0.0.1", 0), engine_metadata)
    remote = RemoteEngine("prefill", LIFE, listener.address)
    me = LocalRank(mine, world.dst.layout, 0, world.dst.transports[0], HostMemory(), None)
    with pytest.raises(LayoutMismatch, match="model is 'large' there and 'small' here"):
        meet_engine(me, remote, OPTIONS)
    listener.close()
    assert me.refused == {remote: engine_metadata}


def test_a_refused_pair_is_recorded_with_both_layouts(world: World, tmp_path: Path) -> None:
    world.meeting_error.append(LayoutMismatch("fields differ"))
    for endpoint in world.dst.endpoints.values():
        assert endpoint._me is not None
        endpoint._me.refused[REMOTE] = world.src.engine_metadata()
    fail(world)
    flight = decode_flight(records(tmp_path)[0].read_bytes())
    assert flight.src is not None
    assert (flight.failure.kind, flight.is_routed) == ("mismatch", False)


def test_a_source_whose_layout_is_none_is_recorded_as_it_came(world: World, tmp_path: Path) -> None:
    engine_metadata = msgspec.structs.replace(world.src.engine_metadata(), layout=b"no layout")
    world.meeting_error.append(WireError("not a layout"))
    for endpoint in world.dst.endpoints.values():
        assert endpoint._me is not None
        endpoint._me.refused[REMOTE] = engine_metadata
    fail(world)
    flight = decode_flight(records(tmp_path)[0].read_bytes())
    assert flight.src is not None
    assert (flight.src.engine, flight.src.layout) == (engine_metadata.engine, b"no layout")
    assert wire.decode(flight.dst.layout) == world.dst.layout
    with pytest.raises(WireError, match=r"not a layout \(msgpack, 9 bytes\)"):
        replay(flight)


def test_a_request_that_cannot_be_bound_is_recorded_with_the_reason(world: World, tmp_path: Path) -> None:
    world.acquire_and_publish()
    wanted = request(world.src.layout, world.dst.layout, 21, src_pages=[1, 2, 3, 4, 5, 99])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, LEASE, wanted, seal(wanted), gives_back=True))
    world.turn()
    meet(world)
    world.turn()
    flight = decode_flight(records(tmp_path)[0].read_bytes())
    assert (flight.failure.kind, flight.is_routed) == ("request", True)
    replayed = replay(flight)
    assert (replayed.outcome, replayed.refusal) == ("reproduced", flight.failure.text)


def test_an_aborted_request_is_no_crash(world: World, tmp_path: Path) -> None:
    order_load(world)
    world.turn()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    world.turn()
    assert collect(world.dst)[1]["d"].kind == "cancelled"
    assert records(tmp_path) == []


def test_a_quarantined_one_is(world: World, tmp_path: Path) -> None:
    world.acquire_and_publish(ttl_s=1e6)
    world.faults[-1] = Fault(drop=True)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    world.turn()
    world.clock.now_s += OPTIONS.settle_timeout_s
    world.turn()
    flight = decode_flight(records(tmp_path)[0].read_bytes())
    assert flight.failure.is_quarantined
    assert [event.name for event in flight.events][-2:] == ["cancelled", "quarantined"]


def test_only_the_newest_stay(world: World, clock: Clock, tmp_path: Path) -> None:
    for number in range(5):
        clock.now_s += MIN_INTERVAL_S
        fail(world, f"d{number}")
    assert [decode_flight(path.read_bytes()).request for path in records(tmp_path)] == ["d2", "d3", "d4"]
    assert [path for path in (tmp_path / "flights").iterdir() if path not in records(tmp_path)] == []


def test_a_storm_leaves_one_record_and_a_count(
    world: World, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        fail(world, f"d{number}")
    assert len(records(tmp_path)) == 1
    clock.now_s += MIN_INTERVAL_S
    fail(world, "later")
    assert len(records(tmp_path)) == 2
    assert "(4 failures since the last record left none)" in caplog.text


def test_a_directory_that_is_gone_is_a_line_in_the_log(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flights").rmdir()
    with caplog.at_level(logging.WARNING):
        fail(world)
    assert collect(world.dst)[1]["d"].kind == "transfer"
    assert "no flight record was written" in caplog.text


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvReshardError, match=r"flight_recorder_dir '.*' cannot be made"):
        Recorder(tmp_path / "file" / "flights", 3)


def test_a_request_id_cannot_lead_out_of_the_directory(world: World, tmp_path: Path) -> None:
    fail(world, "../../../" + "x" * 500)
    (path,) = records(tmp_path)
    assert path.parent == tmp_path / "flights"
    assert len(path.name) < 255


@pytest.fixture
def good(world: World, tmp_path: Path) -> bytes:
    fail(world)
    return records(tmp_path)[0].read_bytes()


def test_truncations_and_other_versions_are_refused(good: bytes) -> None:
    flight = decode_flight(good)
    for length in range(0, len(good), 7):
        with pytest.raises(WireError):
            decode_flight(good[:length])
    with pytest.raises(WireError, match="version 2; this side reads version 1: use the release"):
        decode_flight(encode_flight(msgspec.structs.replace(flight, version=2)))
    with pytest.raises(WireError, match=r"'other', not a 'kvreshard\.flight'"):
        decode_flight(encode_flight(msgspec.structs.replace(flight, form="other")))
    for seconds in (float("nan"), 2.0**63):  # no date
        with pytest.raises(WireError, match="written_at_s"):
            decode_flight(encode_flight(msgspec.structs.replace(flight, written_at_s=seconds)))


@given(noise=st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode_flight(noise)


def test_a_record_that_is_too_long_is_not_written(good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = decode_flight(good)
    assert encode_flight(flight) == good
    monkeypatch.setattr(form, "MAX_FLIGHT_BYTES", len(good) - 1)
    with pytest.raises(WireError, match=f"more than {len(good) - 1} are not written"):
        encode_flight(flight)


def test_page_ids_that_are_none_are_refused(good: bytes) -> None:
    document = msgspec.msgpack.decode(good)
    table = next(iter(document["transfer"]["src_tables"].values()))
    for pages in (table["pages"][:-1], [1, 2]):
        table["pages"] = pages
        with pytest.raises(WireError, match="bytes of page ids; each has 4"):
            decode_flight(msgspec.msgpack.encode(document))
    for page in (-1, 2**32):
        wanted = Request({"g": PageTable([1, page], 2)}, {}, {}, {})
        with pytest.raises(WireError, match="a record holds 0 to 4294967295"):
            encode_flight(msgspec.structs.replace(decode_flight(good), transfer=wanted))


@pytest.mark.parametrize("number", [-1, 2**63, 2**64 - 1])
def test_numbers_that_are_none_are_refused(good: bytes, number: int) -> None:
    for key in ("num_tokens", "first_page"):
        document = msgspec.msgpack.decode(good)
        next(iter(document["transfer"]["dst_tables"].values()))[key] = number
        with pytest.raises(WireError, match="not a flight record"):
            decode_flight(msgspec.msgpack.encode(document))
    document["transfer"]["intervals"] = {"g": [[0, number]]}
    with pytest.raises(WireError, match="not a flight record"):
        decode_flight(msgspec.msgpack.encode(document))


def test_nothing_is_written_on_the_sessions_thread_and_what_comes_meanwhile_is_counted(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Callable[[], None]] = []
    recorder = Recorder(tmp_path / "flights", 3, clock, lambda: NOW_S, lambda work: kept.append(work) is None)
    world = make_world(2, 1, recorder=recorder)
    for number in range(3):
        clock.now_s += MIN_INTERVAL_S
        fail(world, f"d{number}")
    assert (len(kept), records(tmp_path)) == (1, [])
    kept.pop()()
    assert len(records(tmp_path)) == 1
    clock.now_s += MIN_INTERVAL_S
    fail(world, "later")
    kept.pop()()
    assert "(2 failures since the last record left none)" in caplog.text


def test_a_recorder_writes_on_a_thread_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    writing = Recorder._write
    monkeypatch.setattr(
        Recorder, "_write", lambda *args: (threads.append(threading.current_thread().name), writing(*args))[1]
    )
    recorder = Recorder(tmp_path / "flights", 3)
    fail(make_world(2, 1, recorder=recorder))
    assert recorder._is_idle.wait(60.0)
    recorder.close()
    assert (threads, len(records(tmp_path))) == (["kvreshard-recorder"], 1)


def test_what_was_left_half_written_goes_in_time(world: World, clock: Clock, tmp_path: Path) -> None:
    clock.now_s += MIN_INTERVAL_S
    left = {age_s: tmp_path / "flights" / f".{age_s}{PART}" for age_s in (PART_AGE_S - 1.0, PART_AGE_S + 1.0)}
    for age_s, path in left.items():
        path.write_bytes(b"x")
        os.utime(path, (NOW_S + clock.now_s - age_s,) * 2)
    fail(world)
    assert [path.exists() for path in left.values()] == [True, False]


def failed_load(num_pages: int) -> Callable[[float], Flight]:
    """Makes the record of a request of so many pages on both sides, all of them new here."""
    world = make_world(2, 1)
    table = PageTable(np.arange(1, num_pages + 1), 16 * num_pages)
    wanted = Request({"g": table}, {"g": table}, {"g": [(0, table.num_tokens)]}, {"g": table.pages})
    src, dst = FlightSide.of(world.src.engine_metadata()), FlightSide.of(world.dst.engine_metadata())
    return lambda written_at_s: Flight(
        kvreshard="0.1", written_at_s=written_at_s, rank=0, request="d", source_request="r", source_address="h:1",
        failure=Failure("transfer", "x"), dst=dst, src=src, transfer=wanted, is_routed=True,
    )  # fmt: skip


def test_a_record_costs_the_same_whatever_is_copied(tmp_path: Path, clock: Clock) -> None:
    """8,192 pages of 16 tokens whose heads are split are millions of copies; what is recorded of them is 8,192 numbers a side."""
    sizes, costs = [], []
    for num_pages in (1, 8192):
        recorder = Recorder(tmp_path / str(num_pages) / "flights", 3, clock, lambda: NOW_S, at_once)
        failed = failed_load(num_pages)
        costs.append(count_bytecodes(lambda recorder=recorder, failed=failed: recorder.record("d", failed)))
        (path,) = records(tmp_path / str(num_pages))
        sizes.append(path.stat().st_size)
        tables = decode_flight(path.read_bytes()).transfer.src_tables
        assert np.array_equal(tables["g"].pages, failed(0.0).transfer.src_tables["g"].pages)
    assert sizes[1] - sizes[0] < 3 * 4 * 8192 + 100
    assert costs[1] < 1.2 * costs[0] + 50


@pytest.mark.parametrize("num_pages", [1_300_000, 1_500_000, 10_000_000])
def test_no_record_takes_much_memory(tmp_path: Path, clock: Clock, num_pages: int) -> None:
    """Up to the largest that is written, and those that are not."""
    failed = failed_load(num_pages)
    recorder = Recorder(tmp_path / "flights", 3, clock, lambda: NOW_S, at_once)
    tracemalloc.start()
    recorder.record("d", failed)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 50e6
    assert len(records(tmp_path)) == (3 * 4 * num_pages < form.MAX_FLIGHT_BYTES)


def test_events_are_a_ring() -> None:
    clock = Clock()
    events = Events(clock)
    for number in range(MAX_EVENTS + 5):
        clock.now_s += 1.0
        events.add(str(number), "x" * (MAX_EVENT_TEXT + 1))
    kept = events.list()
    assert (len(kept), events.num_forgotten, kept[0].name, kept[0].at_s) == (MAX_EVENTS, 5, "5", 6.0)
    assert len(kept[0].text) == MAX_EVENT_TEXT
