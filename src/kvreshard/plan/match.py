"""Match: the fields of two engines, by name and form.

1. Fields match by name. One on one side only is refused, or a warning where the side that has it calls it optional.
2. Matching fields must agree in axes, extents, tokens per index, element size and encoding.

All findings are reported together, each with both values and the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from kvreshard.model.encoding_options import remedy_for
from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.expect import expect
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout

SHOWN = 8
SHOWN_FIELDS = 3


class Match(msgspec.Struct, frozen=True):
    """Names of the fields to move, in the destination's order, and warnings about optional fields on one side only."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]


def match_fields(src: EngineLayout, dst: EngineLayout) -> Match:
    """Raises LayoutMismatch with every finding, each once with the fields that it is true of (the first few in full)."""
    for what, layout in (("the source's layout", src), ("the destination's layout", dst)):
        expect(layout, EngineLayout, what, "what `kvreshard.describe` or `kvreshard.decode_layout` returns")
    findings: defaultdict[str, list[str]] = defaultdict(list)
    warnings: defaultdict[str, list[str]] = defaultdict(list)
    names: list[str] = []
    found: dict[tuple[int, int], list[str]] = {}
    for field in dst.fields:
        other = src.field_by_name.get(field.name)
        if other is None:
            (warnings if field.optional else findings)[_one_sided(field, dst, src, is_needed=True)].append(field.name)
            continue
        forms = src.kind_of[field.name], dst.kind_of[field.name]
        if forms not in found:
            found[forms] = differences(src.engine, other, dst.engine, field)
        for finding in found[forms]:
            findings[finding].append(field.name)
        if field.name in dst.holding_of:
            names.append(field.name)
    for field in src.fields:
        if field.name not in dst.field_by_name:
            (warnings if field.optional else findings)[_one_sided(field, src, dst, is_needed=False)].append(field.name)
    if findings:
        more = f" (and {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
        raise LayoutMismatch("; ".join(_with_fields(findings)[:SHOWN]) + more)
    return Match(tuple(names), tuple(_with_fields(warnings)))


def quoted(names: Sequence[str]) -> str:
    """The first few names.

    >>> quoted(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    more = f" and {len(names) - SHOWN_FIELDS} more" if len(names) > SHOWN_FIELDS else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN_FIELDS]) + more


def _with_fields(findings: Mapping[str, Sequence[str]]) -> list[str]:
    """Each finding behind the fields that it is true of."""
    return [f"field{'s' * (len(names) > 1)} {quoted(names)}{finding}" for finding, names in findings.items()]


def _one_sided(field: Field, having: EngineLayout, lacking: EngineLayout, *, is_needed: bool) -> str:
    if field.optional:
        lost = (
            "; the draft starts without the cache of what is loaded, so that fewer of its tokens are accepted; run the same draft on both sides"
            if is_needed
            else ""
        )
        return f": in engine '{having.engine}' but not in engine '{lacking.engine}', so not moved{lost}"
    return (
        f": in engine '{having.engine}' but not in engine '{lacking.engine}'; "
        "both must run the same model; a draft's fields may be declared optional"
    )


def differences(src_engine: str, src: Field, dst_engine: str, dst: Field) -> list[str]:
    """In what two fields of one name differ: what is to be said behind the name, with both values and the remedy.

    Sizes beside two encodings are told too, which is all that is known of a page of unknown inside; they may follow from them.
    """
    if (src.axes, src.element_bytes, src.encoding) == (dst.axes, dst.element_bytes, dst.encoding):
        return []
    found = []

    def differ(what: str, src_value: object, dst_value: object, remedy: str) -> None:
        found.append(
            f": {what} is {src_value} in engine '{src_engine}' and {dst_value} in engine '{dst_engine}': {remedy}"
        )

    if src.encoding != dst.encoding:
        differ("encoding", f"'{src.encoding}'", f"'{dst.encoding}'", remedy_for(dst))
    elif src.element_bytes != dst.element_bytes:
        differ("element size in bytes", src.element_bytes, dst.element_bytes, remedy_for(dst))
    src_names, dst_names = [a.name for a in src.axes], [a.name for a in dst.axes]
    if src_names != dst_names:
        differ("the list of axes", src_names, dst_names, "run one release of kvreshard on both sides")
        return found
    for src_axis, dst_axis in zip(src.axes, dst.axes, strict=True):
        if src_axis.extent != dst_axis.extent:
            differ(
                f"the extent of axis '{src_axis.name}'",
                src_axis.extent,
                dst_axis.extent,
                "both must run the same model; a sharded size may have been given for a whole one"
                if src.encoding == dst.encoding
                else "the encodings may be why",
            )
        if (src_axis.tokens_per_index, src_axis.keep_partial) != (dst_axis.tokens_per_index, dst_axis.keep_partial):
            differ(
                f"tokens per index of axis '{src_axis.name}'",
                src_axis.tokens_per_index,
                dst_axis.tokens_per_index,
                "use the same compression (or, for pages of unknown inside, the same page size)",
            )
    return found
