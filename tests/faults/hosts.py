"""How does a test get several hosts on one machine, whose network it can cut, heal and slow down?

    with Network(["prefill", "decode"]) as network:
        subprocess.Popen([*network.on("prefill"), "hostname"])
        network.cut("prefill")

Each host is a network namespace with one device `eth0` and an address of its own; all hang on a bridge in a namespace that is the
switch. Nothing of it is seen outside: the namespaces lie in a new user namespace unless this process may make network namespaces
itself, and are held by processes that end with this one. Cut: the switch's port is down. Needs Linux, iproute2 and util-linux;
`Unsupported` says what was refused.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SUBNET, BITS = "10.77.0", 24
NEW_USER = ("--user", "--map-root-user")
AS_THAT_USER = ("--user", "--preserve-credentials")
PATIENCE_S = 10.0


class Unsupported(Exception):
    """This machine does not let us do that; the text is what it said."""


class Network:
    """Hosts by name. Use it in a `with` statement; raises Unsupported there."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._enter: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._make_switch()
            for number, name in enumerate(self._names):
                self._add_host(name, number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The namespaces go with the processes that hold them."""
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()

    def on(self, host: str) -> list[str]:
        """What to put before a command, so that it runs on that host."""
        return ["nsenter", "--target", str(self._keepers[host].pid), *self._enter, "--net"]

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._names.index(host) + 1}"

    def cut(self, host: str) -> None:
        """Whatever is sent from or to the host is lost from now on."""
        self._ip(SWITCH, "link", "set", _port(self._names.index(host)), "down")

    def heal(self, host: str) -> None:
        self._ip(SWITCH, "link", "set", _port(self._names.index(host)), "up")

    def limit(self, host: str, *discipline: str) -> None:
        """A queue discipline on both ends of the host's cable, like `tbf rate 8mbit burst 64kb latency 1s`."""
        for place, device in ((host, "eth0"), (SWITCH, _port(self._names.index(host)))):
            _run([*self.on(place), "tc", "qdisc", "replace", "dev", device, "root", *discipline])

    def received_bytes(self, host: str) -> int:
        """What has arrived at the host's device."""
        told = _run([*self.on(host), "ip", "-json", "-statistics", "link", "show", "eth0"])
        return int(json.loads(told)[0]["stats64"]["rx"]["bytes"])

    def _make_switch(self) -> None:
        try:
            self._keep(SWITCH, ["unshare", "--net"])
        except Unsupported as plainly:
            try:
                self._keep(SWITCH, ["unshare", *NEW_USER, "--net"])
            except Unsupported as error:
                raise Unsupported(f"no network namespaces: {plainly}; nor with a user namespace: {error}") from None
            self._enter = AS_THAT_USER
        self._ip(SWITCH, "link", "add", "bridge0", "type", "bridge")
        self._ip(SWITCH, "link", "set", "bridge0", "up")

    def _add_host(self, name: str, number: int) -> None:
        keeper = self._keep(name, [*self.on(SWITCH), "unshare", "--net"])
        port = _port(number)
        self._ip(SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
        self._ip(SWITCH, "link", "set", port, "master", "bridge0", "up")
        self._ip(name, "address", "add", f"{self.address(name)}/{BITS}", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip(name, "link", "set", device, "up")

    def _keep(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """A process that does nothing in a namespace of its own, until its input closes."""
        try:
            keeper = subprocess.Popen([*command, "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise Unsupported(str(error)) from error
        deadline_s = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{keeper.pid}/comm").read_text().strip() != "cat":  # until then it is on its way there
            if keeper.poll() is not None or time.monotonic() > deadline_s:
                keeper.kill()
                _, words = keeper.communicate()
                raise Unsupported(words.decode(errors="replace").strip() or f"{command} did not start")
        self._keepers[name] = keeper
        return keeper

    def _ip(self, host: str, *arguments: str) -> None:
        _run([*self.on(host), "ip", *arguments])


SWITCH = "the switch"


def _port(number: int) -> str:
    return f"port{number}"


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except OSError as error:
        raise Unsupported(str(error)) from error
    if done.returncode:
        raise Unsupported(f"{' '.join(command[command.index('--net') + 1 :])}: {done.stderr.strip()}")
    return done.stdout
