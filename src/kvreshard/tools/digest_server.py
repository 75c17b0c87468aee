"""Queue of the digest requests at a source rank. Each turn answers some of them, from pages that the source still holds.

1. A request is queued if its lease is held, once per token. A request may arrive before its lease is published, since a reader may be ahead of
   this rank's next step; it then waits for the lease.
2. Each turn of the session answers requests for `WORK_S`, at least one: a request covers a bounded number of bytes.
3. The lease cannot end while a digest is computed, since leases end on the same thread: the pages are the request's own for all of that time.

Refusals are a status in the mailbox: no such lease, memory that cannot be read here, a malformed request, more than `MAX_WAITING` requests.
Nothing raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.lease import LeaseBook
from kvreshard.tools.digest_request import DigestRequest, answer_request, is_readable
from kvreshard.tools.mailbox import DigestAnswer, DigestMailbox, Status
from kvreshard.transport.local import LocalMemory

logger = get_logger(__name__)

MAX_WAITING = 1024
WORK_S = 0.010


class DigestServer:
    """See the module. Used from the session's thread only."""

    def __init__(self, rank: int, mailbox: DigestMailbox, memory: LocalMemory, clock: Callable[[], float]) -> None:
        self._rank, self._mailbox, self._memory, self._clock = rank, mailbox, memory, clock
        self._queue: dict[int, DigestRequest] = {}
        self.num_answered = 0

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def take(self, request: DigestRequest, leases: LeaseBook) -> None:
        """Queue a request that has arrived, or refuse it."""
        token = request.token
        if token in self._queue or self._mailbox.has(token):
            return
        if not leases.holds(request.request, request.word):
            self._mailbox.put(DigestAnswer(token, Status.NO_LEASE))
        elif len(self._queue) >= MAX_WAITING:
            self._mailbox.put(DigestAnswer(token, Status.TOO_MANY))
        else:
            self._queue[token] = request

    def work(self, leases: LeaseBook, layout: EngineLayout) -> bool:
        """Answer requests for `WORK_S`, the oldest first; returns whether more can be answered."""
        until_s = self._clock() + WORK_S
        ready = deque(request for request in self._queue.values() if _is_ready(request, leases))
        while ready:
            request = ready.popleft()
            del self._queue[request.token]
            self._mailbox.put(self._answer(request, leases, layout))
            self.num_answered += 1
            if self._clock() >= until_s:
                break
        return bool(ready)

    def _answer(self, request: DigestRequest, leases: LeaseBook, layout: EngineLayout) -> DigestAnswer:
        if not is_readable(self._memory, layout.rank_by_number[self._rank]):
            return DigestAnswer(request.token, Status.NOT_READABLE)
        tables = leases.tables(request.request)
        if tables is None or not leases.holds(request.request, request.word):
            return DigestAnswer(request.token, Status.NO_LEASE)
        try:
            digest = answer_request(request, tables, layout, self._rank, self._memory)
        except KvReshardError as error:
            logger.warning(
                "a digest request for request %s is not answered: %s",
                *(request.request[:200], error),
                extra=fields("digest_not_answered", request_id=request.request[:200]),
            )
            return DigestAnswer(request.token, Status.MALFORMED)
        except Exception:  # no request of a peer may end the session
            logger.exception(
                "a digest request for request %s",
                request.request[:200],
                extra=fields("internal_error", request_id=request.request[:200]),
            )
            return DigestAnswer(request.token, Status.FAULT)
        return DigestAnswer(request.token, Status.DIGEST, digest.value, digest.num_bytes)


def _is_ready(request: DigestRequest, leases: LeaseBook) -> bool:
    """Whether a request's lease is published, or is gone, which is an answer too."""
    return leases.tables(request.request) is not None or not leases.holds(request.request, request.word)
