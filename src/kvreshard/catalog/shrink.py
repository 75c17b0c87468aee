"""Shrinks a model to few layers that fit into memory for a test.

Whole decoder layers are left out; the others keep their heads, widths, dtypes and bytes per page.

1. The first decoder layer of every sort stays (a sort: the kinds of a layer's caches), then the earliest others.
2. Drafts and prediction layers stay. Names stay, so `layers.5.attn` is the same layer in both models.
3. Pipeline stages count the decoder layers that are left and have caches.

With fewer layers a hybrid may have other groups (the smallest bucket decides), and so other bytes per block. Tokens and bytes of a
layer's page stay the same.
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
    first_of_sort: dict[tuple[tuple[str, Kind], ...], int] = {}
    for index, caches in sorted(by_index.items()):
        first_of_sort.setdefault(tuple((cache.family, cache.kind) for cache in caches), index)
    first = list(first_of_sort.values())
    others = sorted(by_index.keys() - set(first))[: max(0, max_layers - len(first))]
    number_of = {index: number for number, index in enumerate(sorted([*first, *others]))}
    layers = tuple(
        replace(layer, index=len(number_of) if layer.optional else number_of[layer.index])
        for layer in model.layers
        if layer.optional or layer.index in number_of
    )
    return replace(model, num_layers=len(number_of), layers=layers)


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
