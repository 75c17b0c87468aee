"""Pieces of the wire form: each as a strictly typed structure of the message, how it becomes a noun of the model, and the bounds of both.

Raises LayoutError where a well-formed piece is wrong by itself.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.errors import LayoutError, WireError
from kvreshard.model.field import Axis
from kvreshard.model.layout import Group
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.text import Name

# A 61-layer model on 64 ranks takes about 0.4 MB; a hundredfold is generous, and bounds what a peer can make us hold.
MAX_MESSAGE_BYTES = 64 << 20
# What a peer can make us compute grows with these. The largest engine that is planned for has 512 ranks; a model has some
# hundred layers of a few fields each.
MAX_RANKS = 1024
MAX_FIELDS = MAX_PER_RANK = 1 << 14
MAX_GROUPS = 256
MAX_GEOMETRIES = 1 << 16
MAX_SHARDS = 1 << 18
MAX_AXES = 16


# Both encodings take the same numbers: JSON knows larger ones, which could be read and not be written again.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class OwnedForm(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An interval (`start`, `stop`; without `stop`: all from `start` on) or a cyclic set (`start`, `run`, `step`)."""

    start: Whole
    stop: Whole | None = None
    run: Whole | None = None
    step: Whole | None = None


class DigitForm(msgspec.Struct, forbid_unknown_fields=True):
    """`model.address.Digit`."""

    extent: Whole | None
    page_step: Whole
    byte_step: Whole


class AxisMapForm(msgspec.Struct, forbid_unknown_fields=True):
    """`model.address.AxisMap`."""

    axis: Name
    owned: OwnedForm
    digits: Annotated[list[DigitForm], msgspec.Meta(max_length=MAX_AXES)]


class AxisForm(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """`model.field.Axis`."""

    name: Name
    extent: Whole | None
    tokens_per_index: Whole = 1
    keep_partial: bool = False


class GroupForm(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """`model.layout.Group`."""

    name: Name
    pool: Name
    num_pages: Whole
    tokens_per_page: Whole | None
    null_page: Whole | None = None
    window_tokens: Whole | None = None


def axis_map_form(mapped: AxisMap) -> AxisMapForm:
    """The axis map as it is written."""
    owned = mapped.owned
    held = (
        OwnedForm(owned.start, owned.stop)
        if isinstance(owned, Interval)
        else OwnedForm(owned.start, run=owned.run, step=owned.step)
    )
    return AxisMapForm(mapped.axis, held, [DigitForm(d.extent, d.page_step, d.byte_step) for d in mapped.digits])


def axis_map_of(axis: AxisMapForm) -> AxisMap:
    """The axis map that was written. Raises LayoutError."""
    digits: list[Digit] = []
    try:
        owned = _owned_of(axis.owned)
        for d in axis.digits:
            digits.append(Digit(d.extent, d.page_step, d.byte_step))
    except LayoutError as error:
        raise LayoutError(f"axis '{axis.axis}': {error}") from None
    return AxisMap(axis.axis, owned, tuple(digits))


def _owned_of(owned: OwnedForm) -> Ownership:
    if (owned.run is None) != (owned.step is None) or (owned.run is not None and owned.stop is not None):
        raise LayoutError("give either start and stop, or start, run and step")
    if owned.run is not None and owned.step is not None:
        return Cyclic(owned.start, owned.run, owned.step)
    return Interval(owned.start, owned.stop)


def axis_form(axis: Axis) -> AxisForm:
    """The axis as it is written."""
    return AxisForm(axis.name, axis.extent, axis.tokens_per_index, axis.keep_partial)


def axes_of(axes: list[AxisForm]) -> tuple[Axis, ...]:
    """The axes that were written. Raises LayoutError."""
    return tuple(Axis(a.name, a.extent, a.tokens_per_index, a.keep_partial) for a in axes)


def group_form(g: Group) -> GroupForm:
    """The group as it is written."""
    return GroupForm(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens)


def group_of(g: GroupForm) -> Group:
    """The group that was written. Raises LayoutError."""
    return Group(g.name, g.pool, g.num_pages, g.tokens_per_page, g.null_page, g.window_tokens)


def check_sizes(engine: str, num_ranks: int, **counts: int) -> None:
    """Raises WireError for more shards or slabs over all ranks than are accepted."""
    for what, count in counts.items():
        if count > MAX_SHARDS:
            raise WireError(
                f"layout of engine '{engine}': {count} {what} on {num_ranks} ranks; more than {MAX_SHARDS} are "
                "not accepted"
            )
