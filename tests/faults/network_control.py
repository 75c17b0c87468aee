"""What does a test say to an engine on a host of its own, and what does it hear?

`Setup` makes the engine, `Wanted` is a request, `Told` what its endpoints have reported; `RemoteEngineProcess` starts one on a host of a
`Network` and asks it (`network_engine`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.faults.hosts import Network
from tests.pairs.small import engine, request

from kvreshard.kinds import Attention
from kvreshard.model import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.session.commands import Results

ROOT = Path(__file__).resolve().parents[2]
KIND = Attention(4, 32, "bfloat16")
LAYERS = (0, 0)  # one stage
ANSWER_S = 60.0
PROCESS = "tests.faults.network_engine"
# No other transport may carry a byte: within one machine UCX would take shared memory.
OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}


@dataclass(frozen=True)
class Setup:
    """An engine: `tp` ranks, pages of `page` tokens. `key_file`: its key, None for none."""

    name: str
    tp: int
    page: int
    num_pages: int
    host: str
    key_file: Path | None
    options: dict[str, Any]

    def layout(self) -> EngineLayout:
        return engine(self.name, tp=self.tp, page=self.page, num_pages=self.num_pages, kind=KIND, stages=LAYERS)


@dataclass(frozen=True)
class Wanted:
    """One request: its first `num_tokens`, from and to consecutive pages. `seed`: of its values."""

    name: str
    num_tokens: int
    slot: int
    first_src_page: int
    first_dst_page: int
    seed: int

    @property
    def word(self) -> int:
        return 0xABC0 + self.slot

    def request(self, src: Setup, dst: Setup) -> Request:
        pages = [
            list(range(first, first + -(-self.num_tokens // setup.page)))
            for setup, first in ((src, self.first_src_page), (dst, self.first_dst_page))
        ]
        return request(
            src.layout(), dst.layout(), self.num_tokens, src_pages=pages[0], dst_pages=pages[1], new_pages=pages[1]
        )


@dataclass
class Told:
    """What the engine's endpoints have said so far, by request, one entry per rank."""

    received: dict[str, int] = field(default_factory=dict)
    failed: dict[str, list[tuple[str, str, bool]]] = field(default_factory=dict)
    freed: dict[str, list[str]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    num_quarantined: int = 0

    def note(self, results: Results) -> None:
        for name in results.received:
            self.received[name] = self.received.get(name, 0) + 1
        for name, failure in results.failed.items():
            self.failed.setdefault(name, []).append((failure.kind, failure.text, failure.is_quarantined))
        for name, cause in results.freed.items():
            self.freed.setdefault(name, []).append(cause)
        for name in results.settled:
            self.settled[name] = self.settled.get(name, 0) + 1


class RemoteEngineProcess:
    """The controller's side. Use it in a `with` statement."""

    def __init__(self, network: Network, host: str, setup: Setup) -> None:
        self.setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="kvn-")
        path = str(Path(self._folder.name) / "s")
        self._log = (Path(self._folder.name) / "log").open("w+b")
        environment = {**os.environ, **OVER_TCP, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with Listener(path, "AF_UNIX") as listener:
            self.process = subprocess.Popen(
                [*network.on(host), sys.executable, "-m", PROCESS, path],
                cwd=ROOT, env=environment, stdout=self._log, stderr=self._log,
            )  # fmt: skip
            listener._listener._socket.settimeout(ANSWER_S)
            self._connection: Connection = listener.accept()
        self._connection.send(setup)
        self._answer("start")
        self.port = self.ask("port")

    def __enter__(self) -> RemoteEngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._folder.cleanup()

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `EngineProcess`. Raises AssertionError with the engine's last words."""
        self._connection.send((method, arguments))
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        try:
            assert self._connection.poll(ANSWER_S), f"no answer to {what}"
            worked, result = self._connection.recv()
        except EOFError:
            worked, result = False, f"it ended with {self.process.wait(10.0)}"
        if not worked:
            self._log.seek(0)
            words = self._log.read()[-3000:].decode(errors="replace")
            raise AssertionError(f"{self.setup.name}, {what}: {result}\n{words}")
        return result
