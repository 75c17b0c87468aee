"""Which requests wait to hear that their source was met, and with which key it seals.

1. `ask`: a request waits for its source. Requests of one source share its handshake.
2. `take`, once a turn: the requests whose source has been met, with its key, and those whose source could not be met.
3. `forget`: a request does not wait any more.

Used from the session's thread only. A handshake that was cancelled is asked for anew as long as somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.session.orders import RemoteEngine
from kvreshard.session.peers import Peer


@dataclass(slots=True)
class _Asked:
    requests: set[str] = field(default_factory=set)
    handshake: Future[Peer] | None = None


class SourceKeys:
    """Of one rank."""

    def __init__(self) -> None:
        self._asked: dict[RemoteEngine, _Asked] = {}
        self._source: dict[str, RemoteEngine] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._source)

    def ask(self, request: str, remote: RemoteEngine) -> None:
        """A request waits for the key of its source."""
        self.forget(request)
        self._source[request] = remote
        self._asked.setdefault(remote, _Asked()).requests.add(request)

    def forget(self, request: str) -> None:
        """A request waits no longer."""
        remote = self._source.pop(request, None)
        if remote is not None:
            asked = self._asked[remote]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[remote]

    def take(self, get: Callable[[RemoteEngine], Future[Peer]]) -> tuple[dict[str, bytes], set[str]]:
        """(keys by request, requests whose source could not be met) since the last call. `get` begins a handshake."""
        keys: dict[str, bytes] = {}
        unmet: set[str] = set()
        for remote, asked in list(self._asked.items()):
            if asked.handshake is None or asked.handshake.cancelled():
                asked.handshake = get(remote)
            if not asked.handshake.done() or asked.handshake.cancelled():
                continue
            if asked.handshake.exception() is None:
                keys |= dict.fromkeys(asked.requests, asked.handshake.result().card.key)
            else:
                unmet |= asked.requests
            for request in list(asked.requests):
                self.forget(request)
        return keys, unmet
