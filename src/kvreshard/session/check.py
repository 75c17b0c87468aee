"""Are the bytes that arrived the bytes that the source holds? Asked for a share of requests, before a load is reported.

`check_steps` is a generator like `pull_steps`, and follows it while the source's lease still holds:

1. Cut the load in questions (`question`), and ask a few at a time, by notification.
2. While the source computes, compute the same digests here, one at a resumption.
3. Read the source's board until every answer is there, and compare. Unanswered questions are asked again now and then.

Fail closed: a difference, a refusal, or no answer in time raises DigestError, and the load has failed. What cannot be compared
at all is skipped: a rank that cannot read its own memory, a source without a board. The reader's own is found before anything
is asked (`find_obstacle`), a source's when it says so.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout, Rank
from kvreshard.model.tables import Request
from kvreshard.plan.route import Route
from kvreshard.session.board import ENTRY_BYTES, NUM_ENTRIES, Answer, Said, entry_offset, read_answer
from kvreshard.session.card import RankCard
from kvreshard.session.mover import Mover
from kvreshard.session.notes import Question, write_note
from kvreshard.session.orders import CheckResult, RemoteLease
from kvreshard.session.pull import settled
from kvreshard.session.question import Part, make_questions, readable
from kvreshard.transport.base import Copies, Direction, Transfer
from kvreshard.verify import Digest, Memory

WINDOW = 16
CHECK_BYTES = WINDOW * ENTRY_BYTES
"""Registered memory that a check needs."""
# A question or its answer may be lost: two readers' answers may fall on one place of the board. The source does not compute twice
# what waits there already.
ASK_AGAIN_S = 1.0

REFUSALS: Mapping[Said, str] = {
    Said.NO_LEASE: "the source no longer keeps the request's pages",
    Said.NOT_A_QUESTION: "the source cannot make sense of the question; its log says why",
    Said.TOO_MUCH: "the source has too many questions waiting; lower digest_share",
    Said.FAULT: "the source failed; its log says why",
}


class DigestError(KvReshardError):
    """A load that was to be compared with its source differs, or could not be compared. `result` says which; 'skipped' where it cannot
    be, whatever is tried.
    """

    def __init__(self, text: str, result: CheckResult) -> None:
        super().__init__(text)
        self.result: CheckResult = result


@dataclass(frozen=True, slots=True)
class Check:
    """What a check needs. `scratch_address`: `CHECK_BYTES` of registered local memory. `wake`: resume soon."""

    lease: RemoteLease
    boards: Mapping[int, RankCard]
    memory: Memory
    scratch_address: int
    timeout_s: float
    wake: Callable[[], None]
    clock: Callable[[], float]
    new_token: Callable[[], int] = lambda: secrets.randbits(64)


def is_chosen(request: str, share: float) -> bool:
    """Whether a request is among the share that is compared. Every rank chooses alike.

    >>> [is_chosen(name, 0.5) for name in ("a", "b", "c", "d")]
    [True, False, True, False]
    >>> is_chosen("a", 0.0), is_chosen("b", 1.0)
    (False, True)
    """
    number = int.from_bytes(hashlib.blake2b(request.encode(errors="replace"), digest_size=8).digest())
    return number < share * 2**64


def find_obstacle(route: Route, src: EngineLayout, boards: Mapping[int, RankCard], mine: Rank, memory: object) -> str:
    """Why a load of this route cannot be compared at all; empty if it can."""
    if readable(memory, mine) is None:
        devices = ", ".join(sorted(set(mine.devices)))
        return f"digest not available: rank {mine.rank} here cannot read its own memory on {devices}"
    for number in route.src_ranks:
        if not boards[number].board_entries:
            return f"rank {number} of engine '{src.engine}' has no board for digests, so it answers no questions"
    return ""


@dataclass(slots=True, eq=False)
class _Asked:
    part: Part
    question: Question
    slot: int
    asked_s: float
    mine: Digest | None = None
    theirs: Digest | None = None


def check_steps(
    check: Check, mover: Mover, route: Route, request: Request, note: Callable[[Transfer], None]
) -> Generator[Transfer | None, None, int]:
    """Compare a load with its source; returns how many bytes are equal. Resume as with `pull_steps`.

    Raises DigestError, or TransportError where a source cannot be reached.
    """
    started_s = check.clock()
    asked: dict[int, _Asked] = {}

    def new_token() -> int:
        while True:
            token = check.new_token()
            if all((token - other) % NUM_ENTRIES for other in asked):
                return token

    todo = make_questions(route.lanes, request, check.lease, secrets.token_bytes(16), new_token)
    num_bytes = 0
    while True:
        _ask_more(check, mover, todo, asked)
        if not asked:
            return num_bytes
        behind = next((one for one in asked.values() if one.mine is None), None)
        if behind is not None:
            behind.mine = behind.part.digest(request, check.memory, behind.question.key)
        yield from _read_boards(check, mover, asked, note)
        num_bytes += _compare(asked)
        if not asked:
            continue
        waited_s = check.clock() - started_s
        if waited_s >= check.timeout_s:
            one = next(iter(asked.values()))
            raise DigestError(
                f"the source has not answered within {check.timeout_s:g} s what the digest of {one.part} is; is it alive, and "
                "does it have time? The load is not served unchecked",
                "unanswered",
            )
        for one in asked.values():
            if one.theirs is None and check.clock() >= one.asked_s + ASK_AGAIN_S:
                one.asked_s = check.clock()
                mover.transport.notify(mover.peers[one.part.src_rank], write_note(one.question))
        if any(one.mine is None for one in asked.values()):
            check.wake()
        yield None


def _ask_more(check: Check, mover: Mover, todo: Iterator[tuple[Part, Question]], asked: dict[int, _Asked]) -> None:
    """Keep `WINDOW` questions under way."""
    free = sorted(set(range(WINDOW)) - {one.slot for one in asked.values()})
    for slot in free:
        found = next(todo, None)
        if found is None:
            return
        part, question = found
        asked[question.token] = _Asked(part, question, slot, check.clock())
        mover.transport.notify(mover.peers[part.src_rank], write_note(question))


def _read_boards(
    check: Check, mover: Mover, asked: Mapping[int, _Asked], note: Callable[[Transfer], None]
) -> Generator[Transfer | None, None, None]:
    """Read the entries of all open questions, one transfer per source rank."""
    by_rank: dict[int, list[_Asked]] = {}
    for one in asked.values():
        if one.theirs is None:
            by_rank.setdefault(one.part.src_rank, []).append(one)
    transfers = []
    for rank, questions in by_rank.items():
        card = check.boards[rank]
        local = [check.scratch_address + one.slot * ENTRY_BYTES for one in questions]
        remote = [card.board_address + entry_offset(one.question.token, card.board_entries) for one in questions]
        transfers.append(mover.transport.post(mover.peers[rank], Direction.READ, Copies.of(local, remote, ENTRY_BYTES)))
        note(transfers[-1])
    error: Exception | None = None
    for transfer in transfers:
        error = (yield from settled(transfer)) or error
    if error is not None:
        raise error
    for questions in by_rank.values():
        for one in questions:
            answer = read_answer(check.scratch_address + one.slot * ENTRY_BYTES, one.question.token)
            if answer is not None:
                one.theirs = _digest_of(answer, one.part)


def _digest_of(answer: Answer, part: Part) -> Digest:
    if answer.said is Said.NOT_READABLE:
        raise DigestError(f"digest not available: source rank {part.src_rank} cannot read its own memory", "skipped")
    if answer.said is not Said.DIGEST:
        raise DigestError(f"no digest of {part}: {REFUSALS[answer.said]}", "refused")
    return Digest(answer.value, answer.num_bytes)


def _compare(asked: dict[int, _Asked]) -> int:
    """Take out the questions of which both digests are known; returns their bytes."""
    num_bytes = 0
    for token, one in list(asked.items()):
        if one.mine is None or one.theirs is None:
            continue
        if one.mine != one.theirs:
            raise DigestError(
                f"wrong bytes: {one.part}: the source has {one.theirs}, this rank has {one.mine}. Every length was right and the "
                "lease held; report both layouts, or replay the flight record",
                "different",
            )
        num_bytes += one.mine.num_bytes
        del asked[token]
    return num_bytes
