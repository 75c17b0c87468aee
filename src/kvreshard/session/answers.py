"""How does a source rank answer questions about the pages that it still keeps, and still do its other work?

1. A question is taken if its lease is held; a question that waits already, or has just been answered, is not taken twice. One that comes
   before the offer waits for it: a reader may be faster than this rank's next step.
2. Each turn of the session answers what fits some milliseconds, at least one question: one covers a bounded number of bytes.
3. The lease is looked at again after the digest: the pages were the request's own for all of that time.

Refused, with a word on the board: a request without this lease, memory that cannot be read here (a device's), questions that
are not ones, more than `MAX_WAITING` at a time. Nothing raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.logs import get_logger
from kvreshard.session.board import Answer, AnswerBoard, Said
from kvreshard.session.lease import LeaseBook
from kvreshard.session.notes import Question
from kvreshard.session.question import answer_question, readable

logger = get_logger(__name__)

MAX_WAITING = 1024
WORK_S = 0.010


class Answerer:
    """The questions that wait at one source rank. Used from the session's thread only."""

    def __init__(
        self, rank: int, board: AnswerBoard, book: LeaseBook, memory: object, clock: Callable[[], float]
    ) -> None:
        self._rank, self._board, self._book, self._memory, self._clock = rank, board, book, memory, clock
        self._waiting: OrderedDict[int, Question] = OrderedDict()
        self._early: dict[int, Question] = {}
        self.num_answered = 0

    def __len__(self) -> int:
        """Questions that can be answered now."""
        return len(self._waiting)

    def take(self, question: Question) -> None:
        """A question has arrived."""
        token = question.token
        if token in self._waiting or token in self._early or self._board.has(token):
            return
        if not self._book.holds(question.request, question.word):
            self._board.put(Answer(token, Said.NO_LEASE))
        elif len(self._waiting) + len(self._early) >= MAX_WAITING:
            self._board.put(Answer(token, Said.TOO_MUCH))
        elif self._book.tables(question.request) is None:
            self._early[token] = question
        else:
            self._waiting[token] = question

    def work(self, layout: EngineLayout) -> None:
        """Answer what fits a turn."""
        self._look_after_early()
        until_s = self._clock() + WORK_S
        while self._waiting:
            _, question = self._waiting.popitem(last=False)
            self._board.put(self._answer(question, layout))
            self.num_answered += 1
            if self._clock() >= until_s:
                return

    def _look_after_early(self) -> None:
        """Take the questions whose offer has come; those whose lease is gone get no digest."""
        for token, question in list(self._early.items()):
            if not self._book.holds(question.request, question.word):
                del self._early[token]
                self._board.put(Answer(token, Said.NO_LEASE))
            elif self._book.tables(question.request) is not None:
                self._waiting[token] = self._early.pop(token)

    def _answer(self, question: Question, layout: EngineLayout) -> Answer:
        memory = readable(self._memory, layout.rank_by_number[self._rank])
        if memory is None:
            return Answer(question.token, Said.NOT_READABLE)
        tables = self._book.tables(question.request)
        if tables is None or not self._book.holds(question.request, question.word):
            return Answer(question.token, Said.NO_LEASE)
        try:
            digest = answer_question(question, tables, layout, self._rank, memory)
        except KvReshardError as error:
            logger.warning("a question about request %s is not answered: %s", question.request[:200], error)
            return Answer(question.token, Said.NOT_A_QUESTION)
        except Exception:  # whatever a stranger asks for, the session goes on
            logger.exception("a question about request %s", question.request[:200])
            return Answer(question.token, Said.FAULT)
        if not self._book.holds(question.request, question.word):
            return Answer(question.token, Said.NO_LEASE)
        return Answer(question.token, Said.DIGEST, digest.value, digest.num_bytes)
