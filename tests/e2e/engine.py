"""What is an engine to a test: what tells it from others, how it is asked, how it is stopped?

Engines are started by `tests.e2e.engines.Nursery`. Stopping one raises `Leftovers` when something of it outlives it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tests.e2e import engine_log, processes
from tests.releases import INSTALLED, full_name

START_SECONDS = 480.0  # 3 to 10 on an idle machine of two cores
ANSWER_SECONDS = 120.0
# The release of vLLM that engines run unless their spec names another.
RELEASE = full_name(os.environ.get("KVRESHARD_VLLM") or INSTALLED)
Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """All that tells one engine from another. `connector=None`: an ordinary engine. Hashable: it is the pool's key.

    `extra`: options of the connector. `arguments`: further fields of `AsyncEngineArgs`. `environment`: further
    variables. `vllm`: the release that it runs, of `tests.releases`. `record`: snapshots of the pages are written, into the engine's `snapshots` folder.
    `sleeps`: it can be put to sleep. `recompute`: what could not be loaded is computed here; otherwise the request fails, which is vLLM's default.
    """

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    block_size: int | None = None
    connector: str | None = None
    role: str = "kv_both"
    prefix_caching: bool = False
    record: bool = False
    sleeps: bool = False
    recompute: bool = False
    extra: Pairs = ()
    arguments: Pairs = ()
    environment: Pairs = ()
    vllm: str = RELEASE

    @property
    def num_processes(self) -> int:
        return self.dp * (1 + self.tp * self.pp) + 1

    @property
    def compiles(self) -> bool:
        """Pipeline stages run on the CPU build only when vLLM is not in eager mode."""
        return self.pp > 1

    def __str__(self) -> str:
        shape = "".join(f" {name}={n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if n > 1)
        page = f" page={self.block_size}" if self.block_size else ""
        release = f" vllm={self.vllm}" if self.vllm != RELEASE else ""
        return f"{self.model}{shape or ' tp=1'}{page}{release} {self.connector or 'ordinary'}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of random pixels; `is_embedded`: given as what the encoder would make of one, of that many tokens and that width."""

    seed: int
    is_embedded: bool = False
    num_tokens: int = 40
    width: int = 256


