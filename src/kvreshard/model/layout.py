"""The layout of a whole engine: its fields, its groups, and what each rank holds where (`rank`).

A peer can compute every address from it and from a block table. It is checked once, when it is made (`layout_check`). Raises LayoutError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from kvreshard.model.expect import expect
from kvreshard.model.field import Field
from kvreshard.model.layout_check import check_layout
from kvreshard.model.rank import Geometry, Group, Rank, RankTemplate


@dataclass(frozen=True)
class EngineLayout:
    """A whole engine. `engine` names it in messages; ranks are ordered by their number."""

    engine: str
    fields: tuple[Field, ...]
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]

    def __post_init__(self) -> None:
        expect(self.engine, str, "the engine of a layout", "its name, as in 'prefill'")
        for name, kind in (("fields", Field), ("groups", Group), ("ranks", Rank)):
            parts = getattr(self, name)
            expect(parts, (tuple, list), f"the {name} of a layout", f"({kind.__name__}(...), ...)")
            for part in parts:
                if not isinstance(part, kind):
                    expect(part, kind, f"one of the {name} of a layout", f"({kind.__name__}(...), ...)")
        check_layout(self.engine, self.fields, self.groups, self.ranks, self.kind_of)

    @cached_property
    def kind_of(self) -> Mapping[str, int]:
        """Field -> a number that fields of equal axes, element size and encoding share."""
        numbers: dict[object, int] = {}
        return {
            field.name: numbers.setdefault((field.axes, field.element_bytes, field.encoding), len(numbers))
            for field in self.fields
        }

    @cached_property
    def holding_of(self) -> Mapping[str, int]:
        """Field -> a number that fields share which every rank holds by one geometry, for every field that some rank holds a part of, in the
        order of `fields`.
        """
        held: dict[str, list[tuple[int, int]]] = {field.name: [] for field in self.fields}
        for number, (template, _) in enumerate(self.templates):
            for shard in template.shards:
                held[shard.field].append((number, shard.geometry))
        numbers: dict[object, int] = {}
        return {field: numbers.setdefault(tuple(places), len(numbers)) for field, places in held.items() if places}

    @cached_property
    def templates(self) -> Sequence[tuple[RankTemplate, Sequence[Rank]]]:
        """Templates with their ranks, which are neighbours in the order of `ranks`. Found once: comparing two templates takes long."""
        return [(template, tuple(ranks)) for template, ranks in groupby(self.ranks, attrgetter("template"))]

    def holders(self, field: str) -> Mapping[int, Geometry]:
        """Rank -> how it holds its part of a field, for every rank that does."""
        found = {}
        for template, ranks in self.templates:
            number = ranks[0].shard_number.get(field)
            if number is not None:
                geometry = template.shards[number].geometry
                found.update({rank.rank: rank.geometries[geometry] for rank in ranks})
        return found

    @cached_property
    def field_by_name(self) -> Mapping[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def group_by_name(self) -> Mapping[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def rank_by_number(self) -> Mapping[int, Rank]:
        return {rank.rank: rank for rank in self.ranks}
