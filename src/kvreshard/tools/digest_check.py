"""The comparison of one load with its source, by digests, before the load is reported.

`DigestCheck.steps` is a generator like `pull_steps`. It runs after the last byte, while the source's lease still holds:

1. Cut the load into digest requests and send a few at a time, as notifications.
2. While the source computes, compute the same digests here, one per resumption.
3. Read the source's mailbox until every answer is there, and compare. An unanswered request is sent again after `RESEND_S`.

A difference, a refusal, or no answer in time raises DigestError, and the load fails. A rank whose memory cannot be read, here
(`find_obstacle`) or at the source, is not compared.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from kvreshard.model.layout import EngineLayout
from kvreshard.model.rank import Rank
from kvreshard.plan.copies import CopyList
from kvreshard.plan.route import Route
from kvreshard.session.commands import CheckResult, Load
from kvreshard.session.engine_metadata import MAILBOX_ENTRY_BYTES, RankMetadata
from kvreshard.session.observer import Landing, RejectedLoad
from kvreshard.session.pull import settled
from kvreshard.tools.cells import Cells
from kvreshard.tools.digest import Digest, digest_cells
from kvreshard.tools.digest_request import DigestRequest, is_readable, make_requests, write_request
from kvreshard.tools.mailbox import NUM_ENTRIES, DigestAnswer, Status, entry_offset, read_answer
from kvreshard.transport.base import Direction, Transfer
from kvreshard.transport.local import LocalMemory

Clock = Callable[[], float]

WINDOW = 16
CHECK_BYTES = WINDOW * MAILBOX_ENTRY_BYTES
"""Registered memory that a check needs."""
# An answer may be lost: two readers' answers may have the same place in the mailbox. The source computes no digest twice that is still there.
RESEND_S = 1.0

REFUSALS: Mapping[Status, str] = {
    Status.NO_LEASE: "the source no longer keeps the request's pages",
    Status.MALFORMED: "the source cannot make sense of the digest request; its log says why",
    Status.TOO_MANY: "the source has too many digest requests waiting; lower digest_share",
    Status.FAULT: "the source failed; its log says why",
}


class DigestError(RejectedLoad):
    """A load differs from its source, or could not be compared. `result` says which; 'skipped' where no comparison is possible."""

    def __init__(self, text: str, result: CheckResult) -> None:
        super().__init__(text)
        self.result: CheckResult = result


def is_chosen(request: str, share: float) -> bool:
    """Whether a request is in the share that is compared. Every rank chooses the same.

    >>> [is_chosen(name, 0.5) for name in ("a", "b", "c", "d")]
    [True, False, True, False]
    >>> is_chosen("a", 0.0), is_chosen("b", 1.0)
    (False, True)
    """
    number = int.from_bytes(hashlib.blake2b(request.encode(errors="replace"), digest_size=8).digest())
    return number < share * 2**64


def find_obstacle(
    route: Route, src: EngineLayout, metadata_by_rank: Mapping[int, RankMetadata], mine: Rank, memory: LocalMemory
) -> str:
    """Why loads of this route cannot be compared; empty if they can."""
    if not is_readable(memory, mine):
        devices = ", ".join(sorted(set(mine.devices)))
        return f"digest not available: rank {mine.rank} here cannot read its own memory on {devices}"
    for number in route.src_ranks:
        if not metadata_by_rank[number].mailbox_entries:
            return f"rank {number} of engine '{src.engine}' answers no digest requests"
    return ""


@dataclass(slots=True, eq=False)
class _Pending:
    """One request under way: what it is about, its place in the scratch memory, when it was sent, and both digests once known."""

    src_rank: int
    cells: Cells
    request: DigestRequest
    place: int
    sent_s: float
    mine: Digest | None = None
    theirs: Digest | None = None

    def __str__(self) -> str:
        fields = self.request.fields
        more = f" and {len(fields) - 1} more fields" if len(fields) > 1 else ""
        tokens = ", ".join(f"[{start}, {stop})" for start, stop in self.request.intervals)
        return f"field '{fields[0]}'{more}, tokens {tokens}, from source rank {self.src_rank}"


class DigestCheck:
    """See the module. `scratch_address`: `CHECK_BYTES` of registered local memory. `memory`: this rank's."""

    def __init__(
        self, load: Load, landing: Landing, memory: LocalMemory, scratch_address: int, timeout_s: float, clock: Clock
    ) -> None:
        self._transfer, self._landing, self._memory = load.transfer, landing, memory
        self._scratch_address, self._timeout_s, self._clock = scratch_address, timeout_s, clock
        self._mover, self._metadata_by_rank = landing.peer.mover, landing.peer.engine_metadata.rank_by_number
        self._pending: dict[int, _Pending] = {}
        self._todo = make_requests(
            landing.peer.route.transfers, load.transfer, load.lease, secrets.token_bytes(16), self._new_token
        )

    def steps(self) -> Generator[Transfer | None, None, int]:
        """Compare; returns how many bytes are equal. Resume as with `pull_steps`.

        Raises DigestError, or TransportError where a source cannot be reached.
        """
        started_s, num_bytes = self._clock(), 0
        while True:
            self._send_more()
            if not self._pending:
                return num_bytes
            behind = next((one for one in self._pending.values() if one.mine is None), None)
            if behind is not None:
                self._digest(behind)
            yield from self._read_mailboxes()
            num_bytes += self._compare()
            if not self._pending:
                continue
            if self._clock() - started_s >= self._timeout_s:
                unanswered = next(iter(self._pending.values()))
                raise DigestError(
                    f"the source has not sent the digest of {unanswered} within {self._timeout_s:g} s; is it alive, and is it busy? The load "
                    "is not served unchecked",
                    "unanswered",
                )
            self._send_again()
            if any(one.mine is None for one in self._pending.values()):
                self._landing.wake()
            yield None

    def _digest(self, one: _Pending) -> None:
        """Compute this rank's own digest of a request."""
        intervals = {one.cells.group.name: one.request.intervals}
        one.mine = digest_cells(one.cells, self._transfer.dst_tables, intervals, self._memory, one.request.key)

    def _new_token(self) -> int:
        """A random number; its place in a mailbox is no other open request's."""
        while True:
            token = secrets.randbits(64)
            if all((token - other) % NUM_ENTRIES for other in self._pending):
                return token

    def _send_more(self) -> None:
        """Keep `WINDOW` requests under way."""
        for place in sorted(set(range(WINDOW)) - {one.place for one in self._pending.values()}):
            found = next(self._todo, None)
            if found is None:
                return
            src_rank, cells, request = found
            self._pending[request.token] = _Pending(src_rank, cells, request, place, self._clock())
            self._send(self._pending[request.token])

    def _send_again(self) -> None:
        """Repeat requests that were not answered for `RESEND_S`."""
        for one in self._pending.values():
            if one.theirs is None and self._clock() >= one.sent_s + RESEND_S:
                one.sent_s = self._clock()
                self._send(one)

    def _send(self, one: _Pending) -> None:
        self._mover.transport.notify(self._mover.peers[one.src_rank], write_request(one.request))

    def _read_mailboxes(self) -> Generator[Transfer | None, None, None]:
        """Read the entries of all open requests, one transfer per source rank."""
        unanswered = [one for one in self._pending.values() if one.theirs is None]
        transfers = []
        for rank in sorted({one.src_rank for one in unanswered}):
            here, metadata = [one for one in unanswered if one.src_rank == rank], self._metadata_by_rank[rank]
            local = [self._place_of(one) for one in here]
            remote = [
                metadata.mailbox_address + entry_offset(one.request.token, metadata.mailbox_entries) for one in here
            ]
            copies = CopyList.of(remote, local, MAILBOX_ENTRY_BYTES)
            transfers.append(self._mover.transport.post(self._mover.peers[rank], Direction.READ, copies))
            self._landing.posted(transfers[-1])
        error: Exception | None = None
        for transfer in transfers:
            error = (yield from settled(transfer)) or error
        if error is not None:
            raise error
        for one in unanswered:
            answer = read_answer(self._place_of(one), one.request.token)
            if answer is not None:
                one.theirs = _digest_of(answer, one)

    def _place_of(self, one: _Pending) -> int:
        return self._scratch_address + one.place * MAILBOX_ENTRY_BYTES

    def _compare(self) -> int:
        """Compare and remove the requests of which both digests are known; returns their bytes. Raises DigestError."""
        num_bytes = 0
        for token, one in list(self._pending.items()):
            if one.mine is None or one.theirs is None:
                continue
            if one.mine != one.theirs:
                raise DigestError(
                    f"wrong bytes: {one}: the source has {one.theirs}, this rank has {one.mine}. Every length was right and "
                    "the lease held; report both layouts, or replay the flight record",
                    "different",
                )
            num_bytes += one.mine.num_bytes
            del self._pending[token]
        return num_bytes


def _digest_of(answer: DigestAnswer, one: _Pending) -> Digest:
    if answer.status is Status.NOT_READABLE:
        raise DigestError(f"digest not available: source rank {one.src_rank} cannot read its own memory", "skipped")
    if answer.status is not Status.DIGEST:
        raise DigestError(f"no digest of {one}: {REFUSALS[answer.status]}", "refused")
    return Digest(answer.value, answer.num_bytes)
