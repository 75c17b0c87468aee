"""Detects calls that do not come back.

A hung device or driver keeps the one thread that may talk to the transport's library, or the one that carries out loads, and nothing would ever
end.

1. The thread says what it begins, such as a call into the library (`watched`), and when it is back.
2. Anybody may ask (`stuck`). A call that was seen under way for `bound_s` together is stuck: the log says so once, and again when it is back.
3. What passes between two looks counts for `MAX_GAP_S` at most: a process that was stopped for a minute has not waited for a minute.

A call that keeps Python's own lock stops the whole process, and nobody is left to look.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

from kvreshard.model.logs import fields, get_logger
from kvreshard.transport.base import Direction, MemoryRegion, StuckCall
from kvreshard.transport.slices import Slice

logger = get_logger(__name__)

MAX_GAP_S = 1.0
# Memory is pinned page by page, which takes minutes for a terabyte.
SLOW_CALLS = ("register", "deregister", "close")
SLOW_FACTOR = 60.0


def session_is_stuck(_: str, bound_s: float) -> str:
    """For the thread that carries out a rank's loads."""
    return (
        f"this rank's session has not come back from a turn within {bound_s:g} s: nothing is loaded here until it does; look for a hung device or "
        "driver, and restart this engine"
    )


def _nixl_is_stuck(call: str, bound_s: float) -> str:
    return (
        f"NIXL has not come back from '{call}' within {bound_s:g} s: nothing is loaded or read here until it does; look for a hung device or "
        "driver, and restart this engine"
    )


class Watchdog:
    """Of one thread. `bound_s`: seconds of `clock`. `describe`: what it means, in a sentence, that a call of that name is stuck for so long.

    `begin` and `end` are that thread's, the rest anybody's.
    """

    def __init__(
        self,
        name: str,
        bound_s: float,
        clock: Callable[[], float],
        describe: Callable[[str, float], str] = _nixl_is_stuck,
    ) -> None:
        self._name, self._bound_s, self._clock, self._describe = name, bound_s, clock, describe
        self._numbers = itertools.count()
        self._call: tuple[str, int] | None = None
        self._last_call: tuple[str, int] | None = None
        self._waited_s = self._looked_s = 0.0
        self._reported: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def begin(self, call: str) -> None:
        """A call is made."""
        self._call = call, next(self._numbers)

    def end(self) -> None:
        """It is back."""
        self._call = None

    def stuck(self) -> StuckCall | None:
        """The call that does not come back, if there is one."""
        call, now_s = self._call, self._clock()
        if call is None and self._reported is None:
            return None
        with self._lock:
            self._waited_s += min(now_s - self._looked_s, MAX_GAP_S)
            if call != self._last_call:
                self._last_call, self._waited_s = call, 0.0
            self._looked_s = now_s
            if self._reported is not None and call != self._reported:
                logger.warning(
                    "%s: '%s' has come back after all",
                    *(self._name, self._reported[0]),
                    extra=fields("nixl_call_returned", call=self._reported[0]),
                )
                self._reported = None
            bound_s = self._bound_s * (SLOW_FACTOR if call is not None and call[0] in SLOW_CALLS else 1.0)
            if call is None or self._waited_s < bound_s:
                return None
            found = StuckCall(call[0], self._describe(call[0], bound_s))
            if self._reported is None:
                self._reported = call
                logger.error("%s: %s", self._name, found.text, extra=fields("nixl_call_stuck", call=call[0]))
            return found


class Agent(Protocol):
    """What the owner needs of NIXL, as a protocol, so that it runs in tests without NIXL. Every call is made on the owner's thread; every failure is
    a `TransportError`.
    """

    def register(self, regions: Sequence[MemoryRegion]) -> None: ...
    def deregister(self, regions: Sequence[MemoryRegion]) -> None: ...
    def metadata(self) -> bytes: ...
    def add_peer(self, name: str, native: bytes) -> None: ...
    def remove_peer(self, name: str) -> None: ...
    def start(self, peer: str, direction: Direction, slice_: Slice) -> object | None:
        """Post a slice. None: it has settled already. Raises when it could not be posted as a whole."""

    def is_done(self, handle: object) -> bool:
        """Whether a slice has arrived. Raises when it failed."""

    def release(self, handle: object) -> None: ...
    def send(self, peer: str, payload: bytes) -> None: ...
    def receive(self) -> list[tuple[str, bytes]]: ...
    def close(self) -> None: ...


_AGENT_CALLS = tuple(name for name in vars(Agent) if not name.startswith("_"))
# What `stuck` may name: calls into the library, and a turn of the thread that carries out loads.
CALLS = (*_AGENT_CALLS, "turn")


def watched(agent: Agent, watchdog: Watchdog) -> Agent:
    """An agent whose calls are watched; `agent` is the one behind it."""

    def watch(name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            watchdog.begin(name)
            try:
                return getattr(agent, name)(*arguments)
            finally:
                watchdog.end()

        return call

    return cast(Agent, SimpleNamespace(agent=agent, **{name: watch(name) for name in _AGENT_CALLS}))