@dataclass(frozen=True, slots=True)
class Output:
    """What came back for one request. `error` is None when the engine answered, even with no token. `first_token_s`: when the
    engine's process had the first one, on the monotonic clock, which all processes of a machine share.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    first_token_s: float | None = None
    error: str | None = None


class EngineFailed(Exception):
    """An engine did not start, or ended by itself; the message ends with its own last words."""


class Leftovers(Exception):
    """Something of a stopped engine is still there."""


class Engine:
    """One running engine. Made by `Nursery.engine`."""

    def __init__(self, spec: EngineSpec, folder: Path, log: Path) -> None:
        self.spec, self.folder, self.log = spec, folder, log
        self.pid = 0
        self.about: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._shared: set[str] = set()
        self._connection: Connection | None = None
        self._numbers, self._requests = itertools.count(1), itertools.count()
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()

    @property
    def snapshots(self) -> Path:
        """Where the engine's workers write snapshots, when the spec asks for them."""
        return self.folder / "snapshots"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = None,
        request_ids: Sequence[str] | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> list[Output]:
        """All prompts at once, and what came back, in order. Never raises for a request: see `Output.error`."""
        transfers = list(kv_transfer_params or [None] * len(prompts))
        names = list(request_ids or [self.new_id() for _ in prompts])
        pending = [
            self.submit(prompt, max_tokens, transfer, name)
            for prompt, transfer, name in zip(prompts, transfers, names, strict=True)
        ]
        deadline = time.monotonic() + timeout
        return [self.wait(future, deadline - time.monotonic()) for future in pending]

    def new_id(self) -> str:
        return f"{self.folder.name}-r{next(self._requests)}"

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        transfer: dict[str, Any] | None,
        request_id: str,
        rank: int | None = None,
        picture: Picture | None = None,
    ) -> Future[Any]:
        """Start one request; `wait` turns the future into an `Output`."""
        return self._call("generate", request_id, list(prompt), max_tokens, transfer, rank, picture)

    def wait(self, future: Future[Any], seconds: float = ANSWER_SECONDS) -> Output:
        try:
            return Output(**future.result(timeout=max(0.0, seconds)))
        except FutureTimeout:
            return Output(error=f"no answer in time; the engine is {'up' if self.alive() else 'gone'}")
        except EngineFailed as error:
            return Output(error=str(error))

    def abort_after(self, seconds: float, request_id: str) -> None:
        """Abort a request a little later, on a thread. Nothing happens if the engine has gone by then."""

        def abort() -> None:
            with contextlib.suppress(EngineFailed):
                self._call("abort", request_id).result(timeout=ANSWER_SECONDS)

        threading.Timer(seconds, abort).start()

    def reset_prefix_cache(self) -> bool:
        return bool(self._call("reset_prefix_cache").result(timeout=ANSWER_SECONDS))

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """As before new weights."""
        self._call("pause", mode, clear_cache).result(timeout=ANSWER_SECONDS)

    def resume(self) -> None:
        self._call("resume").result(timeout=ANSWER_SECONDS)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Raises EngineFailed if it cannot."""
        self._call("sleep", level, mode).result(timeout=ANSWER_SECONDS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._call("wake_up", tags).result(timeout=ANSWER_SECONDS)

    def get(self, path: str) -> str:
        """A page as a server would have it: `/metrics`."""
        return str(self._call("get", path).result(timeout=ANSWER_SECONDS))

    def alive(self) -> bool:
        return bool(processes.members(self.pid))

    def healthy(self) -> bool:
        """Whether it would take requests; the process that hosts vLLM outlives vLLM's own engine process."""
        if not self.alive():
            return False
        try:
            self._call("check_health").result(timeout=10)
        except (EngineFailed, FutureTimeout):
            return False
        return True

    def memory_bytes(self) -> int:
        return processes.memory_bytes(processes.members(self.pid))

    def last_words(self, lines: int = 12) -> str:
        """What its log says went wrong, and the end of it if nothing did: what a failed assertion should show."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(engine_log.errors(self.log)[:6] or text[-lines:])

    def stop(self) -> None:
        """Shut down and look behind. Raises Leftovers."""
        self.look_at_shared_memory()
        was_alive = self.alive()
        if was_alive:
            with contextlib.suppress(EngineFailed, FutureTimeout, OSError):
                self._call("shut_down").result(timeout=10)
            processes.wait_until_gone(self.pid, 60.0)
        took = processes.end_group(self.pid) if was_alive else []
        if self._connection is not None:
            self._connection.close()
        left = self.remove_shared_memory()
        if took or left:
            raise Leftovers(f"{self.spec}: {'; '.join(took) or 'ended by itself'}; left in shared memory: {left}")

    def kill(self) -> None:
        """End it without a chance to do anything, and remove what it leaves."""
        self.look_at_shared_memory()
        self.signal(signal.SIGKILL)
        processes.wait_until_gone(self.pid, 10.0)
        self.remove_shared_memory()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def look_at_shared_memory(self) -> None:
        """Remember what the engine uses there, while its processes can be asked."""
        self._shared |= processes.shared_files(processes.members(self.pid))

    def remove_shared_memory(self) -> list[str]:
        """Remove what the stopped engine left there; see `processes.remove_shared`."""
        return processes.remove_shared(self._shared)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                assert self._connection is not None
                self._connection.send((number, method, arguments))
            except (OSError, AssertionError):
                future.set_exception(EngineFailed(f"{self.spec} is gone:\n{self.last_words()}"))
        return future

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                number, worked, result = connection.recv()
            except (EOFError, OSError):
                break
            future = self._waiting.pop(number, None)
            if future is not None:
                future.set_result(result) if worked else future.set_exception(EngineFailed(str(result)))
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineFailed(f"{self.spec} ended:\n{self.last_words()}"))

    def await_start(self, listener: Listener, started: float) -> None:
        """Take the connection that the engine opens, and wait for its first answer."""
        first = self._waiting[0]

        def accept() -> None:
            try:
                self._connection = listener.accept()
            except OSError:
                return
            self._read(self._connection)

        threading.Thread(target=accept, daemon=True).start()
        while not first.done():
            if time.monotonic() - started > START_SECONDS:
                raise EngineFailed(f"{self.spec} did not start in {START_SECONDS:.0f} s:\n{self.last_words()}")
            self.look_at_shared_memory()
            if not processes.members(self.pid):
                time.sleep(0.2)
                break
            time.sleep(0.1)
        try:
            self.about = first.result(timeout=1)
        except (EngineFailed, FutureTimeout) as error:
            raise EngineFailed(f"{self.spec} did not start: {error}\n{self.last_words()}") from None
        self.look_at_shared_memory()
        self.start_seconds = time.monotonic() - started
