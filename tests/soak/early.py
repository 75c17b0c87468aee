"""How does a prefill engine of a soak compute what readers follow: by chunks and layers, each rank at its own pace?

A step computes one chunk of every early request that has pages. Each rank goes through its layers: bytes first, then the word that they are
there. Between any two of these a request may be preempted or given up: its lease is revoked, its pages are overwritten at once. A preempted
one begins again under another word. What a request's cells hold is the same each time, since two ranks of a reader may read it at
different times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.soak.early_fields import layer_of
from tests.soak.engine import Engine
from tests.soak.prefill import Prefills
from tests.soak.tables import all_pages, kept_tokens

from kvreshard.model.tables import PageTable
from kvreshard.session.engine_metadata import NOT_TOLD
from kvreshard.session.lease import Lease
from kvreshard.session.progress import StepProgress
from kvreshard.session.statement import Statement

# Chunks of a prefill, about; layers and ends of steps per turn.
CHUNKS, UNITS_PER_TURN = 4, 2
# Of each turn: that one that is to be preempted, or given up, is so now.
DISTURB_SHARE = 0.06
AWAY_S = 0.060
# Some go on beyond their prompt before they end, and may be preempted then.
GOES_ON_SHARE, GOES_ON_S = 0.3, 0.040
# An engine that has no pages for so long, or is stopped meanwhile, gives a prefill up.
PREFILL_S = 5.0
# An engine that rests hears with its next step only that a lease has ended. Until then its listener shows the prefill.
FORGETS_S = (0.0, 0.0, 30.0)
GIVEN_UP, TOO_SLOW, FREED = "the client has gone", "it took too long", "its pages are free again"
REASONS = GIVEN_UP, TOO_SLOW, FREED


@dataclass(frozen=True)
class EarlyOrder:
    """`num_preempts`: how often it is preempted at most. `is_given_up`: it ends without pages, unless it is computed first."""

    request: str
    transfer: str
    num_tokens: int
    seed: int
    ttl_s: float
    num_preempts: int
    is_given_up: bool


@dataclass
class _Early:
    """`lease`, `tables`: while it has pages. `num_tokens`: computed, `num_listed`: pages of each group that the listener has."""

    order: EarlyOrder
    until_s: float
    not_before_s: float = 0.0
    num_preempts: int = 0
    lease: Lease | None = None
    tables: Mapping[str, PageTable] = field(default_factory=dict)
    num_tokens: int = 0
    num_listed: dict[str, int] = field(default_factory=dict)

    @property
    def is_computed(self) -> bool:
        return self.num_tokens == self.order.num_tokens


class EarlyPrefills:
    """The requests of one prefill engine that are followed. `turn` goes on with them."""

    def __init__(self, engine: Engine, prefills: Prefills) -> None:
        self._engine, self._prefills = engine, prefills
        self._computing: dict[str, _Early] = {}
        # Published; readers may still ask for them.
        self._ended: dict[str, str] = {}
        # Of these the pages are free again; the listener learns of it then.
        self._forgets: list[tuple[float, str, str]] = []
        # Of the step that is under way: lease and tokens of each request, and what each rank still has to do: a layer, or None for its end.
        self._step: dict[str, tuple[Lease, int, int]] = {}
        self._left: dict[int, deque[int | None]] = {}
        fields = engine.early_fields
        held = {rank.rank: {shard.field for shard in rank.shards} for rank in engine.layout.ranks}
        self._late_fields = {rank: names - fields.keys() for rank, names in held.items()}
        self._untold = {rank: {name for name in names if fields.get(name) == NOT_TOLD} for rank, names in held.items()}
        self._told: dict[int, dict[int, set[str]]] = {}
        for rank, names in held.items():
            told = sorted({layer for name, layer in fields.items() if name in names and layer != NOT_TOLD})
            self._told[rank] = {layer: {name for name in names if layer_of(name) == layer} for layer in told}
        self._groups = {
            shard.geometry.group for rank in engine.layout.ranks for shard in rank.shards if shard.field in fields
        }

    def __len__(self) -> int:
        return len(self._computing)

    @property
    def num_pages(self) -> int:
        """Pages of requests that are not published."""
        return sum(len(all_pages(early.tables)) for early in self._computing.values())

    def begin(self, order: EarlyOrder) -> None:
        """A request has come."""
        is_new = self._engine.rendezvous.register(order.transfer, order.request)
        assert is_new
        self._computing[order.request] = _Early(order, time.monotonic() + PREFILL_S)

    def turn(self, freed: Iterable[str]) -> None:
        """Compute a little. `freed`: published requests whose pages are free again."""
        now_s, rng = time.monotonic(), self._engine.rng
        for request in freed:
            if request in self._ended:
                self._forgets.append((now_s + rng.choice(FORGETS_S), request, self._ended.pop(request)))
        for due in [due for due in self._forgets if now_s >= due[0]]:
            self._forgets.remove(due)
            self._engine.rendezvous.end(due[2], due[1], FREED)
        for early in list(self._computing.values()):
            if now_s > early.until_s:
                self._give_up(early, TOO_SLOW)
            elif early.lease is not None and rng.random() < DISTURB_SHARE:
                self._disturb(early, now_s)
            elif early.lease is not None and early.is_computed and now_s >= early.not_before_s:
                self._publish(early, early.lease)
        for _ in range(UNITS_PER_TURN):
            if not self._left:
                self._begin_step(now_s)
            if self._left:
                self._compute(rng.choice(list(self._left)))
        self._engine.tell_readers()

    def _begin_step(self, now_s: float) -> None:
        computed = []
        self._step = {}
        for early in self._computing.values():
            if early.lease is None and now_s >= early.not_before_s:
                self._begin_life(early)
            if early.lease is not None and not early.is_computed:
                start, rng = early.num_tokens, self._engine.rng
                most = early.order.num_tokens - start
                stop = start + min(most, rng.randrange(1, max(2, 2 * early.order.num_tokens // CHUNKS)))
                self._list_pages(early, stop)
                computed.append(StepProgress(early.lease.slot, early.lease.word, start, stop))
                self._step[early.order.request] = early.lease, start, stop
        for rank, endpoint in self._engine.endpoints.items():
            endpoint.begin_step(computed)
            if not computed:
                continue
            # Now and then, as in a full CUDA graph, no layer tells its end.
            layers = self._told[rank] if self._engine.rng.random() < 0.8 else ()
            self._left[rank] = deque([*layers, None])

    def _begin_life(self, early: _Early) -> None:
        order = early.order
        taken = self._prefills.take(order.request, order.num_tokens)
        if taken is None:
            return
        early.tables, early.lease = taken
        early.num_listed = {}
        self._engine.rendezvous.begin(order.transfer, order.request, self._statement(early, early.lease, False))

    def _statement(self, early: _Early, lease: Lease, is_complete: bool) -> Statement:
        named = (*self._engine.remote.name, *lease)
        return Statement(*named, early.order.num_tokens, {}, is_complete, b"")

    def _list_pages(self, early: _Early, num_tokens: int) -> None:
        """The listener gets the pages of so many tokens."""
        assert early.lease is not None
        new = {}
        for name in sorted(self._groups):
            size, known = self._engine.layout.group_by_name[name].tokens_per_page or 1, early.num_listed.get(name, 0)
            early.num_listed[name] = -(-num_tokens // size)
            new[name] = early.tables[name].pages[known : early.num_listed[name]].tolist()
        self._engine.rendezvous.extend(early.order.transfer, early.lease.word, new)

    def _compute(self, rank: int) -> None:
        """The next layer of a rank, or the end of its step."""
        layer, told = self._left[rank].popleft(), self._told[rank]
        if layer is not None:
            self._write(rank, told[layer])
            self._engine.endpoints[rank].board.layer(list(told).index(layer) + 1)
            return
        self._write(rank, self._untold[rank].union(*told.values()))
        self._engine.endpoints[rank].board.end()
        del self._left[rank]
        if not self._left:
            self._end_step()

    def _write(self, rank: int, names: set[str]) -> None:
        """What the step computes of some fields, of requests that have kept their pages."""
        engine = self._engine
        for request, (lease, start, stop) in self._step.items():
            early = self._computing.get(request)
            if early is not None and early.lease == lease:
                tokens = dict.fromkeys(self._groups, (start, stop))
                order = early.order
                engine.content.write(
                    engine.memory, early.tables, tokens, order.seed, order.num_tokens, only=(rank, names)
                )

    def _end_step(self) -> None:
        for request, (lease, _, stop) in self._step.items():
            early = self._computing.get(request)
            if early is not None and early.lease == lease:
                early.num_tokens, rng = stop, self._engine.rng
                if early.is_computed and rng.random() < GOES_ON_SHARE:
                    early.not_before_s = time.monotonic() + GOES_ON_S * rng.random()
                elif early.is_computed:
                    self._publish(early, lease)

    def _publish(self, early: _Early, lease: Lease) -> None:
        """All is computed: write what is read at the end, and offer it."""
        engine, order, tables = self._engine, early.order, early.tables
        kept = kept_tokens(engine.layout, order.num_tokens)
        for rank, names in self._late_fields.items():
            engine.content.write(engine.memory, tables, kept, order.seed, order.num_tokens, only=(rank, names))
        engine.rendezvous.complete(order.transfer, order.request, self._statement(early, lease, True), tables)
        self._prefills.publish(lease, tables, order.ttl_s)
        del self._computing[order.request]
        self._ended[order.request] = order.transfer

    def _disturb(self, early: _Early, now_s: float) -> None:
        if early.num_preempts < early.order.num_preempts:
            early.num_preempts += 1
            self._take_back(early)
            early.not_before_s = now_s + self._engine.rng.choice((0.0, AWAY_S * self._engine.rng.random()))
        elif early.order.is_given_up:
            self._give_up(early, GIVEN_UP)

    def _take_back(self, early: _Early) -> None:
        """Its pages are overwritten when this returns."""
        if early.lease is not None:
            self._prefills.revoke(early.lease, early.tables)
            early.lease, early.tables, early.num_tokens = None, {}, 0

    def _give_up(self, early: _Early, text: str) -> None:
        self._take_back(early)
        del self._computing[early.order.request]
        self._engine.rendezvous.end(early.order.transfer, early.order.request, text)
