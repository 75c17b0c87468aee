"""A load that reads pages while they are computed.

Each time there is news, by the progress words or by the source's listener:

1. A part whose tokens have become final up to another edge of pages is read up to there: the new interval, after loads that somebody waits
   for, so much at a time (`ROUND_BYTES`).
2. A part is read to its end once all its tokens are final. What may not be read early is read when the listener says that the prefill is
   complete. No load ends before: the source may overwrite pages of a prefill that it preempts a moment before it clears the lease word.
3. What no copy writes is zeroed once, for the whole request.
4. The lease word is read last, as of every load.

If the lease word is another on any source rank before the prefill is complete, the prefill was preempted or has ended. What was read is
forgotten when it has settled, and reading begins again under the word that the listener names. A prefill that the listener calls ended fails
the load.

`load_timeout_s` is the longest time without news from the words or the listener. The listener's answer that a prefill waits in its engine's
queue is news.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.model.text import plain
from kvreshard.plan.bind import gathered
from kvreshard.plan.copies import Copies, Int64s
from kvreshard.plan.reads import ReadPlan, plan_reads
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.session.commands import Failure, Load
from kvreshard.session.handshake_messages import HandshakeError, TransferQuestion
from kvreshard.session.job import Job
from kvreshard.session.lease import Lease
from kvreshard.session.parts import Part
from kvreshard.session.peer import Peer
from kvreshard.session.progress import Progress
from kvreshard.session.pull import (
    StaleLease,
    Steps,
    TransferStats,
    check_words,
    pull_steps,
    run_batches,
    settled,
    take_buffer,
)
from kvreshard.session.statement import MAX_STATEMENT_BYTES, Answer, Statement
from kvreshard.transport.base import Direction, Transfer, TransferState

# Of one load, in flight at a time: loads that somebody waits for begin behind it.
ROUND_BYTES = 32 << 20
MAX_IN_FLIGHT = 2
# Resumed when something happens.
UNTIL_TOLD = math.inf
NO_LAYER = 1 << 30
# Of all groups together: what the longest statement lists.
MAX_PAGES = MAX_STATEMENT_BYTES // 8


@dataclass(slots=True)
class _Life:
    """The prefill under one lease: what is known of it, and what was read of it, which counts for nothing under another one.

    `tables`: the pages that it has of each group. `held_by`: the ranks that have been seen to hold the lease, and `progress` of those that hold
    it still; `is_over`: one of them does no more, or the listener has named another lease. `final_s`: when all that is loaded was computed.
    """

    lease: Lease
    tables: dict[str, PageTable]
    is_complete: bool
    held_by: set[int] = field(default_factory=set)
    progress: Mapping[int, Progress] = field(default_factory=dict)
    is_over: bool = False
    moved: TransferStats = TransferStats()  # noqa: RUF009 (frozen)
    final_s: float | None = None

    def extend(self, tables: Mapping[str, PageTable], *, is_complete: bool) -> None:
        """Append pages. Those that do not follow on what is known change nothing; the listener will say them again."""
        for name, more in tables.items():
            known = self.tables.get(name)
            if known is None or not len(known.pages):
                self.tables[name] = more
            elif more.first_page == known.first_page + len(known.pages):
                pages = np.concatenate([known.pages, more.pages])
                self.tables[name] = PageTable(pages, known.num_tokens, known.first_page)
        self.is_complete |= is_complete

    @property
    def num_pages(self) -> int:
        return sum(len(table.pages) for table in self.tables.values())

    def on_progress(self, found: Mapping[int, Progress | None]) -> None:
        """What the words of the lease say, by source rank; None where its lease word is another."""
        self.progress = {rank: progress for rank, progress in found.items() if progress is not None}
        self.is_over |= bool(self.held_by - self.progress.keys())
        self.held_by.update(self.progress)

    def count(self, plan: ReadPlan) -> None:
        """A plan is read."""
        moved = TransferStats.by(plan)
        self.moved += moved if self.final_s is not None else replace(moved, num_early_bytes=moved.num_bytes)

    def known(self, transfer: str) -> TransferQuestion:
        """What the listener need not say again."""
        return TransferQuestion(
            transfer, self.lease.word, {name: len(table.pages) for name, table in self.tables.items()}
        )


class _Cursors:
    """How far each of a load's parts was read, in tokens, and how far it can be. Arrays of shape (parts,)."""

    def __init__(self, parts: Sequence[Part], intervals: Mapping[str, Sequence[Tokens]], layout: EngineLayout) -> None:
        self.parts = parts
        wanted = [[intervals[group] for _, group in part.groups if intervals.get(group)] for part in parts]
        self._align = np.array([part.align_tokens for part in parts], dtype=np.int64)
        self._first = np.array([min(held[0][0] for held in found) for found in wanted], dtype=np.int64)
        self._first -= self._first % self._align
        self.end = np.array([max(held[-1][1] for held in found) for found in wanted], dtype=np.int64)
        self._layer = np.array([NO_LAYER if part.layer is None else part.layer for part in parts], dtype=np.int64)
        self._ranks = sorted({part.src_rank for part in parts})
        self._rank = np.array([self._ranks.index(part.src_rank) for part in parts], dtype=np.int64)
        sources = [frozenset(group for group, _ in part.groups) for part in parts]
        self._sources = list(dict.fromkeys(sources))
        self._source = np.array([self._sources.index(found) for found in sources], dtype=np.int64)
        self._page_tokens = {
            name: layout.group_by_name[name].tokens_per_page or 1 for found in self._sources for name in found
        }
        self.read = self._first.copy()

    def forget(self) -> None:
        """Nothing was read."""
        self.read = self._first.copy()

    def final(self, progress: Mapping[int, Progress]) -> Int64s:
        """Tokens of each part that are final."""
        nothing = Progress(0, 0, 0)
        of_ranks = [progress.get(rank, nothing) for rank in self._ranks]
        num_tokens, step_tokens, num_layers = (
            np.array([getattr(one, name) for one in of_ranks], dtype=np.int64)[self._rank]
            for name in ("num_tokens", "step_tokens", "num_layers")
        )
        return np.where(self._layer < num_layers, step_tokens, num_tokens)

    def readable(self, life: _Life) -> Int64s:
        """Up to which token each part can be read: what is final and has known pages, to an edge of pages or the end.

        Everything is final once the prefill is complete. Then words may say nothing: the lease may have ended before they were read once.
        """
        listed = np.array([self._listed(found, life.tables) for found in self._sources], dtype=np.int64)
        final = self.end if life.is_complete else self.final(life.progress)
        final = np.minimum(final, listed[self._source] if len(listed) else 0)
        return np.where(final >= self.end, self.end, final - final % self._align)

    def _listed(self, groups: Iterable[str], tables: Mapping[str, PageTable]) -> int:
        """The tokens whose pages are known in all of the groups."""
        found = [(tables.get(name), self._page_tokens[name]) for name in groups]
        return min(0 if table is None else (table.first_page + len(table.pages)) * size for table, size in found)


