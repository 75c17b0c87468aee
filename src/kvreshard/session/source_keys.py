"""Which requests wait to hear that their source was met, and with which key it seals.

1. `ask`: a request waits for its source. Requests of one source share its handshake.
2. `take`, once a turn: the requests whose source has been met, with its key, and those whose source could not be met.
3. `forget`: a request does not wait any more.

Used from the session's thread only. A handshake that was cancelled is asked for anew as long as somebody waits. No event costs more where
more sources are waited for.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.session.commands import RemoteEngine, Renew
from kvreshard.session.peer import Peer


@dataclass(slots=True)
class _Asked:
    """`requests`: whether each wants to hear the key."""

    requests: dict[str, bool] = field(default_factory=dict)
    handshake: Future[Peer] | None = None


class SourceKeys:
    """Of one rank."""

    def __init__(self) -> None:
        self._asked: dict[RemoteEngine, _Asked] = {}
        self._source: dict[str, RemoteEngine] = {}
        # Sources whose handshake is to be asked for, and those whose handshake is over, as the threads of handshakes tell.
        self._to_ask: dict[RemoteEngine, None] = {}
        self._over: queue.SimpleQueue[RemoteEngine] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._source)

    def ask(self, command: Renew) -> None:
        """A request waits for its source."""
        request, remote = command.request, command.remote
        self.forget(request)
        if remote not in self._asked:
            self._asked[remote] = _Asked()
            self._to_ask[remote] = None
        self._source[request] = remote
        self._asked[remote].requests[request] = command.asks_key

    def forget(self, request: str) -> None:
        """A request waits no longer."""
        remote = self._source.pop(request, None)
        if remote is not None:
            del self._asked[remote].requests[request]
            if not self._asked[remote].requests:
                self._drop(remote)

    def take(self, get: Callable[[RemoteEngine], Future[Peer]]) -> tuple[dict[str, bytes], dict[str, BaseException]]:
        """(keys, why there is none), by request that wants to hear it, since the last call. `get` begins a handshake."""
        keys: dict[str, bytes] = {}
        unmet: dict[str, BaseException] = {}
        self._hear(keys, unmet)
        to_ask, self._to_ask = self._to_ask, {}
        for remote in to_ask:
            handshake = self._asked[remote].handshake = get(remote)
            handshake.add_done_callback(lambda _, remote=remote: self._over.put(remote))  # type: ignore[misc]
        self._hear(keys, unmet)
        return keys, unmet

    def _hear(self, keys: dict[str, bytes], unmet: dict[str, BaseException]) -> None:
        """What has come of the handshakes that are over."""
        while not self._over.empty():
            remote = self._over.get_nowait()
            asked = self._asked.get(remote)
            if asked is None or asked.handshake is None or not asked.handshake.done():
                continue  # of a former handshake
            if asked.handshake.cancelled():
                self._to_ask[remote] = None
                continue
            wanted, error = [name for name, asks in asked.requests.items() if asks], asked.handshake.exception()
            if error is None:
                keys |= dict.fromkeys(wanted, asked.handshake.result().engine_metadata.key)
            else:
                unmet |= dict.fromkeys(wanted, error)
            for request in asked.requests:
                del self._source[request]
            self._drop(remote)

    def _drop(self, remote: RemoteEngine) -> None:
        del self._asked[remote]
        self._to_ask.pop(remote, None)
