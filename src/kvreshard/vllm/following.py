"""Requests whose prefill is under way at another engine: how the scheduler of the decode engine learns of it.

A router gives both engines a `transfer_id` and the address of the prefill engine's listener. This engine asks there, once for all requests
of an id (choices share a prefill):

1. As long as the listener has not heard of the id, for `wait_s` at most; the same goes for a listener that cannot be asked. Then the
   requests are computed here. A prefill that the listener has heard of may wait in its engine's queue for as long as it takes.
2. Its first statement says what is prefilled, under which lease. From then on the ranks ask for themselves; here only the end is wanted, of
   requests that still wait for blocks: then they are loaded like any other, or computed here.
3. A request may wait until its prefill is about to end (`is_near`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address, HandshakeError, TransferQuestion
from kvreshard.session.keys import Keys
from kvreshard.session.statement import Answer
from kvreshard.vllm.params import ParamsError, RemotePrefill, read_statement

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a request cannot be loaded: a cause of `outcomes.REASONS`, and what is known of it."""

    cause: str
    text: str
    address: Address


@dataclass(slots=True)
class _FollowedTransfer:
    """A transfer that is asked for. `heard_s`: when its source was last known to have it, or could first not be asked, or when it was first asked for.

    `found`: what is known of it, and `untold`: of its requests, those that have not been told. `left_s`: see `Answer`; `lead_s`: see `TransferQuestion`.
    """

    transfer: str
    address: Address
    heard_s: float
    requests: dict[str, Request] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    has_heard: bool = False
    found: RemotePrefill | Lost | None = None
    error: str = ""
    left_s: float | None = None
    lead_s: float = 0.0

    @property
    def name(self) -> str:
        """Under which it is asked for."""
        return f"{self.address.host_port} {self.transfer}"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be heard."""
        statement = self.found.statement if isinstance(self.found, RemotePrefill) else None
        return isinstance(self.found, Lost) or (statement is not None and statement.is_complete)

    def find(self, found: RemotePrefill | Lost) -> None:
        """Something has become known, which all of its requests are to be told."""
        self.found, self.untold = found, set(self.requests)


class Following:
    """Of one engine. `wait_s`: how long a source may not know of a transfer. Used from the scheduler's thread."""

    def __init__(
        self,
        engine: str,
        keys: Keys | None,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        follower: Follower | None = None,
    ) -> None:
        self._wait_s, self._clock = wait_s, clock
        self._told = threading.Event()
        self._engine, self._keys, self._follower = engine, keys, follower
        self._asked: dict[str, _FollowedTransfer] = {}
        self._of_request: dict[str, _FollowedTransfer] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has not been told of its prefill yet."""
        asked = self._of_request.get(request_id)
        return asked is not None and request_id in asked.untold

    @property
    def unknown(self) -> list[tuple[Request, Address]]:
        """Requests that have not been told of their prefills yet, and whom they ask."""
        return [
            (asked.requests[name], asked.address) for asked in self._asked.values() for name in sorted(asked.untold)
        ]

    def begin(self, request: Request, transfer: str, address: Address) -> None:
        """Ask for a request."""
        self.end(request.request_id)
        asked = _FollowedTransfer(transfer, address, self._clock())
        asked = self._of_request[request.request_id] = self._asked.setdefault(asked.name, asked)
        asked.requests[request.request_id] = request
        asked.untold.add(request.request_id)
        self._ask(asked)

    def end(self, request_id: str) -> None:
        """It has ended. A transfer is asked for as long as any of its requests is here."""
        asked = self._of_request.pop(request_id, None)
        if asked is None:
            return
        del asked.requests[request_id]
        asked.untold.discard(request_id)
        if not asked.requests:
            del self._asked[asked.name]
            if self._follower is not None:
                self._follower.drop(asked.name)

    def take(self) -> list[tuple[Request, RemotePrefill | Lost]]:
        """What has become known of requests since the last call."""
        self.listen()
        told: list[tuple[Request, RemotePrefill | Lost]] = []
        for asked in self._asked.values():
            if asked.found is not None:
                told += [(asked.requests[name], asked.found) for name in sorted(asked.untold)]
                asked.untold.clear()
        return told

    def listen(self) -> bool:
        """Read what listeners have answered, and ask on; whether there is anything to `take`."""
        if self._follower is None or not self._asked:
            return False
        self._told.clear()
        now_s, is_nearer = self._clock(), False
        for name, answer in self._follower.take():
            asked = self._asked.get(name)
            if asked is not None:
                left_s, found = asked.left_s, self._read(asked, answer, now_s)
                is_nearer |= asked.left_s != left_s
                if found is not None:
                    asked.find(found)
        for asked in self._asked.values():
            is_silent = not asked.has_heard or asked.error
            if now_s > asked.heard_s + self._wait_s and not asked.is_over and is_silent:
                text = asked.error or f"it has not heard of transfer_id '{asked.transfer}' within {self._wait_s:g} s"
                asked.find(Lost("unheard", text, asked.address))
            self._ask(asked)
        return is_nearer or any(asked.found is not None and asked.untold for asked in self._asked.values())

    def is_near(self, request_id: str, lead_s: float) -> bool:
        """Whether a prefill is expected to end within `lead_s` seconds. If not, its source is asked to say when it is."""
        asked = self._of_request.get(request_id)
        if asked is None or asked.left_s is None or asked.left_s <= lead_s:
            return True
        if asked.lead_s < lead_s:
            asked.lead_s = lead_s
            self._ask(asked)
        return False

    @property
    def num_open(self) -> int:
        """Prefills that are under way, as far as is known."""
        return sum(not asked.is_over for asked in self._asked.values())

    def is_open(self, request_id: str) -> bool:
        """Whether its prefill is under way, as far as is known."""
        asked = self._of_request.get(request_id)
        return asked is not None and not asked.is_over

    def wait(self, seconds: float) -> bool:
        """Wait until a listener has answered or is to be asked again, or so long; whether there is anything to `take`."""
        next_s = seconds if self._follower is None else self._follower.ask()
        return self._told.wait(min(seconds, next_s)) and self.listen()

    def close(self) -> None:
        """End all questions."""
        if self._follower is not None:
            self._follower.close()

    def _ask(self, asked: _FollowedTransfer) -> None:
        if self._follower is None:
            self._follower = Follower(self._engine, 0, self._keys, self._told.set)
        if not asked.is_over:
            has_found = asked.found is not None
            known = TransferQuestion(asked.transfer, is_heard=asked.has_heard, only_end=has_found, lead_s=asked.lead_s)
            self._follower.follow(asked.name, asked.address, known)
        self._follower.ask()

    def _read(
        self, asked: _FollowedTransfer, answer: Answer | HandshakeError, now_s: float
    ) -> RemotePrefill | Lost | None:
        if isinstance(answer, HandshakeError):
            if asked.has_heard and not asked.error:  # a listener holds a question for seconds: its silence begins now
                asked.heard_s = now_s
            asked.error = str(answer)
            return None
        asked.error = ""
        if answer.state == "unheard":
            # A source that had the request and was started again has it no more.
            return Lost("prefill", "it has forgotten the request", asked.address) if asked.has_heard else None
        asked.heard_s, asked.has_heard = now_s, True
        asked.left_s = answer.left_s
        if answer.left_s is None or answer.left_s <= asked.lead_s:  # that it is near, it need not say again
            asked.lead_s = 0.0
        if answer.state == "ended":
            return Lost("prefill", answer.text, asked.address)
        if answer.statement is None:
            return None
        try:
            return read_statement(answer.statement, asked.address)
        except ParamsError as error:
            return Lost("params", str(error), asked.address)
