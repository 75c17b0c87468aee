"""How does a decode engine of a soak learn of a prefill that is under way, and order its load?

A router gives it a transfer id and the address of the prefill engine's listener. It asks there until the listener has a statement, and orders
the load from that; the ranks then follow for themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.soak.decode import Ended, Loads
from tests.soak.engine import Engine
from tests.soak.prefill import Params, table_forms

from kvreshard.session.commands import RemoteEngine
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address, HandshakeError, TransferQuestion
from kvreshard.session.statement import Answer, Statement

# So long a listener may not have heard of a transfer.
FIND_S = 4.0


@dataclass(frozen=True)
class FollowOrder:
    """A request, and where its prefill is. `seed`: of what it should hold, for the check."""

    request: str
    transfer: str
    address: Address
    num_tokens: int
    seed: int
    prefix: int
    is_watched: bool


class Follows:
    """The requests of one decode engine that have no statement yet. `on_no_room`: called for those for which there are too few pages."""

    def __init__(self, engine: Engine, loads: Loads, on_no_room: Callable[[str], None]) -> None:
        self._loads, self._on_no_room = loads, on_no_room
        self._follower = Follower(engine.shape.name, 0, None, lambda: None)
        self._asked: dict[str, tuple[FollowOrder, float]] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def begin(self, order: FollowOrder) -> None:
        """Ask for a request."""
        self._asked[order.request] = order, time.monotonic()
        self._follow(order)

    def abort(self, request: str) -> list[Ended]:
        """The client has gone."""
        return [self._end(request, "cancelled", "")] if request in self._asked else []

    def turn(self) -> list[Ended]:
        """Take the answers, order loads; the requests that are over without one."""
        ended: list[Ended] = []
        for request, answer in self._follower.take():
            order, ordered_s = self._asked[request]
            if isinstance(answer, Answer) and answer.state == "ended":
                ended.append(self._end(request, "prefill", answer.text))
            elif isinstance(answer, HandshakeError) or answer.statement is None:
                self._follow(order)
            else:
                del self._asked[request]
                self._load(order, answer.statement, ordered_s)
        now_s = time.monotonic()
        late = [request for request, (_, ordered_s) in self._asked.items() if now_s > ordered_s + FIND_S]
        ended += [self._end(request, "unheard", "its source has not scheduled it") for request in late]
        if self._asked:
            self._follower.ask()
        return ended

    def close(self) -> None:
        """End all questions."""
        self._follower.close()

    def _follow(self, order: FollowOrder) -> None:
        self._follower.follow(order.request, order.address, TransferQuestion(order.transfer))

    def _load(self, order: FollowOrder, statement: Statement, ordered_s: float) -> None:
        remote = RemoteEngine(statement.engine, statement.instance_id, order.address)
        params = Params(
            remote, statement.lease, table_forms(statement.tables()), order.num_tokens, order.seed, statement.code.hex(),
            order.transfer, statement.sealed_details,
        )  # fmt: skip
        if not self._loads.begin(order.request, params, order.prefix, order.is_watched, ordered_s):
            self._loads.release(params)
            self._on_no_room(order.request)

    def _end(self, request: str, kind: str, text: str) -> Ended:
        order, ordered_s = self._asked.pop(request)
        self._follower.drop(request)
        seconds = time.monotonic() - ordered_s
        return Ended(request, kind, text, seconds, order.num_tokens, order.prefix, 0, 0, False, is_early=True)
