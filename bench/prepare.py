"""Our preparation of a request: the steps of `session.pull` before the first byte moves, up to NIXL's `transfer`.

Read the block tables from lists, as an engine hands them out, check, bind, choose direct or staged, check against the regions,
cut to slices, and make every one of NIXL's transfer requests (of staged transfers the reads). All of it on one thread, so that
processor time is only its own: the hop to the thread that posts, which in-tree does without, is not in it.

The thread that posts can rest meanwhile (`resting`). It polls, and where the measured thread never waits it hardly gets the interpreter: each
call of either side that lets go of the interpreter then wakes it up in vain, some 10 us each. Its polling is measured by itself ("idle rank").
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.arena import STAGING_BYTES, Arena
from bench.held import Held
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.plan.reads import plan_reads
from kvreshard.plan.route import Route
from kvreshard.session.mover import Staging, reads_into
from kvreshard.transport.base import Direction
from kvreshard.transport.nixl import NixlTransport
from kvreshard.vllm.page_list import page_array

# What the owner's budget grows to at some 20 ms a post on one host.
BUDGET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Listed:
    """A request as an engine hands it out: per side and group the page ids as a list, tokens and the first page."""

    sides: tuple[dict[str, tuple[list[int], int, int]], dict[str, tuple[list[int], int, int]]]
    intervals: Mapping[str, Sequence[Tokens]]

    @staticmethod
    def of(request: Request) -> Listed:
        """The same request."""
        src, dst = (
            {name: (table.pages.tolist(), table.num_tokens, table.first_page) for name, table in tables.items()}
            for tables in (request.src_tables, request.dst_tables)
        )
        return Listed((src, dst), request.intervals)

    def request(self) -> Request:
        """As arrays, made as the connector makes them."""
        src, dst = (
            {
                name: PageTable(page_array(pages), num_tokens, first)
                for name, (pages, num_tokens, first) in tables.items()
            }
            for tables in self.sides
        )
        return Request(src, dst, self.intervals, {})


class Prepared:
    """Our side of a preparation, over the arena's own transport; its agent is borrowed from the owner thread, which idles."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._transport: NixlTransport = arena.transport
        # The bench looks inside on purpose: there is no public way to prepare without posting.
        self._owner = self._transport._owner
        self._agent = self._owner._agent.agent  # type: ignore[attr-defined]  # what is watched
        self._held = Held(self._agent._agent)
        self._staging = Staging(arena.staging_address, STAGING_BYTES)
        self.num_reads = 0
        self.num_staged = 0

    def prepare(self, route: Route, listed: Listed) -> None:
        """Everything up to `transfer`."""
        request = listed.request()
        plan = plan_reads(route, request, STAGING_BYTES // 2)
        staged = [reads_into(self._staging.half(number), batch) for number, batch in enumerate(plan.batches)]
        self.num_reads, self.num_staged = 0, len(staged)
        self._agent._agent = self._held
        try:
            for copies in (*plan.direct, *staged):
                peer = f"source {copies.src_rank}"
                own_name, _ = self._transport._peer(peer)
                cursor = self._transport._cursor(peer, Direction.READ, copies)
                while not cursor.exhausted:
                    piece = cursor.take(BUDGET_BYTES)
                    self._agent.start(own_name, Direction.READ, piece)
                    self.num_reads += len(piece)
        finally:
            self._agent._agent = self._held.agent

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """The thread that posts does nothing meanwhile."""
        done = threading.Event()

        def rest() -> None:
            done.wait()

        self._owner._work.submit(rest)
        try:
            yield
        finally:
            done.set()

    def release(self) -> None:
        """Free the transfer requests."""
        for handle in self._held.handles:
            self._held.agent.release_xfer_handle(handle)
        self._held.handles.clear()

    def forget(self, peer: str) -> None:
        """Forget a peer, if it is known."""
        if peer in self._transport._peers:
            self._transport.remove_peer(peer)
