"""Does a replay tell a fault of the plan from one of the road, and is every file that is no record refused with one line?"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.faulty_memory import Fault, FaultyFabric, FaultyTransport
from tests.pairs.small import engine, request
from tests.unit.cli.conftest import Run

from kvreshard import __version__
from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import KvReshardError, wire
from kvreshard.plan import bind, compile_route
from kvreshard.session.commands import Failure
from kvreshard.testing.scenario import make_requests
from kvreshard.tools import replay as replaying
from kvreshard.tools.flight import (
    Flight,
    FlightEvent,
    FlightSide,
    encode_flight,
)

SRC, DST = engine("prefill", tp=2, page=4), engine("decode", page=6)
WANTED = request(SRC, DST, 13, new_pages=[2, 3, 4])
ENGINES = {"model": "small"}


def side(layout: object, **compatibility: str) -> FlightSide:
    return FlightSide(layout.engine, "life", {**ENGINES, **compatibility}, wire.encode(layout))


def flight(kind: str = "transfer", text: str = "it broke", **changes: object) -> Flight:
    made = Flight(
        kvreshard="0.1",
        written_at_s=1_700_000_000.0,
        rank=0,
        request="cmpl-1",
        source_request="cmpl-0",
        source_address="tcp://10.0.0.1:5600",
        failure=Failure(kind, text),
        dst=side(DST),
        src=side(SRC),
        transfer=WANTED,
        is_routed=True,
        staging_bytes=1 << 16,
        events=[FlightEvent(0.0, "ordered", "request cmpl-1"), FlightEvent(0.25, "failed", "transfer: it broke")],
        num_events_forgotten=3,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Flight], Path]:
    def write(record: Flight) -> Path:
        path = tmp_path / "a.kvflight"
        path.write_bytes(encode_flight(record))
        return path

    return write


Save = Callable[[Flight], Path]


@pytest.mark.parametrize("kind", ["transfer", "stale lease", "digest", "timeout", "fault"])
@pytest.mark.parametrize("staging_bytes", [0, 1 << 16])
def test_a_good_plan_says_that_it_was_not_the_plan(run: Run, save: Save, kind: str, staging_bytes: int) -> None:
    result = run("replay", save(flight(kind, staging_bytes=staging_bytes)))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("not in the plan: every byte arrives: look at the transport")
    assert f"failed: ({kind}) it broke" in lines
    assert "3 earlier events were forgotten" in lines
    assert any(line.split()[:2] == ["0.250000", "failed"] for line in lines)


def test_a_record_of_another_version_says_so(run: Run, save: Save) -> None:
    assert "kvreshard 0.1 wrote the record and may have planned other copies" in run("replay", save(flight())).stdout
    assert "wrote the record and may" not in run("replay", save(flight(kvreshard=__version__))).stdout


def test_the_document_says_the_same(run: Run, save: Save) -> None:
    found = json.loads(run("replay", save(flight()), "--json").stdout)
    assert (found["outcome"], found["failure"]["kind"], found["num_bytes_compared"]) == (
        "not in the plan", "transfer", 13 * 2 * 2 * 2 * 2,
    )  # fmt: skip


def test_a_refused_request_is_refused_again(run: Run, save: Save) -> None:
    wanted = request(SRC, DST, 13, src_pages=[1, 2, 3, 99])
    with pytest.raises(KvReshardError) as told:
        list(bind(compile_route(SRC, DST, 0), wanted))
    record = flight("request", str(told.value), transfer=wanted)
    result = run("replay", save(record))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "reproduced: the same refusal")


def test_facts_and_layouts_that_differ_are_refused_again(run: Run, save: Save) -> None:
    compatibility = flight("mismatch", "x", src=side(SRC, model="large"), is_routed=False)
    other = flight("mismatch", "x", src=side(engine("prefill", tp=2, page=4, stages=(0, 0, 0))), is_routed=False)
    for record, told in ((compatibility, "model is 'large' there and 'small' here"), (other, "layers.2")):
        result = run("replay", save(record))
        assert result.exit_code == 0
        assert "reproduced: a refusal of the same kind in other words" in result.stdout
        assert told in result.stdout
    allowed = msgspec.structs.replace(flight("timeout"), src=side(SRC, model="large"), allow_mismatch=["model"])
    assert "not in the plan" in run("replay", save(allowed)).stdout


@pytest.mark.parametrize("kind", ["transfer", "timeout", "handshake"])
def test_a_source_that_could_not_be_connected_was_not_refused(run: Run, save: Save, kind: str) -> None:
    """Its layout is known, and there was no route: the plan has nothing to do with it."""
    result = run("replay", save(flight(kind, "NIXL cannot load the metadata", is_routed=False)))
    assert result.exit_code == 0
    assert "not in the plan: every byte arrives" in result.stdout


def test_a_source_that_was_never_met_leaves_nothing_to_replay(run: Run, save: Save) -> None:
    result = run("replay", save(flight("handshake", src=None, is_routed=False)))
    assert result.exit_code == 0
    assert "never met: the source was never met" in result.stdout


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "mismatch", "text": "no field", "is_routed": False}, "it was refused then and is not now: no field"),
        ({"kind": "request", "text": "no page"}, "it was refused then and is not now: no page"),
        (
            {"transfer": request(SRC, DST, 13, src_pages=[99] * 4)},
            "this is refused now, and failed as 'transfer'",
        ),
    ],
)
def test_what_differs_is_told_with_exit_code_one(run: Run, save: Save, changes: dict[str, object], told: str) -> None:
    result = run("replay", save(flight(**changes)))
    assert result.exit_code == 1
    assert f"different: {told}" in result.stdout


def test_a_plan_that_moves_wrong_bytes_is_found(run: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = partial(FaultyTransport, faults=lambda index, transfer: Fault(corrupt_byte=0))
    monkeypatch.setattr(replaying, "MemoryTransport", broken)
    monkeypatch.setattr(replaying, "Fabric", FaultyFabric)
    result = run("replay", save(flight()))
    assert result.exit_code == 1
    assert "different: wrong bytes here too: " in result.stdout


def test_new_pages_that_are_not_zeroed_are_found(run: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying.HostMemory, "zero", lambda self, start, stop: None)
    result = run("replay", save(flight()))
    assert (result.exit_code, "that no copy writes are not zero" in result.stdout) == (1, True)


@pytest.mark.parametrize("model", ["gemma-4-26b-a4b", "nemotron-3-nano-30b-a3b"])
def test_pools_of_any_size_take_memory_for_the_request_only(run: Run, save: Save, model: str) -> None:
    """Windows, states and a pool of a hundred gigabytes: addresses are promised, memory is not."""
    found = load(model)
    src, dst = (
        describe(found, parse_engine(words), name, 100_000)
        for name, words in (("prefill", "tp=2"), ("decode", "tp=1,order=HND"))
    )
    assert sum(region.size_bytes for region in dst.ranks[0].regions) > 50 << 30
    (wanted,) = make_requests(src, dst, 1, 64, 0)
    record = flight(src=side(src), dst=side(dst), transfer=wanted)
    result = run("replay", save(record))
    assert result.exit_code == 0, result.output
    assert "not in the plan" in result.stdout


def test_more_memory_than_there_is_is_refused(run: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreshard.cli.replay.available_bytes", lambda: 1)
    result = run("replay", save(flight()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("and 1 are available; replay it on a larger machine\n")


def test_a_file_that_is_no_record_is_one_line(run: Run, save: Save, tmp_path: Path) -> None:
    path = save(flight())
    good = path.read_bytes()
    files = {"empty": b"", "noise": b"\x93\x01\x02\x03", "cut": good[:-1], "more": good + b"\0", "json": b'{"a": 1}'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        result = run("replay", tmp_path / name)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), name
        assert f"flight record '{tmp_path / name}': " in result.stderr
    assert run("replay", tmp_path / "nowhere").exit_code == 2
    bad_layout = msgspec.structs.replace(flight(), src=FlightSide("p", "l", {}, b"\0"))
    result = run("replay", save(bad_layout))
    assert (result.exit_code, "not a layout" in result.stderr) == (2, True)


def test_the_copies_of_a_record_are_those_that_were_made(run: Run, tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "golden" / "flight" / "record-v1.msgpack.hex"
    (tmp_path / "v1").write_bytes(bytes.fromhex(golden.read_text(encoding="ascii")))
    found = json.loads(run("replay", tmp_path / "v1", "--json").stdout)
    assert (found["outcome"], found["copies"]["num_copies"], found["kvreshard"]) == ("not in the plan", 26, "0.1.0")
    assert found["copies"]["digest"] == "0583ce614f6d95d2b3e542c70048bce8"


def test_no_single_flipped_byte_ends_in_a_traceback(run: Run, save: Save) -> None:
    path = save(flight())
    good = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(good), 60).tolist():
        bad = bytearray(good)
        bad[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(bad))
        assert run("replay", path).exit_code in (0, 1, 2)


def test_a_json_file_is_told_from_a_record(run, tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text('{"form": "kvreshard.layout"}')
    result = run("replay", tmp_path / "layout.json")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "holds JSON; give what an engine with flight_recorder_dir has left" in result.stderr
