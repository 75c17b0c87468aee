"""Route: everything that one destination rank reads from one source engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvreshard.model.rank import Group
from kvreshard.plan.pairs import GroupPair, make_pairs
from kvreshard.plan.transfer import RankTransfer


@dataclass(frozen=True)
class Route:
    """All transfers of one destination rank from one source engine, and who reports to which source rank."""

    src_engine: str
    dst_engine: str
    dst_rank: int
    transfers: tuple[RankTransfer, ...]
    reporters: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...]
    dst_groups: tuple[Group, ...]
    """All groups of the destination engine, those without transfers to this rank included."""

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """The source ranks that this destination rank reads from, ascending."""
        return tuple(sorted({transfer.src_rank for transfer in self.transfers}))

    @cached_property
    def pairs(self) -> tuple[GroupPair, ...]:
        """The transfers, together where they share both block tables and cut the sequence alike."""
        return make_pairs(self.transfers)

    def drop_patterns(self) -> None:
        """Drop what its transfers have computed: nobody will read by it."""
        owners: set[Hashable] = {*(transfer.bases for transfer in self.transfers), *self.pairs}
        for cache in {transfer.pattern_cache for transfer in self.transfers}:
            cache.drop(owners)
