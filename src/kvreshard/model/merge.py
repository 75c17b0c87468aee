"""Merges the layouts in which ranks describe themselves into the layout of the whole engine.

1. Ranks are ordered by number; no number may come twice.
2. Fields are the union, in the order of first appearance over the ranks. Fields of one name must be equal.
3. Groups of one name must be equal. A part that holds nothing of a group (a pipeline stage without such layers) does not know
   the tokens of its pages and its window, so only its pool and number of pages are compared.

Refused with both values and the remedy: parts of different engines, a rank given twice, fields or groups that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvreshard.model.changed import replace
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.rank import Group, Rank


def merge_ranks(parts: Sequence[EngineLayout]) -> EngineLayout:
    """The layout of the engine whose ranks `parts` describe, each one or some of them. Raises LayoutError."""
    if not parts:
        raise LayoutError("no part of an engine was given; each rank must describe itself")
    engines = sorted({part.engine for part in parts})
    if len(engines) > 1:
        raise LayoutError(
            f"parts of engines '{engines[0]}' and '{engines[1]}' do not make one engine; give all ranks of one the same name"
        )
    ranked = sorted(((rank, part) for part in parts for rank in part.ranks), key=lambda pair: pair[0].rank)
    for (rank, _), (other, _) in pairwise(ranked):
        if rank.rank == other.rank:
            raise LayoutError(
                f"engine '{engines[0]}': rank {rank.rank} is described twice; each rank must describe itself once"
            )
    found: dict[str, tuple[Field, Rank]] = {}
    groups: dict[str, tuple[Group, Rank, bool]] = {}
    for rank, part in ranked:
        for field in part.fields:
            _merge_field(found, field, rank)
        held = {geometry.group for other in part.ranks for geometry in other.geometries}
        for group in part.groups:
            _merge_group(groups, group, rank, group.name in held)
    return EngineLayout(
        engines[0],
        tuple(field for field, _ in found.values()),
        tuple(group for group, _, _ in groups.values()),
        tuple(rank for rank, _ in ranked),
    )


def _merge_field(found: dict[str, tuple[Field, Rank]], field: Field, rank: Rank) -> None:
    known, first = found.setdefault(field.name, (field, rank))
    if known != field:
        raise LayoutError(_differs(f"field '{field.name}'", known, first, field, rank))


def _merge_group(groups: dict[str, tuple[Group, Rank, bool]], group: Group, rank: Rank, held: bool) -> None:
    known, first, known_held = groups.setdefault(group.name, (group, rank, held))
    shared = replace(group, tokens_per_page=known.tokens_per_page, window_tokens=known.window_tokens)
    if shared != known:
        raise LayoutError(_differs(f"group '{group.name}'", known, first, shared, rank))
    if held and known_held and known != group:
        raise LayoutError(_differs(f"group '{group.name}'", known, first, group, rank))
    if held and not known_held:
        groups[group.name] = (group, rank, held)


def _differs(what: str, one: Field | Group, one_rank: Rank, other: Field | Group, other_rank: Rank) -> str:
    names = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    values = " and ".join(
        f"{', '.join(f'{name} {_short(getattr(side, name))}' for name in names)} on rank {rank.rank}"
        for side, rank in ((one, one_rank), (other, other_rank))
    )
    return f"{what} has {values}; ranks of one engine must run the same model with the same options"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
