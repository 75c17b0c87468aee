"""What does an engine's layout name that none of its ranks holds?

A route is proved for what the destination's ranks hold. A layout that lacks a rank, some heads or a whole field lacks them in the proof
too. So, for a layout that comes from a file:

1. Fields that no rank has a part of.
2. Per family, the axes are cut at every edge of what the ranks hold, and every combination of atoms must have a holder.

Refused: what takes more work than a `Budget` has (LayoutMismatch).
"""

from __future__ import annotations

from itertools import product
from math import prod

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout
from kvreshard.model.text import counted
from kvreshard.plan.budget import CELL_STEPS, OWNER_STEPS, Budget
from kvreshard.plan.cells import CutAxis, cut_axis
from kvreshard.plan.cover import part
from kvreshard.plan.election import MAX_CELLS
from kvreshard.plan.family import Family, families
from kvreshard.plan.match import SHOWN_FIELDS


def find_unheld(layout: EngineLayout) -> tuple[str, ...]:
    """A sentence about each part of the model that no rank holds. Raises LayoutMismatch."""
    held = tuple(layout.holding_of)
    absent = [field.name for field in layout.fields if field.name not in layout.holding_of]
    found = [f"no rank holds anything of {_quoted(absent)}"] if absent else []
    budget = Budget(layout, layout)
    for family in families(layout, layout, held):
        hole = _find_hole(layout, family, budget)
        if hole:
            found.append(f"no rank holds {hole} of {_quoted(list(family.fields))}")
    return tuple(found)


def _find_hole(layout: EngineLayout, family: Family, budget: Budget) -> str:
    """The first part of the fields' cells that no rank holds; empty if there is none."""
    axes = [cut_axis(layout, family, number, budget) for number in range(len(family.shape.axes))]
    num_cells = prod(len(axis.owners) for axis in axes)
    if num_cells > MAX_CELLS:
        raise LayoutMismatch(
            f"field '{family.fields[0]}': the ranks of engine '{layout.engine}' cut it into more than {MAX_CELLS} cells; use fewer ranks"
        )
    budget.spend(family.fields[0], (CELL_STEPS + OWNER_STEPS * len(family.src)) * num_cells, "too many parts")
    for atoms in product(*(range(len(axis.owners)) for axis in axes)):
        if not frozenset.intersection(*(axis.owners[atom] for axis, atom in zip(axes, atoms, strict=True))):
            return _told(family, axes, atoms)
    return ""


def _told(family: Family, axes: list[CutAxis], atoms: tuple[int, ...]) -> str:
    words = [
        f"{axis.name} {part(axis.extent, cut.edges[atom], cut.edges[atom + 1], cut.edges[-1])}"
        for axis, cut, atom in zip(family.shape.axes, axes, atoms, strict=True)
        if len(cut.owners) > 1
    ]
    return ", ".join(words) or "any cell"


def _quoted(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN_FIELDS])
    more = f" and {len(names) - SHOWN_FIELDS} more" if len(names) > SHOWN_FIELDS else ""
    return f"{counted(len(names), 'field')} ({shown}{more})"
