"""What of a route may be read before its prefill has ended, in parts that become final at different times.

A `Part` is the fields of one layer on one source rank, or those of one source rank whose layers do not tell their end. The source's engine
metadata says which fields these are. Everything else of the route is read at the end (`rest`): windows, rings and states change until
then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.route import Route
from kvreshard.plan.split import split
from kvreshard.plan.transfer import RankTransfer
from kvreshard.session.engine_metadata import NOT_TOLD, EngineMetadata


@dataclass(frozen=True)
class Part:
    """Fields of `src_rank` that are final together. `layer`: the place of their layer among the rank's; None: with the end of a step.

    `align_tokens`: it is read up to multiples of it, until the end; these are edges of pages on both sides. `groups`: source and destination
    group of what it reads.
    """

    src_rank: int
    layer: int | None
    route: Route

    @cached_property
    def groups(self) -> frozenset[tuple[str, str]]:
        return frozenset((one.src_group.name, one.dst_group.name) for one in self.route.transfers)

    @cached_property
    def align_tokens(self) -> int:
        pages = {group.tokens_per_page or 1 for one in self.route.transfers for group in (one.src_group, one.dst_group)}
        return math.lcm(*pages)

    @cached_property
    def token_bytes(self) -> float:
        """About how many bytes it reads of a token."""
        return sum(_token_bytes(one) for one in self.route.transfers)

    def is_wanted(self, request: Request) -> bool:
        """Whether a request reads anything of it."""
        return any(request.intervals.get(group) for _, group in self.groups)


@dataclass(frozen=True)
class RouteParts:
    """The parts of a route, and what of it is read at the end. `whole_ranks`: all parts of one source rank as one route."""

    parts: tuple[Part, ...]
    rest: Route
    whole_ranks: Mapping[int, Route] = field(default_factory=dict)

    def routes(self, parts: Sequence[Part]) -> Iterable[Route]:
        """Routes that together read some parts: one for a source rank of which all parts are wanted."""
        for rank, whole in self.whole_ranks.items():
            wanted = [part for part in parts if part.src_rank == rank]
            if len(wanted) > 1 and len(wanted) == sum(part.src_rank == rank for part in self.parts):
                yield whole
            else:
                yield from (part.route for part in wanted)

    def drop_patterns(self) -> None:
        """Drop what its routes have computed."""
        for route in (self.rest, *self.whole_ranks.values(), *(part.route for part in self.parts)):
            route.drop_patterns()


def find_parts(route: Route, layout: EngineLayout, metadata: EngineMetadata) -> RouteParts:
    """The parts of a route from the engine that `layout` and `metadata` describe."""
    by_rank = metadata.rank_by_number
    early: dict[int, Mapping[str, int | None]] = {
        rank: _layers_of(layout, metadata, rank) if by_rank[rank].progress_address else {} for rank in route.src_ranks
    }

    def part_of(transfer: RankTransfer, name: str) -> tuple[int, int | None] | None:
        """(source rank, layer); None where it is read at the end."""
        has_pages = transfer.src_group.tokens_per_page and transfer.dst_group.tokens_per_page
        is_ring = transfer.src_span.ring_pages is not None or transfer.dst_span.ring_pages is not None
        held = early[transfer.src_rank]
        if name not in held or not has_pages or is_ring or transfer.is_state:
            return None
        return transfer.src_rank, held[name]

    routes = split(route, part_of)
    parts = [Part(*key, part) for key, part in routes.items() if key is not None]
    parts.sort(key=lambda part: (part.src_rank, part.layer is None, part.layer or 0))
    whole = split(route, lambda transfer, name: (transfer.src_rank, part_of(transfer, name) is not None))
    nothing = replace(route, transfers=())
    return RouteParts(
        tuple(parts), routes.get(None, nothing), {rank: one for (rank, is_early), one in whole.items() if is_early}
    )


def _layers_of(layout: EngineLayout, metadata: EngineMetadata, rank: int) -> Mapping[str, int | None]:
    """The early fields of one source rank, each with the place of its layer among the rank's."""
    held = {shard.field for shard in layout.rank_by_number[rank].shards} & metadata.early_fields.keys()
    told = sorted({metadata.early_fields[name] for name in held} - {NOT_TOLD})
    places = {layer: place for place, layer in enumerate(told)}
    return {name: places.get(metadata.early_fields[name]) for name in held}


def _token_bytes(transfer: RankTransfer) -> float:
    low, high = transfer.typical_window()
    pattern = transfer.pattern(transfer.overlap_of(low, high))
    return pattern.num_bytes / max(1, (high - low) * transfer.tokens_per_index)
