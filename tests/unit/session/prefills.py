"""A source that computes a prompt chunk by chunk and layer by layer, each rank at its own pace, and what its listener says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from tests.pairs.small import GROUP
from tests.unit.session.world import KEY, REMOTE, Side, World

from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace
from kvreshard.model.rank import Rank
from kvreshard.model.tables import PageTable, Request
from kvreshard.session.commands import Acquire, Load, Publish, Revoke
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address, HandshakeError, TransferQuestion
from kvreshard.session.lease import Lease
from kvreshard.session.progress import StepProgress
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.seal import Seal
from kvreshard.session.statement import Answer, Statement, read_reply
from kvreshard.testing.oracle import apply_request, write_values

TRANSFER = "xfer-1"
SLOTS = itertools.count()


class LocalFollower(Follower):
    """Asks a rendezvous without a network. `loses`: whether the next answer is lost."""

    def __init__(self, rendezvous: Rendezvous, loses: list[bool]) -> None:
        self._rendezvous, self._loses = rendezvous, loses
        self._known: dict[str, TransferQuestion] = {}

    def __len__(self) -> int:
        return len(self._known)

    def follow(self, name: str, address: Address, known: TransferQuestion) -> None:
        self._known[name] = known

    def drop(self, name: str) -> None:
        self._known.pop(name, None)

    def take(self) -> list[tuple[str, Answer | HandshakeError]]:
        found: list[tuple[str, Answer | HandshakeError]] = []
        for name, known in list(self._known.items()):
            if self._loses and self._loses.pop():
                found.append((name, HandshakeError("lost")))
                continue
            reply = self._rendezvous.answer([known], is_last=False)
            if reply is not None:
                found.append((name, read_reply(reply)[0]))
        for name, _ in found:
            self.drop(name)
        return found

    def ask(self) -> float:
        return 1.0

    def close(self) -> None:
        """Nothing runs."""


def of_layer(layout: EngineLayout, layer: int) -> EngineLayout:
    """The engine with one of its layers."""
    names = {one.name for one in layout.fields if one.name.startswith(f"layers.{layer}.")}
    ranks = tuple(
        Rank.of(
            rank.rank,
            rank.place,
            rank.regions,
            rank.slabs,
            tuple(shard for shard in rank.shards if shard.field in names),
        )
        for rank in layout.ranks
    )
    return replace(layout, fields=tuple(one for one in layout.fields if one.name in names), ranks=ranks)


def layers_of(layout: EngineLayout, rank: int) -> list[int]:
    """The layers that a rank has, in order."""
    return sorted({int(shard.field.split(".")[1]) for shard in layout.rank_by_number[rank].shards})


@dataclass
class Prefill:
    """One prompt of `num_tokens` on the source of `world`. `pages`: where it lies. `lies`: progress is told before the bytes are there."""

    world: World
    rendezvous: Rendezvous
    num_tokens: int
    rng: Random
    lies: bool = False
    pages: Sequence[int] = ()
    lease: Lease | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    truth: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    steps: dict[int, list[tuple[tuple[int, int], int | None]]] = field(default_factory=dict)
    num_listed: int = 0
    num_lives: int = 0

    @property
    def side(self) -> Side:
        return self.world.src

    @property
    def is_computed(self) -> bool:
        return not any(self.steps.values())

    def begin(self, *, is_shown_first: bool = False) -> None:
        """Schedule it, under a new lease, on pages and in chunks of its own."""
        rng = self.rng
        self.num_lives += 1
        self.lease = Lease("r", rng.randrange(64), rng.getrandbits(63) | 1)
        num_pages = -(-self.num_tokens // 4)
        self.pages = rng.sample(range(1, 24), num_pages)
        self.scribble(self.pages)
        # What a token's cells hold is the same in every life: ranks of a reader may read from different ones.
        self.truth = {place: np.zeros(held.size, dtype=np.uint8) for place, held in self.side.memory.items()}
        table = {GROUP: PageTable(list(self.pages), self.num_tokens)}
        wanted = Request(table, table, {GROUP: [(0, self.num_tokens)]}, {})
        write_values(self.side.layout, self.side.layout, self.truth, wanted, self.num_tokens)
        cuts = sorted(rng.sample(range(1, self.num_tokens), min(rng.randrange(4), self.num_tokens - 1)))
        self.chunks = list(itertools.pairwise([0, *cuts, self.num_tokens]))
        self.steps = {
            rank: [
                (chunk, layer)
                for chunk in self.chunks
                for layer in (-1, *(layers_of(self.side.layout, rank) if rng.random() < 0.8 else ()), None)
            ]
            for rank in self.side.endpoints
        }
        self.num_listed = 0
        self.tell(Acquire(self.lease))
        shown = Statement(
            REMOTE.engine, REMOTE.instance_id, "r", self.lease.slot, self.lease.word, self.num_tokens, {}, False, b"{}"
        )
        assert self.rendezvous.begin(TRANSFER, "r", shown)
        self.list_pages(self.chunks[0][1])

    def list_pages(self, num_tokens: int) -> None:
        """The scheduler has allocated pages for so many tokens."""
        assert self.lease is not None
        stop = -(-num_tokens // 4)
        self.rendezvous.extend(TRANSFER, self.lease.word, {GROUP: self.pages[self.num_listed : stop]})
        self.num_listed = max(self.num_listed, stop)

    def go_on(self, rank: int) -> bool:
        """A rank computes its next layer, or ends its step; whether there was anything to do."""
        if not self.steps.get(rank):
            return False
        assert self.lease is not None
        ((start, stop), layer), board = self.steps[rank].pop(0), self.side.endpoints[rank].board
        if layer == -1:
            self.list_pages(stop)
            board.begin([StepProgress(self.lease.slot, self.lease.word, start, stop)])
            return True
        done = layers_of(self.side.layout, rank)
        written = done if layer is None else [layer]
        if not self.lies:
            self._write(rank, start, stop, written)
        if layer is None:
            board.end()
        else:
            board.layer(done.index(layer) + 1)
        if self.lies:
            self.late = rank, start, stop, written
        return True

    def write_late(self) -> None:
        """The bytes of what was told before."""
        if hasattr(self, "late"):
            self._write(*self.late)
            del self.late

    def _write(self, rank: int, start: int, stop: int, layers: Sequence[int]) -> None:
        for layer in layers:
            layout = of_layer(self.side.layout, layer)
            table = PageTable(list(self.pages), self.num_tokens)
            wanted = Request({GROUP: table}, {GROUP: table}, {GROUP: [(start, stop)]}, {})
            after = {place: held.copy() for place, held in self.side.memory.items()}
            apply_request(layout, layout, self.truth, after, wanted)
            for place, held in after.items():
                if place[0] == rank:
                    self.side.memory[place][:] = held

    def publish(self, ttl_s: float = 30.0) -> None:
        """It has ended well."""
        assert self.lease is not None
        tables = {GROUP: PageTable(list(self.pages), self.num_tokens)}
        named = REMOTE.engine, REMOTE.instance_id, "r", self.lease.slot, self.lease.word
        self.rendezvous.complete(TRANSFER, "r", Statement(*named, self.num_tokens, {}, True, b"{}"), tables)
        self.tell(Publish("r", ttl_s, tables))

    def take_back(self) -> None:
        """It loses its pages, which are used for something else at once."""
        assert self.lease is not None
        self.tell(Revoke(self.lease))
        self.scribble(self.pages)
        self.steps, self.lease = {}, None

    def scribble(self, pages: Sequence[int]) -> None:
        for rank in self.side.layout.ranks:
            for slab in rank.slabs:
                for page in pages:
                    start = slab.offset_bytes + page * slab.page_stride_bytes
                    held = self.side.memory[rank.rank, slab.region][start : start + slab.page_bytes]
                    held[:] = np.frombuffer(self.rng.randbytes(held.size), np.uint8)

    def tell(self, command: object) -> None:
        for endpoint in self.side.endpoints.values():
            endpoint.submit(command)

    def order(self, name: str = "d", dst_pages: Sequence[int] = ()) -> Load:
        """A load that follows it, as its reader's scheduler commands one that has asked the listener once."""
        reply = self.rendezvous.answer([TransferQuestion(TRANSFER)], is_last=True)
        assert reply is not None
        statement = read_reply(reply)[0].statement
        assert statement is not None
        pages = list(dst_pages) or list(range(2, 2 + -(-self.num_tokens // 6)))
        wanted = Request(
            statement.tables(),
            {GROUP: PageTable(pages, self.num_tokens)},
            {GROUP: [(0, self.num_tokens)]},
            {GROUP: np.array(pages, dtype=np.int64)},
        )
        seal = Seal(statement.sealed_details, statement.code)
        load = Load(name, REMOTE, statement.lease, wanted, seal, gives_back=True, transfer_id=TRANSFER)
        for endpoint in self.world.dst.endpoints.values():
            endpoint.submit(load)
        return load

    def expected(self, load: Load) -> dict[tuple[int, str], np.ndarray]:
        """The destination's memory after the load of what is computed now."""
        tables = {GROUP: PageTable(list(self.pages), self.num_tokens)}
        wanted = replace(load.transfer, src_tables=tables)
        after = {place: held.copy() for place, held in self.world.dst.memory.items()}
        apply_request(self.side.layout, self.world.dst.layout, self.truth, after, wanted)
        return after


def rendezvous() -> Rendezvous:
    made = Rendezvous(KEY)
    assert made.register(TRANSFER, "r")
    return made


def ranks(side: Side) -> Iterator[int]:
    yield from side.endpoints
