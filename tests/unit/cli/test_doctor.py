"""Does every check of the doctor say ok, warning and error where it should, in bounded time and never with a traceback?"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.pairs.small import engine
from tests.unit.cli.conftest import Run
from tests.unit.cli.doctor_lines import only, words

from kvreshard.cli import doctor as command
from kvreshard.cli import doctor_host
from kvreshard.cli.doctor_host import Line, bounded
from kvreshard.cli.inputs import InputError
from kvreshard.model import EngineLayout, wire
from kvreshard.model.changed import replace
from kvreshard.session.engine_metadata import RankMetadata, make_engine_metadata
from kvreshard.session.handshake_messages import Address
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.keys import read_keys, write_keys
from kvreshard.session.seal import instance_id_of
from kvreshard.testing.ranks import RankDiedError
from kvreshard.transport.base import TransportError
from kvreshard.transport.regions import RegionTable, encode_metadata

Serve = Callable[..., str]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands do not start NIXL here; its checks have tests of their own."""
    monkeypatch.setattr(command, "check_nixl", lambda: [Line("nixl", "ok", "version 0")])


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a listener with an engine's metadata; returns HOST:PORT."""
    listeners: list[HandshakeServer] = []

    def start(layout: EngineLayout, *, board: int = 16, metadata: bytes | None = None, **compatibility: str) -> str:
        ranks = [
            RankMetadata(
                rank.rank,
                metadata or encode_metadata("nixl", f"{layout.engine}{rank.rank}", RegionTable()),
                4096, 64, 8192, board,
            )
            for rank in layout.ranks
        ]  # fmt: skip
        listeners.append(
            HandshakeServer(
                Address("127.0.0.1", 0), make_engine_metadata(layout, bytes(32), compatibility, ranks, 30.0)
            )
        )
        return f"127.0.0.1:{listeners[-1].address.port}"

    yield start
    for listener in listeners:
        listener.close()


def test_a_machine_alone_is_checked_line_by_line(run: Run) -> None:
    result = run("doctor", "--no-loopback")
    assert result.exit_code == 0, result.output
    checks = [line.split("  ")[0] for line in result.stdout.splitlines()]
    for name in ("python", "kvreshard", "locked memory", "shared memory", "file descriptors", "port", "clock", "nixl"):
        assert name in checks
    assert result.stdout.splitlines()[-1].startswith("right: no errors in ")


def test_the_document_has_the_same_lines(run: Run) -> None:
    found = json.loads(run("doctor", "--no-loopback", "--json").stdout)
    assert found["healthy"]
    assert {line["status"] for line in found["lines"]} <= {"ok", "warning", "skipped"}
    assert set(found["lines"][0]) == {"check", "status", "text", "remedy"}


def test_an_error_is_exit_code_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check_nixl", lambda: [Line("nixl", "error", "gone", "install it")])
    result = run("doctor", "--no-loopback")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("wrong: 1 error and ")
    assert not json.loads(run("doctor", "--no-loopback", "--json").stdout)["healthy"]


def test_a_check_that_hangs_or_breaks_is_a_line() -> None:
    never = threading.Event()

    def hang() -> list[Line]:
        never.wait()
        return []

    def fail() -> list[Line]:
        raise RuntimeError("surprise")

    assert only(bounded("x", hang, 0.01)).text == "not finished within 0.01 s"
    never.set()
    assert only(bounded("x", fail, 60.0)).text == "RuntimeError: surprise"


@pytest.mark.parametrize(
    ("found", "status", "told"),
    [
        ((0, 'noise\n["POSIX", "UCX"]\n', ""), "ok", "POSIX, UCX"),
        ((0, '["POSIX"]\n', ""), "error", "no UCX among POSIX"),
        ((-11, "", "a\nSegmentation fault\n"), "error", "Segmentation fault"),
        ((0, "nothing", ""), "error", "ended without output"),
        ((0, "", ""), "error", "ended without output"),
    ],
)
def test_plugins(monkeypatch: pytest.MonkeyPatch, found: object, status: str, told: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor_host, "ask", lambda asked: found)
    line = list(doctor_host.check_nixl())[1]
    assert (line.status, told in line.text) == (status, True)


