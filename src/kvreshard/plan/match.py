"""Do two engines mean the same fields, in the same form?

1. Fields match by name. One on one side only is refused, or a warning where the side that has it calls it optional.
2. Matching fields must agree in axes, extents, tokens per index, element size and encoding.

All findings are reported together, each with both values and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout

SHOWN = 8


@dataclass(frozen=True, slots=True)
class Match:
    """Names of the fields to move, in the destination's order, and warnings about optional fields on one side only."""

    names: tuple[str, ...]
    warnings: tuple[str, ...]


def match_fields(src: EngineLayout, dst: EngineLayout) -> Match:
    """Raises LayoutMismatch with every finding (the first few in full)."""
    findings: list[str] = []
    warnings: list[str] = []
    names: list[str] = []
    alike: set[tuple[int, int]] = set()
    held = {field for outline in dst.outlines for field in outline.fields}
    for field in dst.fields:
        other = src.field_by_name.get(field.name)
        if other is None:
            _one_sided(field, dst, src, findings, warnings)
            continue
        shapes = src.shape_numbers[field.name], dst.shape_numbers[field.name]
        if shapes not in alike:
            found = differences(field.name, src.engine, other, dst.engine, field)
            findings += found
            alike.update(() if found else [shapes])
        if field.name in held:
            names.append(field.name)
    for field in src.fields:
        if field.name not in dst.field_by_name:
            _one_sided(field, src, dst, findings, warnings)
    if findings:
        more = f" (and {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
        raise LayoutMismatch("; ".join(findings[:SHOWN]) + more)
    return Match(tuple(names), tuple(warnings))


def _one_sided(
    field: Field, having: EngineLayout, lacking: EngineLayout, findings: list[str], warnings: list[str]
) -> None:
    if field.optional:
        warnings.append(
            f"field '{field.name}' of engine '{having.engine}' is not in engine '{lacking.engine}': it is not moved"
        )
        return
    findings.append(
        f"field '{field.name}' is in engine '{having.engine}' but not in engine '{lacking.engine}': "
        "both must run the same model; a draft's fields may be declared optional"
    )


def differences(name: str, src_engine: str, src: Field, dst_engine: str, dst: Field) -> list[str]:
    """In what two fields of one name differ, each as a sentence with both values and the remedy."""
    found = []

    def differ(what: str, src_value: object, dst_value: object, remedy: str) -> None:
        found.append(
            f"field '{name}': {what} is {src_value} in engine '{src_engine}' and {dst_value} in engine '{dst_engine}': "
            f"{remedy}"
        )

    if src.encoding != dst.encoding:
        differ("encoding", f"'{src.encoding}'", f"'{dst.encoding}'", "use the same cache dtype and quantisation")
    if src.element_bytes != dst.element_bytes:
        differ("element size in bytes", src.element_bytes, dst.element_bytes, "use the same cache dtype")
    src_names, dst_names = [a.name for a in src.axes], [a.name for a in dst.axes]
    if src_names != dst_names:
        differ("the list of axes", src_names, dst_names, "describe both engines with the same version")
        return found
    for src_axis, dst_axis in zip(src.axes, dst.axes, strict=True):
        if src_axis.extent != dst_axis.extent:
            differ(
                f"the extent of axis '{src_axis.name}'",
                src_axis.extent,
                dst_axis.extent,
                "both must run the same model; a sharded size may have been given for a whole one",
            )
        if (src_axis.tokens_per_index, src_axis.keep_partial) != (dst_axis.tokens_per_index, dst_axis.keep_partial):
            differ(
                f"tokens per index of axis '{src_axis.name}'",
                src_axis.tokens_per_index,
                dst_axis.tokens_per_index,
                "use the same compression (or, for pages of unknown inside, the same page size)",
            )
    return found
