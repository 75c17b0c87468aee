"""Does the doctor see what of this machine would stand in the way?"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest
from tests.ports import free_ports
from tests.unit.cli.doctor_lines import only, words

from kvreshard.cli import doctor_host


@pytest.mark.parametrize(
    ("limit", "devices", "status"),
    [(resource.RLIM_INFINITY, ["mlx5_0"], "ok"), (8 << 20, [], "ok"), (8 << 20, ["mlx5_0"], "warning")],
)
def test_locked_memory_matters_where_there_is_rdma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, devices: list[str], status: str
) -> None:
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda which: (limit, limit))
    line = only(doctor_host.check_memlock(tmp_path))
    assert line.status == status
    assert bool(line.remedy) == (status == "warning")


@pytest.mark.parametrize(
    ("limit", "hard", "status", "remedy"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
        (65536, 1 << 20, "ok", ""),
        (1024, 1 << 20, "warning", "ulimit -n 65536"),
        (1024, resource.RLIM_INFINITY, "warning", "ulimit -n 65536"),
        (64, 8192, "error", "ulimit -n 8192"),
        (
            64,
            64,
            "error",
            "the hard limit is 64, and an administrator must raise it: nofile in /etc/security/limits.conf",
        ),
    ],
)
def test_file_descriptors(monkeypatch: pytest.MonkeyPatch, limit: int, hard: int, status: str, remedy: str) -> None:
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda which: (limit, hard))
    line = only(doctor_host.check_files())
    assert (line.status, line.remedy.startswith(remedy), bool(line.remedy)) == (status, True, bool(remedy))


def test_shared_memory(tmp_path: Path) -> None:
    assert only(doctor_host.check_shm(tmp_path, 0)).status == "ok"
    assert only(doctor_host.check_shm(tmp_path, 1 << 62)).status == "warning"
    assert only(doctor_host.check_shm(tmp_path / "nowhere")).status == "warning"


def test_ptrace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "scope"
    assert only(doctor_host.check_ptrace(setting)).status == "ok"
    setting.write_text("1\n")
    for user, status in ((0, "ok"), (1000, "warning")):
        monkeypatch.setattr(doctor_host.os, "geteuid", lambda user=user: user)
        assert only(doctor_host.check_ptrace(setting)).status == status


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        line = only(doctor_host.check_port(taken.getsockname()[1]))
        assert (line.status, "cannot be bound" in line.text) == ("warning", True)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "no such host")
    line = only(doctor_host.check_port(5600))
    assert (line.status, "'no such host', which does not resolve" in line.text) == ("error", True)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "a..b")
    line = only(doctor_host.check_port(5600))
    assert (line.status, "does not resolve: the host name is not valid" in line.text) == ("error", True)
    for port in ("many", "0", "65536", "9" * 5000):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", port)
        line = only(doctor_host.check_port())
        assert (line.status, line.remedy) == ("error", "give a number from 1 to 65535")


def test_a_port_that_the_kernel_gives_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    port = free_ports(1)
    cases = (
        ("32768\t60999", "", "ok"),
        (f"{port}\t{port}", "", "warning"),
        (f"{port - 1} {port + 1}", f"1-{port - 1},{port + 1}", "warning"),
        (f"{port - 1} {port + 1}", f"5,{port}", "ok"),
        (f"{port - 1} {port + 1}", f"{port - 1}-{port + 1}", "ok"),
        (f"{port + 1} {port + 2}", "", "ok"),
        (f"{port - 2} {port - 1}", "", "ok"),
        ("something else", "", "ok"),
    )
    for given, reserved, status in cases:
        (tmp_path / "ip_local_port_range").write_text(given + "\n")
        (tmp_path / "ip_local_reserved_ports").write_text(reserved + "\n")
        line = only(doctor_host.check_port(port, tmp_path))
        assert (line.status, "outgoing" in line.text) == (status, status == "warning"), (given, reserved)
    assert only(doctor_host.check_port(port, tmp_path / "none")).status == "ok"


def test_clock_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor_host.check_clock()).status == "ok"
    monkeypatch.setattr(doctor_host.time, "time", lambda: 0.0)
    assert only(doctor_host.check_clock()).status == "warning"
    assert words(doctor_host.check_python())[0] == ("python", "ok")
    monkeypatch.setattr(doctor_host, "PYTHONS", ((3, 4), (3, 5)))
    assert words(doctor_host.check_python())[0] == ("python", "warning")
    monkeypatch.setattr(doctor_host.sys, "platform", "plan9")
    assert words(doctor_host.check_python())[0] == ("python", "error")
