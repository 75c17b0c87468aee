"""How does a test get a running vLLM engine?

    with Nursery() as nursery:
        engine = nursery.engine(EngineSpec("llama", tp=2, connector="NixlConnector", role="kv_consumer"))
        outputs = engine.generate([[1, 2, 3]], max_tokens=8)

Engines are kept in a pool keyed by their `EngineSpec`: asking twice for one starts one, and one that died is started anew.
When the pool would hold more than `MAX_PROCESSES` processes, the engines that were not asked for longest are stopped.
What stopped engines leave behind is removed, and kept in `Nursery.complaints`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import releases
from tests.e2e import models, processes
from tests.e2e.arguments import arguments_of, environment_of
from tests.e2e.engine import Engine, EngineFailed, EngineSpec, Leftovers, Output
from tests.ports import free_ports

__all__ = ["Engine", "EngineFailed", "EngineSpec", "Leftovers", "Nursery", "Output"]

ROOT = Path(__file__).resolve().parents[2]
# At 0.2 to 0.35 GB each, and 23 GB shared with whatever else runs.
MAX_PROCESSES = 28
PORTS_EACH = 20


class Nursery:
    """The processes that imported vLLM, and the engines forked from them: of each release one for eager engines, one for compiled ones."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kve-"))
        self.logs = models.home() / "logs" / time.strftime(f"%m%d-%H%M%S-{os.getpid()}")
        self.logs.mkdir(parents=True, exist_ok=True)
        self.engines: dict[EngineSpec, Engine] = {}
        self.complaints: list[tuple[EngineSpec, str]] = []
        self._hosts: dict[tuple[str, bool], tuple[subprocess.Popen[bytes], Connection]] = {}
        self._count = itertools.count()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def engine(self, spec: EngineSpec) -> Engine:
        """The engine of that spec, started if need be. Raises EngineFailed."""
        engine = self.engines.pop(spec, None)
        if engine is not None:
            if engine.healthy():
                self.engines[spec] = engine  # the last asked for is the last to be stopped
                return engine
            self._stop([engine])
        while self.engines and self._num_processes() + spec.num_processes > MAX_PROCESSES:
            self.stop(next(iter(self.engines)))
        self.engines[spec] = engine = self._start(spec)
        return engine

    def stop(self, spec: EngineSpec) -> None:
        """Stop that engine if it runs."""
        engine = self.engines.pop(spec, None)
        self._stop([] if engine is None else [engine])

    def kill(self, spec: EngineSpec) -> None:
        """SIGKILL to that engine."""
        self.engines.pop(spec).kill()

    def stop_all(self) -> None:
        """Stop every engine, at the same time."""
        engines, self.engines = list(self.engines.values()), {}
        self._stop(engines)

    def close(self) -> None:
        """Stop everything."""
        self.stop_all()
        for process, connection in self._hosts.values():
            connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
        self._hosts.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stop(self, engines: Sequence[Engine]) -> None:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            for engine, left in zip(engines, pool.map(_stopped, engines), strict=True):
                if left is not None:
                    self.complaints.append((engine.spec, str(left)))

    def _num_processes(self) -> int:
        return sum(spec.num_processes for spec in self.engines)

    def _start(self, spec: EngineSpec) -> Engine:
        host = spec.vllm, spec.compiles
        self.ask(host, "make_model", spec.model)
        number = next(self._count)
        folder = self.folder / f"e{number}"
        folder.mkdir()
        engine = Engine(spec, folder, self.logs / f"e{number}-{spec}.log".replace(" ", "-"))
        socket = str(folder / "control")
        started = time.monotonic()
        with Listener(socket, "AF_UNIX") as listener:
            environment = environment_of(spec, folder, free_ports(PORTS_EACH))
            engine.pid = self.ask(host, "start", socket, str(engine.log), environment, arguments_of(spec, folder))
            try:
                engine.await_start(listener, started)
            except EngineFailed:
                engine.look_at_shared_memory()
                processes.end_group(engine.pid)
                engine.remove_shared_memory()
                raise
        return engine

    def ask(self, host: tuple[str, bool], method: str, *arguments: Any) -> Any:
        """A request to the process of (release, compiles), which is started by the first one."""
        if host not in self._hosts:
            self._hosts[host] = self._open(*host)
        connection = self._hosts[host][1]
        connection.send((method, arguments))
        worked, result = connection.recv()
        if not worked:
            raise EngineFailed(str(result))
        return result

    def _open(self, release: str, compiles: bool) -> tuple[subprocess.Popen[bytes], Connection]:
        socket = str(self.folder / f"n{release}-{int(compiles)}")
        variables: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": releases.python_path(release, ROOT / "src", ROOT),
            **({} if compiles else {"TORCHDYNAMO_DISABLE": "1"}),
        }
        with (
            Listener(socket, "AF_UNIX") as listener,
            (self.logs / f"nursery-{release}-{int(compiles)}.log").open("ab") as log,
        ):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.nursery", socket], env=variables, cwd=ROOT, stdout=log, stderr=log
            )
            return process, listener.accept()


def _stopped(engine: Engine) -> Leftovers | None:
    try:
        engine.stop()
    except Leftovers as left:
        return left
    return None