def test_without_nixl_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = only(doctor_host.check_nixl())
    assert (line.status, "pip install nixl pyzmq" in line.remedy) == ("error", True)
    assert only(doctor_host.check_loopback()).status == "skipped"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("UCX_TLS", "sm,self", "error"),
        ("UCX_TLS", "cma,shm", "error"),
        ("UCX_TLS", "sm,tcp", "ok"),
        ("UCX_TLS", "^cma", "ok"),
        ("UCX_TLS", "all", "ok"),
        ("UCX_NET_DEVICES", "eth9", "error"),
        ("UCX_NET_DEVICES", "mlx5_0:1,eth0", "ok"),
        ("UCX_NET_DEVICES", "all", "ok"),
    ],
)
def test_ucx_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, status: str) -> None:
    for name in ("net/eth0", "net/lo", "rdma/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setenv(variable, value)
    lines = {line.check: line for line in doctor_host.check_ucx(tmp_path / "net", tmp_path / "rdma")}
    assert lines[variable].status == status
    assert lines["devices"].status == "ok"


UCX_INFO = "# Library version: 1.19.0\n#      Transport: tcp\n#         Device: eth0\n#      Transport: cma\n#         Device: memory\n"


@pytest.mark.parametrize(
    ("found", "status", "told"),
    [((0, UCX_INFO, ""), "ok", "Library version: 1.19.0; tcp, cma"), ((1, "", "no library"), "warning", "no library")],
)
def test_the_tool_of_ucx(monkeypatch: pytest.MonkeyPatch, found: object, status: str, told: str) -> None:
    monkeypatch.setattr(doctor_host.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor_host, "ask", lambda asked: found)
    line = list(doctor_host.check_ucx())[-1]
    assert (line.status, told in line.text) == (status, True)


def test_programs_that_fail_or_hang_have_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_host.ask(["/nowhere/program"])[0] == -1
    assert doctor_host.ask([sys.executable, "-c", "raise SystemExit(3)"])[0] == 3
    monkeypatch.setattr(doctor_host, "ASK_S", 0.01)
    assert doctor_host.ask([sys.executable, "-c", "import threading; threading.Event().wait()"])[0] == -1


@pytest.mark.parametrize(
    "error", [TransportError("UCX cannot start"), RankDiedError("rank 0 ended with exit code -11")]
)
def test_a_loopback_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def ranks(*sizes: int) -> object:
        raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor_host, "ProcessRanks", ranks)
    line = only(doctor_host.check_loopback())
    assert (line.status, line.text) == ("error", str(error))


@pytest.mark.nixl
def test_bytes_go_from_process_to_process() -> None:
    assert words(doctor_host.check_loopback()) == [("loopback", "ok")]
    assert words(doctor_host.check_nixl()) == [("nixl", "ok"), ("nixl plugins", "ok")]


def test_a_peer_that_fits_is_routed(run: Run, serve: Serve, tmp_path: Path) -> None:
    where = serve(engine("prefill", tp=2), model="small")
    path = tmp_path / "mine.json"
    path.write_bytes(wire.encode(engine("decode", page=6), "json"))
    result = run("doctor", "--no-loopback", "--peer", where, "--layout", path)
    assert result.exit_code == 0, result.output
    life = instance_id_of(bytes(32))[:12]
    assert f"engine 'prefill', instance id {life}: 2 ranks, 2 fields in 1 group," in result.stdout
    assert f"route prefill -> this side ({path})" in result.stdout
    assert "proved; 2 transfers" in result.stdout
    assert "not part of the handshake" in result.stdout


def test_a_file_of_this_side_that_lacks_a_rank_is_told(run: Run, serve: Serve, tmp_path: Path) -> None:
    where, whole, path = serve(engine("prefill")), engine("engine", tp=2), tmp_path / "mine.json"
    path.write_bytes(wire.encode(replace(whole, ranks=whole.ranks[:1]), "json"))
    found = json.loads(run("doctor", "--no-loopback", "--json", "--peer", where, "--layout", path).stdout)
    (told,) = [line for line in found["lines"] if line["check"] == "this side"]
    assert told["status"] == "warning"
    assert told["text"].startswith(f"engine 'this side ({path})': no rank holds head [1, 2) of 2 fields")


def test_a_peer_that_does_not_fit_says_what_differs(run: Run, serve: Serve) -> None:
    where = serve(engine("prefill", tp=2))
    for side in ("--decode", "--prefill"):
        result = run("doctor", "--no-loopback", "--peer", where, "--model", "llama-3.1-8b", side, "tp=1")
        assert result.exit_code == 1
        assert "32 fields 'k' in 'decode' and" in result.stdout or "32 fields 'k' in 'prefill' and" in result.stdout
        assert "is it the same model" in result.stdout


def test_this_side_is_warned_of_as_by_plan(run: Run, serve: Serve) -> None:
    where = serve(engine("prefill", tp=2))
    mine = ("--model", "llama-3.1-8b", "--draft", "llama-3.1-8b", "--decode", "tp=3")
    found = json.loads(run("doctor", "--no-loopback", "--json", "--peer", where, *mine).stdout)
    told = [(line["status"], line["text"]) for line in found["lines"] if line["check"] == "this side"]
    assert [text.removeprefix("vLLM 0.32 would not run engine 'decode': tp=3 ") for _, text in told] == [
        "does not divide the 32 query heads; use a divisor",
        "and the 8 KV heads of 'full' layers do not divide one another; use a divisor or a multiple of 8",
        "and the 8 KV heads of 'draft full' layers do not divide one another; use a divisor or a multiple of 8",
    ]
    assert {status for status, _ in told} == {"warning"}


