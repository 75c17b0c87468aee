"""A model of many layers made one of few that a test can hold in memory.

Whole decoder layers are left out; heads, widths, dtypes and bytes per page of those that stay are the model's own.

1. The first decoder layer of every sort stays (a sort: the caches of a layer, by kind), then the earliest others.
2. Drafts and prediction layers stay. Names stay too, so `layers.5.attn` of the small model is that of the large one.
3. Decoder layers are counted anew for pipeline stages, layers without caches are not counted.

What changes with the number of layers: how many groups a hybrid has and how many layers are in each (the smallest
bucket decides), and with that the bytes of a block; tokens and bytes of a layer's page do not.
"""

from __future__ import annotations

from dataclasses import replace

from kvreshard.catalog.layers import Model, ModelLayer
from kvreshard.catalog.spec import EngineSpec
from kvreshard.kinds import Kind
from kvreshard.model import LayoutError


def shrink(model: Model, max_layers: int) -> Model:
    """At most `max_layers` decoder layers, but at least one of each sort. Raises LayoutError below one."""
    if max_layers <= 0:
        raise LayoutError(f"cannot keep {max_layers} layers of model '{model.name}'; keep at least one")
    by_index: dict[int, list[ModelLayer]] = {}
    for layer in model.layers:
        if not layer.optional:
            by_index.setdefault(layer.index, []).append(layer)
    if len(by_index) <= max_layers:
        max_layers = len(by_index)
    first_of_sort: dict[tuple[tuple[str, Kind], ...], int] = {}
    for index, caches in sorted(by_index.items()):
        first_of_sort.setdefault(tuple((cache.family, cache.kind) for cache in caches), index)
    kept = set(first_of_sort.values())
    for index in sorted(by_index):
        if len(kept) < max_layers:
            kept.add(index)
    place = {index: number for number, index in enumerate(sorted(kept))}
    layers = tuple(
        replace(layer, index=len(kept) if layer.optional else place[layer.index])
        for layer in model.layers
        if layer.optional or layer.index in kept
    )
    note = f"shrunk to {len(kept)} of {model.num_layers} decoder layers"
    return replace(model, num_layers=len(kept), layers=layers, notes=(*model.notes, note))


def fit_stages(spec: EngineSpec, num_layers: int) -> EngineSpec:
    """The engine with its uneven stages in the same proportion for `num_layers` layers, one layer each at least.

    >>> fit_stages(EngineSpec(pp=3, stages=(20, 21, 20)), 6).stages
    (2, 2, 2)
    """
    total = sum(spec.stages)
    if not spec.stages or total == num_layers:
        return spec
    if num_layers < spec.pp:
        raise LayoutError(
            f"engine option 'pp': {spec.pp} stages for {num_layers} layers; use at most one stage per layer"
        )
    sizes = [max(1, size * num_layers // total) for size in spec.stages]
    while sum(sizes) > num_layers:
        sizes[sizes.index(max(sizes))] -= 1
    wanted = [size * num_layers / total for size in spec.stages]
    while sum(sizes) < num_layers:
        behind = [want - size for want, size in zip(wanted, sizes, strict=True)]
        sizes[behind.index(max(behind))] += 1
    return replace(spec, stages=tuple(sizes))
