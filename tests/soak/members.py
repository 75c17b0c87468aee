"""Which process plays an engine at this moment, and for how long has it been stopped?"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.soak.shapes import Shape
from tests.soak.stalls import Interval
from tests.soak.worker import serve

from kvreshard.session.commands import EndpointOptions

PATIENCE_S = 60.0


@dataclass
class Member:
    """An engine by its name, over all its lives. `life` counts them; a request belongs to one."""

    shape: Shape
    options: EndpointOptions
    log: str
    port: int = 0
    life: int = 0
    is_born: bool = False
    has_room_s: float = 0.0
    last_change_s: float = 0.0
    process: BaseProcess | None = None
    pipe: Connection | None = None
    counted: list[Any] = field(default_factory=list)
    counts_asked: int = 0
    stops: list[Interval] = field(default_factory=list)
    _stopped_s: float | None = None

    def start(self, seed: int) -> None:
        """A new process, at the address of the former one; it is there when it has said `born`."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, self.shape.name, self.options, seed, self.port, self.log)
        self.process = spawn.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.life += 1
        self.counts_asked = len(self.counted)
        self.is_born = False
        self.last_change_s = time.monotonic()

    def say(self, *words: Any) -> None:
        """A word to the engine; lost if it is dead."""
        assert self.pipe is not None
        try:
            self.pipe.send(words)
        except (BrokenPipeError, ConnectionError):
            return

    @property
    def is_stopped(self) -> bool:
        return self._stopped_s is not None

    def stop(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        """SIGCONT."""
        if self._stopped_s is None or self.process is None or self.process.pid is None:
            return
        os.kill(self.process.pid, signal.SIGCONT)
        self.stops.append((self._stopped_s, time.monotonic()))
        self._stopped_s = None

    def kill(self) -> None:
        """SIGKILL, also of a stopped one."""
        assert self.process is not None
        self.process.kill()
        self.bury()

    def bury(self) -> None:
        """It is dead, or about to be."""
        assert self.process is not None
        assert self.pipe is not None
        self.process.join(PATIENCE_S)
        self.pipe.close()
        self.is_born = False
        self.last_change_s = time.monotonic()
        if self._stopped_s is not None:
            self.stops.append((self._stopped_s, time.monotonic()))
            self._stopped_s = None

    def stops_until(self, now_s: float) -> list[Interval]:
        """When it was stopped."""
        return [*self.stops, *([] if self._stopped_s is None else [(self._stopped_s, now_s)])]
