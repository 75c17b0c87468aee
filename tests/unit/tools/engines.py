"""Small engines with a request that has arrived, for tests of digests: what the source holds, and what the destination got."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from tests.pairs.apply import compile_all, random_memory
from tests.pairs.random_pairs import Pair
from tests.unit.tools import slow_digest
from tests.unit.tools.slow_digest import Cell

from kvreshard.kinds import Attention, Kind, Mamba2, Style
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.plan import RankTransfer
from kvreshard.testing.oracle import oracle_transfer, write_values
from kvreshard.tools.cells import Side, of_transfer
from kvreshard.tools.digest import Digest, Part, digest_cells, digest_transfers
from kvreshard.transport.local import HostMemory, LocalMemory

NUM_TOKENS = 45
INTERVALS: dict[str, list[Tokens]] = {"attention": [(3, NUM_TOKENS)], "state": [(0, NUM_TOKENS)]}
ATTENTION = Attention(4, 16, "bfloat16")
STATE = Mamba2(4, 3, 2, 5, 4, "bfloat16", "float32")


class ArrayBytes(HostMemory):
    """Arrays that stand for memory at made-up addresses, of any device: address of the first byte -> shape (size_bytes,)."""

    def __init__(self, arrays: Mapping[int, np.ndarray]) -> None:
        self._arrays = arrays

    def reaches(self, device: str) -> bool:
        return True

    def read(self, low: int, high: int) -> np.ndarray:
        (found,) = (array[low - at : high - at] for at, array in self._arrays.items() if at <= low < at + len(array))
        assert len(found) == high - low
        return found


@dataclass(frozen=True)
class Arrived:
    """A request after its transfer: both layouts, both memories, all transfers."""

    src: EngineLayout
    dst: EngineLayout
    request: Request
    src_memory: dict[tuple[int, str], np.ndarray]
    dst_memory: dict[tuple[int, str], np.ndarray]
    transfers: tuple[RankTransfer, ...]

    def memory_of(self, side: Side) -> dict[int, LocalMemory]:
        """Readers of each rank's memory: every rank is a process of its own, and addresses may repeat between ranks."""
        layout, memory = (self.src, self.src_memory) if side == "src" else (self.dst, self.dst_memory)
        return {
            rank.rank: ArrayBytes({region.address: memory[rank.rank, region.name] for region in rank.regions})
            for rank in layout.ranks
        }

    def digests(self, side: Side, key: bytes, fields: list[str] | None = None) -> dict[Part, Digest]:
        found: dict[Part, Digest] = {}
        for rank, memory in self.memory_of(side).items():
            transfers = [
                transfer
                for transfer in self.transfers
                if (transfer.src_rank if side == "src" else transfer.dst_rank) == rank
            ]
            found |= digest_transfers(transfers, side, self.request, memory, key, fields)
        return found

    def parts(
        self, side: Side, key: bytes, cut: Callable[[RankTransfer], Iterable[tuple[Tokens, ...]]]
    ) -> dict[Part, Digest]:
        """As `digests`, of the token ranges that `cut` makes of each transfer's; nothing where it makes none."""
        found: dict[Part, Digest] = {}
        tables = self.request.src_tables if side == "src" else self.request.dst_tables
        memory = self.memory_of(side)
        for transfer in self.transfers:
            cells, box = of_transfer(transfer, side), ", ".join(f"{a.name} {a.chosen}" for a in transfer.axes)
            for tokens, field in product(cut(transfer), transfer.fields):
                part, own = Part(field, transfer.src_rank, transfer.dst_rank, box, tokens), cells.only([field])
                rank = transfer.src_rank if side == "src" else transfer.dst_rank
                found[part] = digest_cells(own, tables, {own.group.name: tokens}, memory[rank], key)
        return found

    def of_rank(self, side: Side, field: str, dst_rank: int, key: bytes) -> Digest:
        """What a destination rank gets of a field, as one digest, from either side's memory."""
        digests = self.digests(side, key, [field])
        return sum((found for part, found in digests.items() if part.dst_rank == dst_rank), Digest(0, 0))

    def group_of(self, side: Side, field: str) -> str:
        layout = self.src if side == "src" else self.dst
        return next(shard.geometry.group for _, shard in slow_digest.shards_of(layout, field))

    def fields(self) -> list[str]:
        return [field.name for field in self.dst.fields if field.name in self.src.field_by_name]

    def intervals(self, field: str) -> list[Tokens]:
        return list(self.request.intervals[self.group_of("dst", field)])

    def cells(self, field: str, rank: int | None = None) -> dict[Cell, bytes]:
        """The cells of the destination, or of one rank of it."""
        ranks = [one for one in self.dst.ranks if rank in (None, one.rank)]
        layout = replace(self.dst, ranks=tuple(ranks))
        return slow_digest.read_cells(layout, field, self.dst_memory, self._table("dst", field), self.intervals(field))

    def corrupt(self, field: str, cells: dict[Cell, bytes]) -> None:
        """Overwrites cells of the destination, on every rank that holds them."""
        slow_digest.write_cells(
            self.dst, field, self.dst_memory, self._table("dst", field), self.intervals(field), cells
        )

    def _table(self, side: Side, field: str) -> PageTable:
        tables = self.request.src_tables if side == "src" else self.request.dst_tables
        return tables[self.group_of(side, field)]


def arrive(src: EngineLayout, dst: EngineLayout, request: Request, seed: int) -> Arrived:
    rng = np.random.default_rng(seed)
    src_memory, dst_memory = random_memory(src, rng), random_memory(dst, rng)
    write_values(src, dst, src_memory, request, seed)
    after = oracle_transfer(src, dst, src_memory, dst_memory, request)
    transfers = tuple(transfer for route in compile_all(src, dst) for transfer in route.transfers)
    return Arrived(src, dst, request, src_memory, after, transfers)


def arrive_pair(pair: Pair) -> Arrived:
    return arrive(pair.src, pair.dst, pair.request, pair.seed)


@dataclass(frozen=True)
class Engine:
    """What a test engine chooses."""

    tp: int = 1
    order: str = "NHD"
    page: int = 16
    interior: str = "cell"
    dcp: int = 1
    stages: int = 1


def build(name: str, engine: Engine, attention: Kind = ATTENTION, state: Kind = STATE) -> EngineLayout:
    layers = [
        Layer(f"layers.{i}", kind, i % engine.stages) for i, kind in enumerate([attention, attention, state, state])
    ]
    groups = [
        PagedGroup("attention", ("layers.0", "layers.1"), engine.page),
        PagedGroup("state", ("layers.2", "layers.3"), 1),
    ]
    grid = Grid(engine.tp, engine.stages, engine.dcp)
    return assemble(name, layers, groups, grid, order=engine.order, num_pages=32, style=Style(interior=engine.interior))


def tables(layout: EngineLayout, rng: np.random.Generator) -> dict[str, PageTable]:
    pages = rng.permutation(32)
    size = layout.group_by_name["attention"].tokens_per_page or 1
    needed = -(-NUM_TOKENS // size)
    return {
        "attention": PageTable(pages[:needed], NUM_TOKENS),
        "state": PageTable(pages[needed : needed + 1], NUM_TOKENS),
    }


def small(src: Engine, dst: Engine, seed: int) -> Arrived:
    """Two layers of attention and two of state, with 42 tokens moved."""
    rng = np.random.default_rng(seed)
    layouts = build("prefill", src), build("decode", dst)
    request = Request(tables(layouts[0], rng), tables(layouts[1], rng), INTERVALS, {})
    return arrive(*layouts, request, seed)
