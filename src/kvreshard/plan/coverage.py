"""Finds the parts of a model that an engine's layout names and none of its ranks holds.

A route is proved for what the destination's ranks hold. A layout that lacks a rank, some heads or a whole field lacks them in the proof
too. So a layout that comes from a file is looked at by itself: for fields that no rank has a part of and, per field set of fields, for boxes
that no rank holds.

Refused: what takes more work than a `Budget` has (LayoutMismatch).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from kvreshard.model.layout import EngineLayout
from kvreshard.model.text import counted
from kvreshard.plan.budget import Budget
from kvreshard.plan.election import CutAxis, FieldSet, cut_axes, group_fields, owners_of, spend_on_boxes
from kvreshard.plan.match import quoted


def find_unheld(layout: EngineLayout) -> tuple[str, ...]:
    """A sentence about each part of the model that no rank holds. Raises LayoutMismatch."""
    absent = [field.name for field in layout.fields if field.name not in layout.holding_of]
    found = [f"no rank holds anything of {_counted(absent)}"] if absent else []
    budget = Budget(layout, layout)
    for field_set in group_fields(layout, layout, layout.holding_of):
        hole = _find_hole(field_set, cut_axes(layout, field_set, budget), budget)
        if hole:
            found.append(f"no rank holds {hole} of {_counted(field_set.fields)}")
    return tuple(found)


def _find_hole(field_set: FieldSet, axes: Sequence[CutAxis], budget: Budget) -> str:
    """The first box of the fields that no rank holds, by the axes along which it is not all; empty if there is none."""
    counts = [len(axis.owners) for axis in axes]
    spend_on_boxes(field_set, axes, prod(counts), budget)
    for box in product(*map(range, counts)):
        if not owners_of(axes, box):
            words = [
                f"{axis.name} {cut.ownership(index, index + 1)}"
                for axis, cut, index in zip(field_set.shape.axes, axes, box, strict=True)
                if len(cut.owners) > 1
            ]
            return ", ".join(words) or "any cell"
    return ""


def _counted(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'field')} ({quoted(names)})"
