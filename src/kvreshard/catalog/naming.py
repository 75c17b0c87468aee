"""Field names of a described engine, made those of an engine that runs.

The catalog names fields by its own pattern (`layers.0.attn.k`, `mtp.0.attn.k`), vLLM by the modules of the model's class
(`model.layers.0.self_attn.attn.k`, `model.layers.61.self_attn.attn.k`). Both end with the part and number the layers, but not alike: vLLM's classes
count layers that predict behind the others or anew, states behind attention (Falcon-H1), or the attention layers alone (Zamba2). So the fields of
one part are paired in the order of the numbers in their names, those of a draft among themselves. Two in one layer are told apart
by their window, then by their sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace
from kvreshard.model.errors import LayoutMismatch

SHOWN = 3
Part = tuple[str, bool, int]
"""The last word of a field's name, whether an engine may lack the field, and how many numbers are in the name."""


def named_like(mine: EngineLayout, theirs: EngineLayout) -> EngineLayout:
    """`mine` with the field names of `theirs`; as it is where they have names in common. A draft's fields that only one side has keep their names.
    Raises LayoutMismatch where fields cannot be paired.
    """
    if set(mine.field_by_name) & set(theirs.field_by_name):
        return mine
    of_mine, of_theirs = _by_part(mine), _by_part(theirs)
    differing = [
        f"{len(own)} fields '{part[0]}' in '{mine.engine}' and {len(other)} in '{theirs.engine}'"
        for part in sorted({*of_mine, *of_theirs})
        if len(own := of_mine.get(part, [])) != len(other := of_theirs.get(part, [])) and not part[1]
    ]
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise LayoutMismatch(f"there are {', '.join(differing[:SHOWN])}{more}: is it the same model?")
    names = {
        own: other for part, owns in of_mine.items() for own, other in zip(owns, of_theirs.get(part, ()), strict=False)
    }
    fields = tuple(replace(field, name=names.get(field.name, field.name)) for field in mine.fields)
    ranks = tuple(
        rank.with_shards([replace(shard, field=names.get(shard.field, shard.field)) for shard in rank.shards])
        for rank in mine.ranks
    )
    return replace(mine, fields=fields, ranks=ranks)


def _by_part(layout: EngineLayout) -> Mapping[Part, list[str]]:
    """The fields of each part, in their order. Raises LayoutMismatch where two have the same place in it."""
    group_of = {shard.field: shard.geometry.group for rank in layout.ranks for shard in rank.shards}
    windows = {group.name: group.window_tokens or 0 for group in layout.groups}
    found: defaultdict[Part, dict[tuple[int, ...], str]] = defaultdict(dict)
    for field in layout.fields:
        *words, last = field.name.split(".")
        numbers = [int(word) for word in words if word.isdecimal()]
        window, sizes = windows.get(group_of.get(field.name, ""), 0), [axis.extent or 0 for axis in field.axes]
        place = *numbers, window, *sizes
        other = found[last, field.optional, len(numbers)].setdefault(place, field.name)
        if other != field.name:
            raise LayoutMismatch(
                f"engine '{layout.engine}': fields '{other}' and '{field.name}' have the same layer and part, so that they cannot be "
                "paired by name with those of another engine"
            )
    return {part: [fields[place] for place in sorted(fields)] for part, fields in found.items()}
