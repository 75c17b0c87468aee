"""Does NIXL work here: is it installed, which plugins and devices does it have, and do bytes go from process to process?

NIXL and UCX are asked in processes of their own, with a bound on their time: a broken installation may crash or hang.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvreshard.cli.doctor_host import RDMA, find_version
from kvreshard.cli.doctor_line import Line
from kvreshard.cli.terminal import bytes_text, seconds_text
from kvreshard.plan.copies import CopyList
from kvreshard.testing.ranks import ProcessRanks, RankDiedError
from kvreshard.transport.base import Direction, TransportError

ASK_S = 30.0
LOOPBACK_BYTES = 8 << 20
NETWORKS = Path("/sys/class/net")
# UCX's transports within a host; at least one that is not among them must be allowed.
WITHIN_HOST = frozenset({"self", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem"})
LIST_PLUGINS = "import json; from kvreshard.transport.nixl_agent import list_plugins; print(json.dumps(list_plugins()))"


def check_nixl() -> Iterator[Line]:
    """Whether NIXL is there, and which plugins it finds."""
    version = find_version("nixl", "nixl-cu12", "nixl-cu13")
    if importlib.util.find_spec("nixl") is None:
        yield Line(
            "nixl",
            "error",
            "not installed: plans can be made here, and nothing moved",
            "pip install kvreshard[nixl], or without torch: pip install --no-deps -r requirements-nixl.txt",
        )
        return
    yield Line("nixl", "ok", f"version {version or 'unknown'}")
    code, output, errors = ask([sys.executable, "-c", LIST_PLUGINS])
    try:
        plugins = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        plugins = None
    if plugins is None:
        yield Line(
            "nixl plugins", "error", f"cannot be listed: {_last(errors)}", "reinstall nixl for this Python and CUDA"
        )
    elif "UCX" not in plugins:
        yield Line(
            "nixl plugins",
            "error",
            f"no UCX among {', '.join(plugins) or 'none'}",
            "unset NIXL_PLUGIN_DIR, or reinstall nixl",
        )
    else:
        yield Line("nixl plugins", "ok", ", ".join(plugins))


def check_ucx(networks: Path = NETWORKS, rdma: Path = RDMA) -> Iterator[Line]:
    """What UCX may use: devices that exist, and the environment that chooses among them."""
    interfaces = sorted(path.name for path in networks.glob("*"))
    devices = sorted(path.name for path in rdma.glob("*"))
    yield Line(
        "devices",
        "ok" if devices else "warning",
        f"interfaces {', '.join(interfaces) or 'none'}; RDMA {', '.join(devices) or 'none'}",
        "" if devices else "between hosts UCX will use TCP; on one host, shared memory",
    )
    transports = os.environ.get("UCX_TLS")
    allowed = set() if transports is None else {word.split(":")[0] for word in transports.strip("^").split(",")}
    if transports and not transports.startswith("^") and allowed <= WITHIN_HOST and "all" not in allowed:
        yield Line(
            "UCX_TLS", "error", f"'{transports}' has no network transport: UCX cannot start", "add tcp, or unset it"
        )
    else:
        yield Line("UCX_TLS", "ok", f"'{transports}'" if transports else "not set: UCX chooses")
    chosen = os.environ.get("UCX_NET_DEVICES")
    wanted = {word.split(":")[0] for word in chosen.split(",")} if chosen and chosen != "all" else set()
    missing = sorted(wanted - set(interfaces) - set(devices))
    if missing:
        yield Line(
            "UCX_NET_DEVICES", "error", f"'{chosen}', and there is no {', '.join(missing)}", f"choose from {', '.join([*interfaces, *devices])}"
        )  # fmt: skip
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
            heard = ranks.notifications(1, 1)
    except (TransportError, RankDiedError) as error:
        yield Line(
            "loopback",
            "error",
            str(error),
            "UCX_LOG_LEVEL=debug kvreshard verify tells more; check UCX_TLS, UCX_NET_DEVICES",
        )
        return
    if not arrived or not heard:
        what = "other bytes arrived than were there" if not arrived else "the notification did not arrive"
        yield Line("loopback", "error", what, "do not use this installation; kvreshard verify shows what is wrong")
        return
    took_s = report.seconds or 0.0
    rate = f", {bytes_text(int(LOOPBACK_BYTES / took_s))} per second" if took_s else ""
    yield Line(
        "loopback",
        "ok",
        f"{bytes_text(LOOPBACK_BYTES)} between two processes in {seconds_text(took_s)}{rate}; "
        f"{seconds_text(time.monotonic() - started_s)} with starting them",
    )


def ask(words: list[str]) -> tuple[int, str, str]:
    """Run a program for at most `ASK_S` seconds: exit code, output, errors. A program that cannot be run has code -1."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _ucx_info() -> Line:
    """What UCX's own tool lists. NIXL's wheel has UCX in it, and not this tool."""
    tool = shutil.which("ucx_info")
    if tool is None:
        return Line("ucx_info", "skipped", "not installed; NIXL brings its own UCX, so nothing is missing")
    code, output, errors = ask([tool, "-v", "-d"])
    if code != 0:
        return Line("ucx_info", "warning", f"failed: {_last(errors)}", "it belongs to another UCX than NIXL's, perhaps")
    version = next((line.strip("# ") for line in output.splitlines() if "version" in line.lower()), "unknown version")
    pairs: dict[str, str] = {}
    transport = ""
    for line in output.splitlines():
        key, _, value = line.strip("# ").partition(":")
        if key == "Transport":
            transport = value.strip()
        elif key == "Device" and transport:
            pairs.setdefault(transport, value.strip())
    return Line("ucx_info", "ok", f"{version}; {', '.join(pairs) or 'no transports'}")


def _last(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it ended without a word"
