"""The prefills that one reader follows at their sources' listeners: one question per source, for all of them, that the source holds.

1. `follow` wants to hear of a transfer at an address, under a name of the caller's. `drop` no longer.
2. `ask`, once per turn, asks each source anew whose answer has come or whose transfers have changed. A source that cannot be asked is asked
   again after `RETRY_S`.
3. `take` returns what was answered: for each name once. The caller follows on, with what it knows by then, or not.

More of one source than fit a question take turns. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from kvreshard.session.handshake_client import HandshakeClient
from kvreshard.session.handshake_messages import (
    Address,
    HandshakeError,
    TransferQuestion,
    count_fitting,
    transfers_request,
)
from kvreshard.session.keys import Keys
from kvreshard.session.statement import MAX_STATEMENT_BYTES, Answer, read_reply

RETRY_S = 1.0
# Between two questions to one source: requests that come together are asked for together, and a listener that cannot hold a question
# answers at once.
PAUSE_S = 0.005
# A listener holds a question for seconds (`handshake_server.HOLD_S`).
QUESTION_S = 20.0


@dataclass(slots=True)
class _Source:
    """`wanted`: what is known of each transfer, by the caller's name, those that were not asked for longest first. `asked`: the question that is under
    way.
    """

    wanted: dict[str, TransferQuestion] = field(default_factory=dict)
    asked: tuple[tuple[str, TransferQuestion], ...] = ()
    reply: Future[bytes] | None = None
    has_changed: bool = True
    not_before_s: float = 0.0


class Follower:
    """Of one rank, or of the engine's scheduler. Used from one thread, but for `wake`, which is called on others when there is something to take."""

    def __init__(self, engine: str, rank: int, keys: Keys | None, wake: Callable[[], None]) -> None:
        self._engine, self._rank, self._keys, self._wake = engine, rank, keys, wake
        self._sources: dict[Address, _Source] = {}
        self._of_name: dict[str, Address] = {}
        self._replies: queue.SimpleQueue[tuple[Address, Future[bytes]]] = queue.SimpleQueue()
        self._client, self._name = HandshakeClient(), secrets.token_hex(16)

    def __len__(self) -> int:
        return len(self._of_name)

    def follow(self, name: str, address: Address, known: TransferQuestion) -> None:
        """Hear what is new of a transfer, once."""
        if self._of_name.get(name, address) != address:
            self.drop(name)
        source = self._sources.setdefault(address, _Source())
        self._of_name[name] = address
        if source.wanted.get(name) != known:
            source.wanted[name] = known
            source.has_changed = True

    def drop(self, name: str) -> None:
        """Hear nothing more of a transfer."""
        address = self._of_name.pop(name, None)
        if address is not None:
            source = self._sources[address]
            del source.wanted[name]
            if not source.wanted and source.reply is not None:
                source.reply.cancel()
                source.reply = None

    def take(self) -> list[tuple[str, Answer | HandshakeError]]:
        """What was answered since the last call. Names in it are followed no more."""
        taken: list[tuple[str, Answer | HandshakeError]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                address, reply = self._replies.get_nowait()
                source = self._sources.get(address)
                if source is not None and source.reply is reply:
                    source.reply, source.has_changed = None, True
                    taken += self._read(source, reply)
        for name, _ in taken:
            self.drop(name)
        return taken

    def ask(self) -> float:
        """Send the questions that are due; seconds until the next is."""
        now_s = time.monotonic()
        for address, source in list(self._sources.items()):
            if now_s < source.not_before_s:  # kept meanwhile, so that whoever follows it again waits as well
                continue
            if not source.wanted:
                del self._sources[address]
            elif source.has_changed:
                self._ask(address, source)
        waits = [one.not_before_s - now_s for one in self._sources.values() if one.wanted and one.has_changed]
        return max(0.0, min(waits, default=QUESTION_S))

    def close(self) -> None:
        """End all questions, without waiting."""
        self._client.close()

    def _ask(self, address: Address, source: _Source) -> None:
        if source.reply is not None:
            source.reply.cancel()
        source.has_changed, source.not_before_s = False, time.monotonic() + PAUSE_S
        source.asked = tuple(islice(source.wanted.items(), count_fitting(source.wanted.values())))
        if len(source.asked) < len(source.wanted):
            for name, known in source.asked:
                del source.wanted[name]
                source.wanted[name] = known
        # A listener that is known by two addresses holds a question of each.
        asker = f"{self._name} {address}"
        message = transfers_request(self._engine, self._rank, [known for _, known in source.asked], asker)
        reply = source.reply = self._client.ask(address, message, QUESTION_S, MAX_STATEMENT_BYTES, self._keys)

        def answered(reply: Future[bytes]) -> None:
            if not reply.cancelled():
                self._replies.put((address, reply))
                self._wake()

        reply.add_done_callback(answered)

    def _read(self, source: _Source, reply: Future[bytes]) -> list[tuple[str, Answer | HandshakeError]]:
        # A name may have been given to another transfer meanwhile.
        asked = [
            (place, name)
            for place, (name, known) in enumerate(source.asked)
            if name in source.wanted and source.wanted[name].transfer == known.transfer
        ]
        try:
            answers = read_reply(reply.result())
        except HandshakeError as error:
            source.not_before_s = time.monotonic() + RETRY_S
            return [(name, error) for _, name in asked]
        return [(name, answers[place]) for place, name in asked if place in answers]
