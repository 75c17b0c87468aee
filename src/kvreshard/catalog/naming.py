"""Field names of a described engine, made those of an engine that runs.

The catalog names fields by its own pattern (`layers.0.attn.k`), vLLM by the modules of the model's class (`model.layers.0.self_attn.attn.k`). Both
have the layer's number and, last, the part. So fields are paired by these two, where that is one to one.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace
from kvreshard.model.errors import LayoutMismatch


def named_like(mine: EngineLayout, theirs: EngineLayout) -> EngineLayout:
    """`mine` with the field names of `theirs`; as it is where they have names in common. Raises LayoutMismatch where fields cannot be paired."""
    if set(mine.field_by_name) & set(theirs.field_by_name):
        return mine
    mine_by_place, theirs_by_place = _by_place(mine), _by_place(theirs)
    if set(mine_by_place) != set(theirs_by_place):
        only_mine = sorted(set(mine_by_place) - set(theirs_by_place))
        only_theirs = sorted(set(theirs_by_place) - set(mine_by_place))
        raise LayoutMismatch(
            f"engine '{mine.engine}' has {len(mine_by_place)} fields and engine '{theirs.engine}' {len(theirs_by_place)}; "
            f"{_some(only_mine)} only in '{mine.engine}', {_some(only_theirs)} only in '{theirs.engine}': is it the same model, with the same draft?"
        )
    names = {mine_by_place[place]: theirs_by_place[place] for place in mine_by_place}
    fields = tuple(replace(field, name=names[field.name]) for field in mine.fields)
    ranks = tuple(
        rank.with_shards([replace(shard, field=names[shard.field]) for shard in rank.shards]) for rank in mine.ranks
    )
    return replace(mine, fields=fields, ranks=ranks)


def _by_place(layout: EngineLayout) -> Mapping[tuple[int, str], str]:
    """(layer, part) -> name. Raises LayoutMismatch where two fields have the same."""
    found: dict[tuple[int, str], str] = {}
    for field in layout.fields:
        words = field.name.split(".")
        place = next((int(word) for word in words if word.isdecimal()), -1), words[-1]
        if place in found:
            raise LayoutMismatch(
                f"engine '{layout.engine}': fields '{found[place]}' and '{field.name}' have the same layer and part, so that they cannot be "
                "paired by name with those of another engine"
            )
        found[place] = field.name
    return found


def _some(places: list[tuple[int, str]]) -> str:
    shown = ", ".join(f"'{part}' of layer {layer}" for layer, part in places[:3])
    return f"{shown or 'none'}{' and more' if len(places) > 3 else ''}"