def test_a_peer_that_wants_keys_is_asked_with_one(run: Run, tmp_path: Path) -> None:
    secret = write_keys(tmp_path, "room")[1]
    layout = engine("prefill")
    engine_metadata = make_engine_metadata(
        layout, bytes(32), {}, [RankMetadata(0, encode_metadata("nixl", "p0", RegionTable()), 4096, 64, 8192, 16)], 30.0
    )
    listener = HandshakeServer(Address("127.0.0.1", 0), engine_metadata, keys=read_keys(secret))
    try:
        where = f"127.0.0.1:{listener.address.port}"
        assert run("doctor", "--no-loopback", "--peer", where, "--key", secret).exit_code == 0
        stranger = run("doctor", "--no-loopback", "--peer", where)
        assert (stranger.exit_code, "wants a key and this one has none" in stranger.stdout) == (1, True)
    finally:
        listener.close()


def test_two_peers_are_compared_with_one_another(run: Run, serve: Serve) -> None:
    first = serve(engine("prefill", tp=2), model="small", dtype="bfloat16")
    good, other = serve(engine("decode"), model="small"), serve(engine("decode"), model="large")
    found = json.loads(run("doctor", "--no-loopback", "--json", "--peer", first, "--peer", good).stdout)
    lines = {line["check"]: line for line in found["lines"]}
    assert (lines["facts"]["status"], lines["facts"]["text"]) == ("ok", "equal on both: model")
    assert lines["route prefill -> decode"]["status"] == "ok"
    result = run("doctor", "--no-loopback", "--peer", first, "--peer", other)
    assert (result.exit_code, "model is 'small' there and 'large' here" in result.stdout) == (1, True)


def test_what_a_peer_lacks_is_told(run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_version", lambda *names: "0.32.0")
    early = run("doctor", "--no-loopback", "--peer", serve(engine("prefill"), board=0, vllm_version="0.31.0+cpu"))
    assert early.exit_code == 0
    assert "1 rank cannot answer digest requests" in early.stdout
    assert "vLLM 0.31.0+cpu there, 0.32.0 here" in early.stdout
    assert "this side has no layout" in early.stdout
    assert run("doctor", "--no-loopback", "--peer", serve(engine("prefill"), metadata=b"noise")).exit_code == 1


def test_nobody_there_somebody_else_there_and_nothing_to_ask_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "METADATA_TIMEOUT_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        result = run("doctor", "--no-loopback", "--peer", where, "--peer", where)
        assert (result.exit_code, "cannot be reached" in result.stdout) == (1, True)
        assert "not both peers could be read" in result.stdout
        assert (
            "cannot be reached: the host name is not valid"
            in run("doctor", "--no-loopback", "--peer", "a..b:5600").stdout
        )
        silent.listen()
        result = run("doctor", "--no-loopback", "--peer", where, "--model", "llama-3.1-8b", "--decode", "tp=1")
        assert (result.exit_code, "does not speak ZeroMQ: it is no kvreshard engine" in result.stdout) == (1, True)
        assert f"`ss -ltnp 'sport = :{silent.getsockname()[1]}'` names who listens" in result.stdout
        assert "versions of kvreshard" not in result.stdout
        assert "the peer's layout is not known" in result.stdout
    monkeypatch.setattr(command, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    assert "pyzmq is not installed" in only(command.check_peer(command.parse_peer("127.0.0.1:1"))).text


@pytest.mark.parametrize(
    "options",
    [
        ("--peer", "nowhere"),
        ("--peer", "a:99999"),
        ("--peer", "a:1", "--peer", "b:1", "--peer", "c:1"),
        ("--layout", "x.json"),
        ("--peer", "a:1", "--decode", "tp=1"),
        ("--peer", "a:1", "--model", "llama-3.1-8b"),
        ("--peer", "a:1", "--model", "llama-3.1-8b", "--decode", "tp=1", "--prefill", "tp=1"),
        ("--peer", "a:1", "--layout", "x.json", "--draft", "llama-3.1-8b"),
        ("--peer", "a:1", "--model", "deepseek-v3", "--decode", "tp=1,pcp=2"),
        ("--port", "0"),
        ("--peer", "a:1", "--trusted", "."),
        ("--peer", "a:1", "--key", "nowhere.key_secret"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(run: Run, options: tuple[str, ...]) -> None:
    result = run("doctor", "--no-loopback", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")


def test_an_address_as_messages_show_it_is_taken_and_another_url_refused() -> None:
    peer = command.parse_peer("tcp://localhost:5600")
    assert (peer.host, peer.port) == ("localhost", 5600)
    for other in ("http://localhost:5600", f"localhost:{'9' * 5000}"):
        with pytest.raises(InputError, match="give HOST:PORT"):
            command.parse_peer(other)


def test_one_engine_given_twice_is_told(run: Run, serve: Serve) -> None:
    where = serve(engine("prefill"))
    assert "both peers are the same engine" in run("doctor", "--no-loopback", "--peer", where, "--peer", where).output
