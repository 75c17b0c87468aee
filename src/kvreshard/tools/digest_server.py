"""The digest requests that wait at a source rank, answered a few milliseconds per turn from pages that it still keeps.

1. A request is taken if its lease is held. One that waits already, or has just been answered, is not taken twice. One that comes before the
   lease is published waits for it: a reader may be faster than this rank's next step.
2. Each turn of the session answers what fits `WORK_S`, at least one: a request covers a bounded number of bytes.
3. The lease cannot end while a digest is computed, since leases end on this thread: the pages are the request's own for all of that time.

Refused, with a status in the mailbox: a request without this lease, memory that cannot be read here, malformed requests, more than
`MAX_WAITING` at a time. Nothing raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.logs import get_logger
from kvreshard.session.lease import LeaseBook
from kvreshard.tools.digest_request import DigestRequest, answer_request, is_readable
from kvreshard.tools.mailbox import DigestAnswer, DigestMailbox, Status
from kvreshard.tools.memory import Memory

logger = get_logger(__name__)

MAX_WAITING = 1024
WORK_S = 0.010


class DigestServer:
    """Answers digest requests of one source rank. Used from the session's thread only."""

    def __init__(self, rank: int, mailbox: DigestMailbox, memory: Memory, clock: Callable[[], float]) -> None:
        self._rank, self._mailbox, self._memory, self._clock = rank, mailbox, memory, clock
        self._waiting: OrderedDict[int, DigestRequest] = OrderedDict()
        self._early: dict[int, DigestRequest] = {}
        self.num_answered = 0

    def __len__(self) -> int:
        """Requests that can be answered now."""
        return len(self._waiting)

    def take(self, request: DigestRequest, leases: LeaseBook) -> None:
        """A request has arrived."""
        token = request.token
        if token in self._waiting or token in self._early or self._mailbox.has(token):
            return
        if not leases.holds(request.request, request.word):
            self._mailbox.put(DigestAnswer(token, Status.NO_LEASE))
        elif len(self._waiting) + len(self._early) >= MAX_WAITING:
            self._mailbox.put(DigestAnswer(token, Status.TOO_MANY))
        elif leases.tables(request.request) is None:
            self._early[token] = request
        else:
            self._waiting[token] = request

    def work(self, leases: LeaseBook, layout: EngineLayout) -> bool:
        """Answer what fits a turn; whether more wait that can be answered."""
        self._take_published(leases)
        until_s = self._clock() + WORK_S
        while self._waiting:
            _, request = self._waiting.popitem(last=False)
            self._mailbox.put(self._answer(request, leases, layout))
            self.num_answered += 1
            if self._clock() >= until_s:
                break
        return bool(self._waiting)

    def _take_published(self, leases: LeaseBook) -> None:
        """Take the early requests whose lease is published; those whose lease is gone get no digest."""
        for token, request in list(self._early.items()):
            if not leases.holds(request.request, request.word):
                del self._early[token]
                self._mailbox.put(DigestAnswer(token, Status.NO_LEASE))
            elif leases.tables(request.request) is not None:
                self._waiting[token] = self._early.pop(token)

    def _answer(self, request: DigestRequest, leases: LeaseBook, layout: EngineLayout) -> DigestAnswer:
        if not is_readable(self._memory, layout.rank_by_number[self._rank]):
            return DigestAnswer(request.token, Status.NOT_READABLE)
        tables = leases.tables(request.request)
        if tables is None or not leases.holds(request.request, request.word):
            return DigestAnswer(request.token, Status.NO_LEASE)
        try:
            digest = answer_request(request, tables, layout, self._rank, self._memory)
        except KvReshardError as error:
            logger.warning("a digest request for request %s is not answered: %s", request.request[:200], error)
            return DigestAnswer(request.token, Status.MALFORMED)
        except Exception:  # whatever a stranger asks for, the session goes on
            logger.exception("a digest request for request %s", request.request[:200])
            return DigestAnswer(request.token, Status.FAULT)
        return DigestAnswer(request.token, Status.DIGEST, digest.value, digest.num_bytes)
