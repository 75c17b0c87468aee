"""The prefills of one engine that readers may follow while they are computed, by the `transfer_id` that a router gave both sides.

The engine's thread says what happens to a prefill:

1. `register`: its request has come. `begin`: it is scheduled, under a lease. `extend`: it has got pages.
2. `complete`: it has ended well; every group's pages are known. `end`: nothing will come, or nothing more.
3. A preempted prefill begins again under another lease word.

The listener's thread answers from that (`answer`), for any number of readers. Ids of prefills that have ended are remembered for a while, so
that a reader that comes late does not wait. Two prefills with one id are a mistake of the router: neither is shown.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from kvreshard.model.tables import PageTable
from kvreshard.session.handshake_messages import MAX_FRAME_BYTES, TransferQuestion
from kvreshard.session.statement import MAX_STATEMENT_BYTES, Answer, PageList, Statement, encode_reply

MAX_ENDED = 10_000
_Unstated = tuple[Statement, dict[str, tuple[list[int], int]], dict[str, PageTable], float | None]
"""A prefill, new pages of its groups with the number of those before them, block tables if it is complete, and `_Prefill.left_s`."""


@dataclass(slots=True)
class _Prefill:
    """One transfer. `owner`: the request, which may be several choices. `pages`: of each group that may be read early, in order.
    `left_s`: see `Answer`.
    """

    owner: str
    ended: str | None = None
    statement: Statement | None = None
    pages: dict[str, list[int]] = field(default_factory=dict)
    tables: Mapping[str, PageTable] | None = None
    left_s: float | None = None


class Rendezvous:
    """See the module. `key`: what the engine seals with."""

    def __init__(self, key: bytes) -> None:
        self._lock = threading.Lock()
        self._prefills: dict[str, _Prefill] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.has_changed = False
        self.begin_instance(key)

    def begin_instance(self, key: bytes) -> None:
        """Seal with another key: the engine has slept, and what was shown is gone."""
        with self._lock:
            self._key = key
            self._prefills.clear()
            self._ended.clear()

    def register(self, transfer: str, owner: str) -> bool:
        """A request has come. False: another that has not ended has the same id, and neither is shown; or the same request has ended under this id
        before, and a reader that has not heard of that could take one for the other.
        """
        with self._lock:
            known = self._prefills.get(transfer)
            if known is not None and known.owner == owner:
                return known.ended is None
            is_free = known is None or known.ended is not None
            prefill = self._prefills[transfer] = _Prefill(owner)
            self._ended.pop(transfer, None)
            self.has_changed = True
            if not is_free:
                self._end(transfer, prefill, "two requests were sent to prefill under this transfer_id")
            return is_free

    def begin(self, transfer: str, owner: str, statement: Statement) -> bool:
        """A prefill is scheduled under the lease of `statement`, which lists no pages. False: it is not shown."""
        with self._lock:
            prefill = self._prefills.get(transfer)
            if prefill is None or prefill.owner != owner or prefill.ended is not None:
                return False
            prefill.statement, prefill.pages, prefill.tables = statement, {}, None
            self.has_changed = True
            return True

    def extend(self, transfer: str, word: int, pages: Mapping[str, Sequence[int]], left_s: float | None = None) -> None:
        """A step begins of the prefill under a lease word. It has got pages, appended to those it has; `left_s`: see `Answer`."""
        with self._lock:
            prefill = self._prefills.get(transfer)
            shown = None if prefill is None else prefill.statement
            if prefill is not None and shown is not None and shown.word == word:
                for name, ids in pages.items():
                    prefill.pages.setdefault(name, []).extend(ids)
                prefill.left_s = left_s
                self.has_changed = True

    def complete(self, transfer: str, owner: str, statement: Statement, tables: Mapping[str, PageTable]) -> None:
        """The prefill has ended well, with these block tables of all groups; `statement` lists no pages."""
        with self._lock:
            prefill = self._prefills.get(transfer)
            if prefill is not None and prefill.owner == owner and prefill.ended is None:
                prefill.statement, prefill.tables = statement, dict(tables)
                self.has_changed = True

    def end(self, transfer: str, owner: str, text: str) -> None:
        """Nothing more can be read of a prefill. `text`: why, for people."""
        with self._lock:
            prefill = self._prefills.get(transfer)
            if prefill is not None and prefill.owner == owner and prefill.ended is None:
                self._end(transfer, prefill, text)

    def answer(self, questions: Sequence[TransferQuestion], *, is_last: bool) -> bytes | None:
        """The answer to a question; None while there is nothing new. `is_last`: answer in any case. That a source has
        the request is news to a reader that does not know it. What makes the answer longer than a reader takes is left out.
        """
        with self._lock:  # the engine's thread waits for it: what takes longer is done behind
            found = [self._find(known, is_last=is_last) for known in questions]
            key = self._key
        answers, left_bytes = dict[int, Answer](), MAX_STATEMENT_BYTES
        for place, one in enumerate(found):
            if one is None:
                continue
            answer = one if isinstance(one, Answer) else _found(one, key)
            left_bytes -= _num_bytes(answer)
            if left_bytes < 0 and answers:  # the next question asks for them again
                break
            answers[place] = answer
        return encode_reply(answers) if answers or is_last else None

    def _find(self, known: TransferQuestion, *, is_last: bool) -> Answer | _Unstated | None:
        prefill = self._prefills.get(known.transfer)
        if prefill is None:
            return Answer("unheard") if is_last else None
        if prefill.ended is not None:
            return Answer("ended", prefill.ended)
        found = None if known.only_end and prefill.tables is None else _what_is_new(prefill, known)
        is_near = prefill.statement is not None and (prefill.left_s is None or prefill.left_s <= known.lead_s)
        is_asked = is_last or not (known.is_heard or known.word) or (known.lead_s > 0 and is_near)
        return found or (Answer("heard", left_s=prefill.left_s) if is_asked else None)

    def _end(self, transfer: str, prefill: _Prefill, text: str) -> None:
        prefill.ended, prefill.statement, prefill.pages, prefill.tables = text, None, {}, None
        self._ended[transfer] = None
        self.has_changed = True
        if len(self._ended) > MAX_ENDED:
            del self._prefills[self._ended.popitem(last=False)[0]]


def _what_is_new(prefill: _Prefill, known: TransferQuestion) -> _Unstated | None:
    """What is new to a reader; None if nothing is. Of a prefill that was not shown before it had ended, `prefill.pages` is empty."""
    shown = prefill.statement
    if shown is None:
        return None
    num_known = known.num_pages if known.word == shown.word else {}
    new = {
        name: (ids[num_known.get(name, 0) :], min(num_known.get(name, 0), len(ids)))
        for name, ids in prefill.pages.items()
    }
    is_known = known.word == shown.word and prefill.tables is None
    if is_known and not any(ids for ids, _ in new.values()):
        return None
    tables = {
        name: _from(table, num_known.get(name, 0) if name in prefill.pages else 0)
        for name, table in (prefill.tables or {}).items()
    }
    return shown, new, tables, prefill.left_s


def _found(unstated: _Unstated, key: bytes) -> Answer:
    """What is new, with a sealed statement."""
    shown, new, tables, left_s = unstated
    listed = {
        name: PageTable(np.array(ids, dtype=np.int64), shown.num_tokens, first)
        for name, (ids, first) in new.items()
        if name not in tables
    }
    tables = listed | tables
    stated = replace(shown, pages={name: PageList.of(table) for name, table in tables.items()})
    return Answer("found", statement=stated.sealed(key, tables), left_s=left_s)


def _num_bytes(answer: Answer) -> int:
    """Bytes of an encoded answer, or more: its pages and details, and ample room for the rest."""
    stated = answer.statement
    listed = 0 if stated is None else len(stated.details) + sum(len(one.pages) for one in stated.pages.values())
    return listed + MAX_FRAME_BYTES


def _from(table: PageTable, num_known: int) -> PageTable:
    """A block table without its first pages."""
    return PageTable(table.pages[num_known:], table.num_tokens, table.first_page + min(num_known, len(table.pages)))