@dataclass(slots=True, eq=False)
class EarlyJob(Job):
    """See the module. `may_read`: whether nobody waits for another load of this rank. `on_new_lease`: called with the load as it was and as it
    is, when its prefill has begun again under another lease.
    """

    is_awaited = False
    overdue = "nothing was read, and its prefill has not gone on, for"

    may_read: Callable[[], bool] = lambda: True
    on_new_lease: Callable[[Load, Load], None] = lambda old, new: None
    _life: _Life = field(init=False)
    _next_life: _Life | None = None
    _has_rest: bool = False

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        self._life = _Life(self.load.lease, dict(self.load.transfer.src_tables), is_complete=False)

    @property
    def known_load(self) -> Load:
        """With the pages that are known by now."""
        return replace(self.load, transfer=replace(self.load.transfer, src_tables=self._life.tables))

    @property
    def known(self) -> TransferQuestion:
        """What the source's listener is to be asked for."""
        return (self._next_life or self._life).known(self.load.transfer_id)

    @property
    def follows(self) -> bool:
        """Whether there is anything to ask the listener."""
        is_known = self._life.is_complete and not self._life.is_over
        return self.peer is not None and self.outcome is None and not (self.is_stopped or is_known)

    def on_progress(self, found: Mapping[int, Progress | None], now_s: float) -> None:
        """What the words of the lease say, by source rank; None where its lease word is another.

        A source rank learns of a lease a little later than the listener. One that has had it and has it no more has ended it.
        """
        self._life.on_progress(found)
        self._note_news(now_s)

    def on_answer(self, answer: Answer | HandshakeError, now_s: float) -> None:
        """What the listener says. A listener that cannot be asked is asked again, until the load's time is over."""
        if isinstance(answer, HandshakeError) or self.peer is None:
            return
        if answer.state == "ended":
            self.stop(Failure("prefill", f"its prefill has ended: {answer.text}"), now_s)
        elif answer.state == "unheard":
            text = "its source does not know the request any more: was that engine put to sleep, or started again?"
            self.stop(Failure("prefill", text), now_s)
        self._note_news(now_s)
        if answer.statement is None:
            return
        try:
            self._take(self.peer, answer.statement)
        except KvReshardError as error:
            self.stop(Failure("seal", str(error)), now_s)
        except ValueError as error:
            self.stop(Failure("prefill", str(error)), now_s)

    def _note_news(self, now_s: float) -> None:
        """Wait for the prefill as long as it is there, but for no read: while one is under way, its end is the only news."""
        if self.is_settled:
            self.since_s = now_s

    def _take(self, peer: Peer, statement: Statement) -> None:
        """Raises SealError for what was not sealed, ValueError for what is another prefill."""
        tables = statement.tables()
        statement.check(peer.engine_metadata.key, self.load.remote.name, tables)
        known = {table.num_tokens for table in self.load.transfer.src_tables.values()} or {statement.num_tokens}
        has_other_end = known != {statement.num_tokens}
        stranger = next((name for name in tables if name not in peer.layout.group_by_name), None)
        if stranger is not None:
            raise ValueError(f"its source lists pages of group '{plain(stranger, 80)}', which its layout does not have")
        if statement.request != self.load.lease.request or (has_other_end and self._has_rest):
            raise ValueError(
                f"its transfer_id was that of request '{self.load.lease.request}' of {min(known)} tokens and is now that of request "
                f"'{statement.request}' of {statement.num_tokens}; give each prefill an id of its own, and ask for one token only"
            )
        if has_other_end:  # it has gone on beyond its prompt, which is all that is read here
            tables = {name: PageTable(table.pages, min(known), table.first_page) for name, table in tables.items()}
        for life in (self._life, self._next_life):
            if life is not None and life.lease.word == statement.word:
                life.extend(tables, is_complete=statement.is_complete)
                if life.num_pages > MAX_PAGES:
                    raise ValueError(
                        f"its source lists {life.num_pages} pages of it, and at most {MAX_PAGES} are followed; send longer prompts without "
                        "a transfer_id"
                    )
                return
        self._next_life, self._life.is_over = _Life(statement.lease, tables, statement.is_complete), True

    def _read(self, peer: Peer) -> Steps:
        self.state = "waiting for its prefill to go on"
        self._note("met", f"follows ranks {', '.join(map(str, peer.route.src_ranks)) or 'none'}")
        self._check_seal(peer)
        intervals = self.load.transfer.intervals
        wanted = [part for part in peer.parts.parts if part.is_wanted(self.load.transfer)]
        cursors = _Cursors(wanted, intervals, peer.layout)
        self._has_rest = any(intervals.get(transfer.dst_group.name) for transfer in peer.parts.rest.transfers)
        yield from self._read_early(peer, cursors)
        return (yield from self._read_rest(peer))

    def _read_early(self, peer: Peer, cursors: _Cursors) -> Generator[Transfer | float | None, None, None]:
        """Read the parts as they become final, until all of them are read and the prefill is complete."""
        in_flight: deque[Transfer] = deque()
        busy_since_s: float | None = None
        while True:
            while in_flight and in_flight[0].state is not TransferState.PENDING:
                error = in_flight.popleft().error
                if error is not None:
                    raise error
                self.since_s = peer.mover.clock()
            if busy_since_s is not None and not in_flight:
                until_s = peer.mover.clock() if self._life.final_s is None else self._life.final_s
                self._life.moved += TransferStats(early_s=max(0.0, until_s - busy_since_s))
                busy_since_s = None
            if self._life.is_over:
                while in_flight:
                    yield from settled(in_flight.popleft())
                yield from self._begin_again(cursors)
            if self._life.final_s is None and self._is_final(cursors):
                self._life.final_s = peer.mover.clock()
            may_read = len(in_flight) < MAX_IN_FLIGHT and (self._life.final_s is not None or self.may_read())
            wanted = self._next_round(cursors) if may_read else []
            if wanted:
                busy_since_s = peer.mover.clock() if busy_since_s is None else busy_since_s
                in_flight.extend((yield from self._read_round(peer, cursors, wanted)))
            elif not in_flight and self._is_done(cursors):
                return
            else:
                yield UNTIL_TOLD

    def _next_round(self, cursors: _Cursors) -> list[tuple[int, int, int]]:
        """(part, first token, token behind the last) of what can be read next, of some megabytes."""
        readable = cursors.readable(self._life)
        found, left_bytes = list[tuple[int, int, int]](), float(ROUND_BYTES)
        for number in np.flatnonzero(readable > cursors.read).tolist():
            part, start = cursors.parts[number], int(cursors.read[number])
            most = max(1, int(left_bytes / max(1.0, part.token_bytes)) // part.align_tokens) * part.align_tokens
            stop = min(int(readable[number]), start + most)
            found.append((number, start, stop))
            left_bytes -= (stop - start) * part.token_bytes
            if left_bytes <= 0:
                break
        return found

    def _is_final(self, cursors: _Cursors) -> bool:
        """Whether the prefill has computed all that is loaded, as far as this rank knows."""
        is_final = len(cursors.parts) > 0 and bool((cursors.final(self._life.progress) >= cursors.end).all())
        return is_final or self._life.is_complete

    def _is_done(self, cursors: _Cursors) -> bool:
        return self._life.is_complete and bool((cursors.read >= cursors.end).all())

    def _read_round(
        self, peer: Peer, cursors: _Cursors, wanted: Sequence[tuple[int, int, int]]
    ) -> Generator[Transfer | float | None, None, list[Transfer]]:
        """Post a round; returns the transfers that are under way. What goes through the staging buffer has settled."""
        direct: list[Copies] = []
        together: dict[Tokens, list[Part]] = {}
        for number, start, stop in wanted:
            together.setdefault((start, stop), []).append(cursors.parts[number])
        for interval, parts in together.items():
            for route in peer.parts.routes(parts):
                plan = self._plan(peer, route, self._clipped(interval))
                direct += plan.direct
                self._life.count(plan)
                yield from run_batches(peer.mover, plan.batches, self._note_posted, lambda: None)
        posted: list[Transfer] = []
        for copies in gathered(direct):
            posted.append(peer.mover.post(Direction.READ, copies))
            self._note_posted(posted[-1])
        for number, _, stop in wanted:
            cursors.read[number] = stop
        return posted

    def _plan(self, peer: Peer, route: Route, request: Request) -> ReadPlan:
        """What is read for a request. Its batches have the staging buffer; where that is taken, everything is read directly."""
        staging = peer.mover.staging
        plan = plan_reads(route, request, staging.half_bytes if staging else 0)
        return plan if not plan.batches or take_buffer(peer.mover) else plan_reads(route, request)

    def _clipped(self, tokens: Tokens) -> Request:
        """The request for some tokens, with the pages that are known."""
        low, high = tokens
        transfer = self.load.transfer
        intervals = {
            group: [(max(low, start), min(high, stop)) for start, stop in held if max(low, start) < min(high, stop)]
            for group, held in transfer.intervals.items()
        }
        return Request(self._life.tables, transfer.dst_tables, intervals, {})

    def _read_rest(self, peer: Peer) -> Steps:
        """Read what is read at the end, zero, and read the lease words."""
        clock, note = peer.mover.clock, self._note
        self.state = "reading"
        self.since_s = clock()
        started_s = self._life.final_s = self.since_s if self._life.final_s is None else self._life.final_s
        self.load = self.known_load
        whole = self.load.transfer
        check_request(peer.route, whole)
        rest = yield from pull_steps(
            peer.mover, peer.parts.rest, whole, self.dst, None, self._note_posted, note, peer.route
        )
        note("settled", "reading lease words")
        proof = yield from self._find_proof(peer)
        error = yield from check_words(peer.mover, proof, peer.route.src_ranks, self._note_posted)
        if error is not None:
            raise error
        moved = replace(self._life.moved + rest, total_s=clock() - started_s)
        early = f"{moved.num_bytes} bytes, {moved.num_early_bytes} of them early"
        note("read", f"{early}; the lease held on every rank that was read")
        return moved

    def _begin_again(self, cursors: _Cursors) -> Generator[Transfer | float | None, None, None]:
        """Everything has settled: forget what was read, and wait for the word under which the prefill goes on."""
        self.state = "waiting for its prefill to go on"
        self._note("begun again", "its prefill has lost its pages")
        while self._next_life is None:
            if self._life.is_complete:  # then there is no other life, whatever the listener still shows
                raise StaleLease(
                    "the source no longer holds the lease of this request, whose prefill has ended: its pages may have been reused while they "
                    "were read; compute the prompt again, or give leases more time"
                )
            yield UNTIL_TOLD
        self._life, self._next_life = self._next_life, None
        former, self.load = self.load, replace(self.load, lease=self._life.lease)
        self.on_new_lease(former, self.load)
        cursors.forget()
