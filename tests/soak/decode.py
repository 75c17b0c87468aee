"""How does a decode engine of a soak load a request, and is what it would serve right?

A request ends once, as `loaded` or by the kind of its failure; what was loaded has been compared byte for byte before its pages
are given back. Pages of a quarantined load stay until its reads have come to rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.soak.engine import Engine
from tests.soak.prefill import Params
from tests.soak.tables import (
    aligned_prefix,
    all_pages,
    allocate,
    kept_tokens,
    make_request,
    present_tokens,
)

from kvreshard.model.tables import PageTable
from kvreshard.session.commands import Cancel, Failure, Load, Release, Renew, Results


@dataclass(frozen=True)
class Ended:
    """`kind`: "loaded" or that of the failure. `seconds` from the order to load to the last rank's word.

    `early_bytes`: of an early load, those that were read before its prefill had computed everything.
    """

    request: str
    kind: str
    text: str
    seconds: float
    num_tokens: int
    prefix: int
    num_compared: int
    num_wrong: int
    is_quarantined: bool
    is_early: bool = False
    has_begun_again: bool = False
    early_bytes: int = 0


@dataclass
class _Loading:
    params: Params
    tables: Mapping[str, PageTable]
    prefix: int
    ordered_s: float
    ends: dict[int, Failure | None] = field(default_factory=dict)
    unsettled: set[int] = field(default_factory=set)
    early_bytes: int = 0


class Loads:
    """The requests of one decode engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[str, _Loading] = {}
        self._quarantined: dict[str, _Loading] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_pages(self) -> int:
        """Pages of requests that have not ended, and of those in quarantine."""
        return sum(len(all_pages(load.tables)) for load in [*self._live.values(), *self._quarantined.values()])

    def begin(
        self, request: str, params: Params, prefix: int, is_watched: bool, ordered_s: float | None = None
    ) -> bool:
        """Order a load of all but a prefix that is here already; False while there are too few pages."""
        engine, num_tokens = self._engine, params.num_tokens
        tables = allocate(engine.layout, engine.pool, num_tokens)
        if tables is None:
            return False
        prefix = aligned_prefix(engine.layout, num_tokens, prefix)
        here = present_tokens(engine.layout, num_tokens, prefix)
        wanted = make_request(engine.layout, params.src_tables, tables, num_tokens, prefix)
        new = {page for pages in wanted.dst_new_pages.values() for page in pages.tolist()}
        engine.pool.clear(set(all_pages(tables)) - new)
        engine.content.write(engine.memory, tables, here, params.seed, num_tokens)
        self._live[request] = _Loading(params, tables, prefix, time.monotonic() if ordered_s is None else ordered_s)
        if is_watched:
            engine.submit(Renew(request, params.remote, params.lease))
        named = request, params.remote, params.lease
        engine.submit(Load(*named, wanted, params.seal, gives_back=True, transfer_id=params.transfer))
        return True

    def abort(self, request: str) -> None:
        """The client has gone."""
        if request in self._live:
            self._engine.submit(Cancel(request))

    def release(self, params: Params) -> None:
        """The client has gone before there were pages for it."""
        self._engine.submit(Release(params.remote, params.lease))

    def collect(self, results: Mapping[int, Results]) -> list[Ended]:
        """The requests that are over on every rank."""
        for rank, found in results.items():
            for request, moved in found.received.items():
                self._live[request].ends[rank] = None
                self._live[request].early_bytes += moved.num_early_bytes
            for request, failure in found.failed.items():
                self._live[request].ends[rank] = failure
                if failure.is_quarantined:
                    self._live[request].unsettled.add(rank)
            for request in found.settled:
                for loads in (self._live, self._quarantined):
                    if request in loads:
                        loads[request].unsettled.discard(rank)
        over = [request for request, load in self._live.items() if len(load.ends) == len(self._engine.ranks)]
        ended = [self._end(request, self._live.pop(request)) for request in over]
        for request in [name for name, load in self._quarantined.items() if not load.unsettled]:
            self._engine.pool.give(all_pages(self._quarantined.pop(request).tables))
        return ended

    def _end(self, request: str, load: _Loading) -> Ended:
        seconds, engine = time.monotonic() - load.ordered_s, self._engine
        failures = [failure for failure in load.ends.values() if failure is not None]
        params, num_compared, num_wrong = load.params, 0, 0
        if not failures:
            kept = kept_tokens(engine.layout, params.num_tokens)
            num_wrong, num_compared = engine.content.count_wrong(
                engine.memory, load.tables, kept, params.seed, params.num_tokens
            )
        is_quarantined = any(failure.is_quarantined for failure in failures)
        if is_quarantined:
            self._quarantined[request] = load
        else:
            engine.pool.give(all_pages(load.tables))
        kind, text = ("loaded", "") if not failures else (failures[0].kind, failures[0].text)
        has_begun_again = request in engine.begun_again
        engine.begun_again.discard(request)
        return Ended(
            request, kind, text, seconds, params.num_tokens, load.prefix, num_compared, num_wrong, is_quarantined,
            bool(params.transfer), has_begun_again, load.early_bytes,
        )  # fmt: skip
