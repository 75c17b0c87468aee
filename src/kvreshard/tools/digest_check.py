"""Compares what one load has brought with its source, by digests, before the load is reported.

`check_steps` is a generator like `pull_steps`, and follows it while the source's lease still holds:

1. Cut the load into digest requests and send a few at a time, by notification.
2. While the source computes, compute the same digests here, one at a resumption.
3. Read the source's mailbox until every answer is there, and compare. What is not answered is asked again now and then.

A difference, a refusal, or no answer in time raises DigestError, and the load fails. What cannot be compared at all is skipped: a rank that
cannot read its own memory, here (`find_obstacle`) or at the source.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from kvreshard.model.layout import EngineLayout, Rank
from kvreshard.model.tables import Request
from kvreshard.plan.route import Route
from kvreshard.session.card import MAILBOX_ENTRY_BYTES, RankCard
from kvreshard.session.mover import Mover
from kvreshard.session.observer import RejectedLoad
from kvreshard.session.orders import CheckResult, RemoteLease
from kvreshard.session.pull import settled
from kvreshard.tools import Digest, Memory
from kvreshard.tools.digest_request import DigestRequest, Part, make_requests, readable, write_request
from kvreshard.tools.mailbox import NUM_ENTRIES, DigestAnswer, Status, entry_offset, read_answer
from kvreshard.transport.base import Copies, Direction, Transfer

WINDOW = 16
CHECK_BYTES = WINDOW * MAILBOX_ENTRY_BYTES
"""Registered memory that a check needs."""
# A request or its answer may be lost: two readers' answers may fall on one place of the mailbox. The source does not compute twice what
# waits there already.
ASK_AGAIN_S = 1.0

REFUSALS: Mapping[Status, str] = {
    Status.NO_LEASE: "the source no longer keeps the request's pages",
    Status.MALFORMED: "the source cannot make sense of the digest request; its log says why",
    Status.TOO_MANY: "the source has too many digest requests waiting; lower digest_share",
    Status.FAULT: "the source failed; its log says why",
}


class DigestError(RejectedLoad):
    """A load that was to be compared with its source differs, or could not be compared. `result` says which; 'skipped' where it cannot
    be, whatever is tried.
    """

    def __init__(self, text: str, result: CheckResult) -> None:
        super().__init__(text)
        self.result: CheckResult = result


@dataclass(frozen=True, slots=True)
class Check:
    """What a check needs. `scratch_address`: `CHECK_BYTES` of registered local memory. `wake`: resume soon.

    `cards`: of the source's ranks, by number. `posted`: hears of every transfer.
    """

    lease: RemoteLease
    cards: Mapping[int, RankCard]
    memory: Memory
    scratch_address: int
    timeout_s: float
    posted: Callable[[Transfer], None]
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


def find_obstacle(route: Route, src: EngineLayout, cards: Mapping[int, RankCard], mine: Rank, memory: object) -> str:
    """Why a load of this route cannot be compared at all; empty if it can."""
    if readable(memory, mine) is None:
        devices = ", ".join(sorted(set(mine.devices)))
        return f"digest not available: rank {mine.rank} here cannot read its own memory on {devices}"
    for number in route.src_ranks:
        if not cards[number].mailbox_entries:
            return f"rank {number} of engine '{src.engine}' answers no digest requests"
    return ""


@dataclass(slots=True, eq=False)
class _Pending:
    part: Part
    request: DigestRequest
    place: int
    sent_s: float
    mine: Digest | None = None
    theirs: Digest | None = None


def check_steps(check: Check, mover: Mover, route: Route, request: Request) -> Generator[Transfer | None, None, int]:
    """Compare a load with its source; returns how many bytes are equal. Resume as with `pull_steps`.

    Raises DigestError, or TransportError where a source cannot be reached.
    """
    started_s = check.clock()
    pending: dict[int, _Pending] = {}

    def new_token() -> int:
        while True:
            token = check.new_token()
            if all((token - other) % NUM_ENTRIES for other in pending):
                return token

    todo = make_requests(route.lanes, request, check.lease, secrets.token_bytes(16), new_token)
    num_bytes = 0
    while True:
        _send_more(check, mover, todo, pending)
        if not pending:
            return num_bytes
        behind = next((one for one in pending.values() if one.mine is None), None)
        if behind is not None:
            behind.mine = behind.part.digest(request, check.memory, behind.request.key)
        yield from _read_mailboxes(check, mover, pending)
        num_bytes += _compare(pending)
        if not pending:
            continue
        if check.clock() - started_s >= check.timeout_s:
            raise DigestError(
                f"the source has not answered within {check.timeout_s:g} s what the digest of {next(iter(pending.values())).part} is; "
                "is it alive, and does it have time? The load is not served unchecked",
                "unanswered",
            )
        for one in pending.values():
            if one.theirs is None and check.clock() >= one.sent_s + ASK_AGAIN_S:
                one.sent_s = check.clock()
                mover.transport.notify(mover.peers[one.part.src_rank], write_request(one.request))
        if any(one.mine is None for one in pending.values()):
            check.wake()
        yield None


def _send_more(
    check: Check, mover: Mover, todo: Iterator[tuple[Part, DigestRequest]], pending: dict[int, _Pending]
) -> None:
    """Keep `WINDOW` requests under way."""
    free = sorted(set(range(WINDOW)) - {one.place for one in pending.values()})
    for place in free:
        found = next(todo, None)
        if found is None:
            return
        part, request = found
        pending[request.token] = _Pending(part, request, place, check.clock())
        mover.transport.notify(mover.peers[part.src_rank], write_request(request))


def _read_mailboxes(
    check: Check, mover: Mover, pending: Mapping[int, _Pending]
) -> Generator[Transfer | None, None, None]:
    """Read the entries of all open requests, one transfer per source rank."""
    by_rank: dict[int, list[_Pending]] = {}
    for one in pending.values():
        if one.theirs is None:
            by_rank.setdefault(one.part.src_rank, []).append(one)
    transfers = []
    for rank, unanswered in by_rank.items():
        card = check.cards[rank]
        local = [check.scratch_address + one.place * MAILBOX_ENTRY_BYTES for one in unanswered]
        remote = [card.mailbox_address + entry_offset(one.request.token, card.mailbox_entries) for one in unanswered]
        copies = Copies.of(local, remote, MAILBOX_ENTRY_BYTES)
        transfers.append(mover.transport.post(mover.peers[rank], Direction.READ, copies))
        check.posted(transfers[-1])
    error: Exception | None = None
    for transfer in transfers:
        error = (yield from settled(transfer)) or error
    if error is not None:
        raise error
    for unanswered in by_rank.values():
        for one in unanswered:
            answer = read_answer(check.scratch_address + one.place * MAILBOX_ENTRY_BYTES, one.request.token)
            if answer is not None:
                one.theirs = _digest_of(answer, one.part)


def _digest_of(answer: DigestAnswer, part: Part) -> Digest:
    if answer.status is Status.NOT_READABLE:
        raise DigestError(f"digest not available: source rank {part.src_rank} cannot read its own memory", "skipped")
    if answer.status is not Status.DIGEST:
        raise DigestError(f"no digest of {part}: {REFUSALS[answer.status]}", "refused")
    return Digest(answer.value, answer.num_bytes)


def _compare(pending: dict[int, _Pending]) -> int:
    """Take out the requests of which both digests are known; returns their bytes."""
    num_bytes = 0
    for token, one in list(pending.items()):
        if one.mine is None or one.theirs is None:
            continue
        if one.mine != one.theirs:
            raise DigestError(
                f"wrong bytes: {one.part}: the source has {one.theirs}, this rank has {one.mine}. Every length was right and the "
                "lease held; report both layouts, or replay the flight record",
                "different",
            )
        num_bytes += one.mine.num_bytes
        del pending[token]
    return num_bytes
