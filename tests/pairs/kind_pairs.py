"""Random pairs of engines that run the same random model: every cache kind, with everything that engines choose for themselves.

1. A model: 1 to 4 layer kinds, 1 to 3 layers each; small sizes, odd ones included.
2. Per engine and independent of the other: tensor, pipeline and context parallel sizes, cuts into stages and groups, page
   sizes, order, interior, kernel blocks, padding, convolution order, speculative columns, null page.

What an engine cannot have (tiles in an order that scatters tokens, a scattering order with unequal pages) is avoided most of
the time and otherwise refused by the layout itself with LayoutError; the caller draws again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvreshard.kinds import (
    Attention,
    GatedDelta,
    Kind,
    Latent,
    Mamba1,
    Mamba2,
    Opaque,
    Ring,
    ScaledRows,
    ShortConv,
    Style,
)
from kvreshard.kinds.assemble import ORDERS, Grid, Layer, PagedGroup, assemble
from kvreshard.kinds.attention import INTERIORS, TILE
from kvreshard.model import EngineLayout

Rng = np.random.Generator
TP_SIZES = (1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
SMALL_TP_SIZES = (1, 2, 3, 4)
MAX_RANKS = 16
DTYPES = ("bfloat16", "float32", "fp8_e4m3")
KINDS = (
    "attention",
    "attention",
    "attention",
    "latent",
    "rows",
    "mamba2",
    "mamba1",
    "gated-delta",
    "short-conv",
    "ring",
    "opaque",
)
PLANES = ("planes", "planes-kt", "tiles")


@dataclass(frozen=True)
class Model:
    """Layers in order, with the interior that each engine uses and, where a page is opaque, the sizes that both share."""

    layers: tuple[Layer, ...]
    interiors: tuple[str, str]
    shared_tp: int | None


def draw_model(rng: Rng) -> Model:
    """1 to 4 kinds of 1 to 3 layers, shuffled; sometimes a kind is an optional draft."""
    interiors = (str(rng.choice(INTERIORS)), str(rng.choice(INTERIORS)))
    layers: list[tuple[Kind, bool]] = []
    opaque = False
    for _ in range(int(rng.choice([1, 1, 2, 2, 3, 4]))):
        what = str(rng.choice(KINDS))
        opaque = opaque or what == "opaque"
        kind = _draw_kind(rng, what, interiors)
        optional = bool(rng.random() < 0.1)
        layers += [(kind, optional)] * int(rng.choice([1, 1, 2, 3]))
    order = rng.permutation(len(layers)).tolist()
    named = tuple(Layer(f"layers.{place}", layers[i][0], 0, layers[i][1]) for place, i in enumerate(order))
    return Model(named, interiors, _draw_tp(rng) if opaque else None)


def _draw_kind(rng: Rng, what: str, interiors: Sequence[str]) -> Kind:
    def among(*values: int) -> int:
        return int(rng.choice(values))

    dtype, other = str(rng.choice(DTYPES)), str(rng.choice(DTYPES))
    window = among(4, 16, 40) if rng.random() < 0.3 else None
    if what == "attention":
        return _draw_attention(rng, dtype, window, interiors)
    if what == "latent":
        per_state = among(1, 1, 1, 2, 4)
        aligned = among(1, 1, 1, 32, 48)
        if rng.random() < 0.3:
            return Latent(12, "uint8", "packed-rows", among(7, 16, 41), per_state, page_alignment_bytes=aligned)
        return Latent(among(1, 5, 12, 24), dtype, "", None, per_state, window, page_alignment_bytes=aligned)
    if what == "rows":
        per_state = among(1, 1, 2, 4)
        return ScaledRows(
            among(1, 3, 8, 16),
            among(1, 2, 4),
            "scaled",
            tokens_per_state=per_state,
            kernel_tokens=per_state * among(1, 2, 3, 8) if rng.random() < 0.6 else None,
            page_alignment_bytes=among(1, 1, 1, 32, 48),
        )
    if what == "mamba2":
        return Mamba2(
            among(1, 2, 3, 8), among(1, 2, 4), among(1, 2, 3, 4, 8), among(1, 2, 3), among(2, 3, 4), dtype, other
        )
    if what == "mamba1":
        return Mamba1(among(1, 3, 8, 12), among(1, 2, 3), among(2, 3, 4), dtype, other)
    if what == "gated-delta":
        return GatedDelta(
            among(1, 2, 3, 4), among(1, 2, 4, 8), among(1, 2, 3), among(1, 2, 3), among(2, 3, 4), dtype, other
        )
    if what == "short-conv":
        return ShortConv(among(1, 3, 8, 12), among(2, 3, 10), dtype, bool(rng.random() < 0.5))
    if what == "ring":
        per_state = among(1, 1, 2)
        parts = ("k", "gate") if rng.random() < 0.3 else ("ring",)
        return Ring(per_state * among(1, 2, 3, 7, 12), among(1, 3, 6), dtype, parts, per_state)
    return Opaque(among(1, 7, 32, 65), among(1, 3, 16), f"tag/{among(1, 2)}")


def _draw_attention(rng: Rng, dtype: str, window: int | None, interiors: Sequence[str]) -> Attention:
    """Of a width that both interiors allow."""

    def among(*values: int) -> int:
        return int(rng.choice(values))

    heads = among(1, 2, 2, 3, 4, 5, 8)
    if "tiles" in interiors:
        return Attention(
            heads, *((16, dtype, 16) if "slots" in interiors else (among(2, 6, 16), dtype, among(16, 32))), window
        )
    size = among(1, 2, 3, 4, 8, 16)
    if interiors[0] == interiors[1] == "cell" and rng.random() < 0.2:
        return Attention(heads, size, dtype, 0, window)
    return Attention(heads, size, dtype, None if "slots" in interiors else among(size, 1, 5, 8), window)


def draw_engine(rng: Rng, name: str, model: Model, side: int, num_tokens: int, features: set[str]) -> EngineLayout:
    """One engine that runs the model (less optional layers, now and then). Raises LayoutError where it cannot."""
    layers = [layer for layer in model.layers if not (layer.optional and rng.random() < 0.4)]
    if len(layers) < len(model.layers):
        features.add("optional field on one side")
    layers = layers or list(model.layers)
    grid = _draw_grid(rng, model)
    order, style_interior = _draw_order(rng, model.interiors[side]), model.interiors[side]
    groups = _draw_groups(rng, layers, style_interior, order)
    kernel = _draw_kernel(rng, groups, style_interior, order)
    style = Style(style_interior, bool(rng.random() < 0.5), int(rng.choice([0, 0, 1, 3])), kernel)
    stages = sorted(rng.integers(0, grid.num_stages, len(layers)).tolist())
    staged = [Layer(layer.name, layer.kind, stage, layer.optional) for layer, stage in zip(layers, stages, strict=True)]
    demand = sum(6 + 2 * -(-num_tokens // (group.tokens_per_page * grid.dcp_size)) for group in groups)
    layout = assemble(
        name,
        staged,
        groups,
        grid,
        order=order,
        num_pages=demand + int(rng.integers(0, 6)),
        style=style,
        null_page=0 if rng.random() < 0.5 else None,
    )
    _note(model, layout, groups, grid, order, style, features)
    return layout


def _draw_grid(rng: Rng, model: Model) -> Grid:
    tp = model.shared_tp or _draw_tp(rng)
    stages = int(rng.choice([1, 1, 1, 2, 2, 3]))
    if tp * stages > MAX_RANKS:
        stages = max(1, MAX_RANKS // tp)
    divisors = [d for d in range(2, tp + 1) if tp % d == 0]
    if not divisors or model.shared_tp is not None or rng.random() < 0.5:
        return Grid(tp, stages)
    unit = math.lcm(*(getattr(layer.kind, "tokens_per_state", 1) for layer in model.layers))
    return Grid(tp, stages, int(rng.choice(divisors)), unit * int(rng.choice([1, 1, 2, 3, 4, 5, 16])))


def _draw_tp(rng: Rng) -> int:
    """Mostly small sizes: they are quick to check, and hold most of the ways in which sizes relate."""
    return int(rng.choice(SMALL_TP_SIZES if rng.random() < 0.6 else TP_SIZES))


def _draw_order(rng: Rng, interior: str) -> str:
    """Any order; with planes mostly one that keeps a head's tokens together."""
    if interior in PLANES and rng.random() < 0.97:
        return str(rng.choice([order for order in ORDERS if order.endswith("NC")]))
    return str(rng.choice(ORDERS))


def _draw_groups(rng: Rng, layers: Sequence[Layer], interior: str, order: str) -> list[PagedGroup]:
    """One group per kind, then some split (overlaid groups of one shape) or merged; page sizes drawn for each."""
    by_kind: dict[Kind, list[Layer]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    grouped: list[list[Layer]] = []
    for members in by_kind.values():
        cut = int(rng.integers(1, len(members))) if len(members) > 1 and rng.random() < 0.35 else 0
        grouped += [members[:cut], members[cut:]] if cut else [members]
    merged: list[list[Layer]] = []
    scatters = order == "LHBNC"  # it cannot overlay groups of unequal pages
    for members in grouped:
        fits = [other for other in merged if _can_share(other[0].kind, members[0].kind)]
        if fits and rng.random() < (0.95 if scatters else 0.3):
            fits[0].extend(members)
        else:
            merged.append(members)
    pages: dict[Kind, int] = {}
    groups = []
    for number, found in enumerate(merged):
        fresh = _draw_page(rng, [layer.kind for layer in found], interior)
        page = pages.setdefault(found[0].kind, fresh) if scatters else fresh
        padded = int(rng.integers(1, 400)) if order[:2] in ("LB", "BL") and rng.random() < 0.25 else 0
        names = [layer.name for layer in found]
        groups.append(PagedGroup(f"g{number}", tuple(names[i] for i in rng.permutation(len(names))), page, padded))
    return groups


def _can_share(one: Kind, two: Kind) -> bool:
    if isinstance(one, Opaque | Ring) or isinstance(two, Opaque | Ring):
        return one == two
    return one.is_state == two.is_state


def _draw_page(rng: Rng, kinds: Sequence[Kind], interior: str) -> int:
    if isinstance(kinds[0], Opaque):
        return kinds[0].tokens_per_page
    unit = math.lcm(*(getattr(kind, "tokens_per_state", 1) for kind in kinds))
    if interior == "tiles" and any(isinstance(kind, Attention) for kind in kinds):
        unit = math.lcm(unit, TILE)
    return unit * int(rng.integers(1, max(2, int(rng.choice([8, 24, 64])) // unit + 1)))


def _draw_kernel(rng: Rng, groups: Sequence[PagedGroup], interior: str, order: str) -> int | None:
    if rng.random() < 0.65 or (order in ("LHBNC", "BHLNC") and rng.random() < 0.95):
        return None
    page = groups[int(rng.integers(len(groups)))].tokens_per_page
    unit = TILE if interior == "tiles" else 1
    divisors = [d for d in range(unit, page, unit) if page % d == 0]
    return int(rng.choice(divisors)) if divisors else None


def _note(
    model: Model,
    layout: EngineLayout,
    groups: Sequence[PagedGroup],
    grid: Grid,
    order: str,
    style: Style,
    features: set[str],
) -> None:
    kinds = {layer.name: layer.kind for layer in model.layers}
    for name in (name for group in groups for name in group.layers):
        _note_kind(kinds[name], grid, style, features)
    several = [group for group in groups if len({kinds[name] for name in group.layers}) > 1]
    cut = grid.dcp_size > 1 and any(group.tokens_per_page % grid.interleave for group in groups)
    for what, true in {
        f"order: {order}": True,
        "kernel blocks": style.kernel_tokens is not None,
        "overlaid groups": len(groups) > 1,
        "several kinds in one group": bool(several),
        "interleave that does not divide the page": cut,
        "padding": any(group.padded_page_bytes for group in groups),
        "rank without layers": not all(rank.shards for rank in layout.ranks),
    }.items():
        if true:
            features.add(what)


def _note_kind(kind: Kind, grid: Grid, style: Style, features: set[str]) -> None:
    features.add(f"kind: {type(kind).__name__}")
    if isinstance(kind, Attention):
        features.add(f"interior: {style.interior}")
        if kind.value_size != kind.head_size:
            features.add("V of another width than K")
        if kind.num_kv_heads < grid.tp_size // grid.dcp_size:
            features.add("fewer heads than ranks")
    if isinstance(kind, Mamba1 | Mamba2 | GatedDelta):
        features.add("conv: channel first" if style.conv_dim_first else "conv: channel last")
    if isinstance(kind, Mamba2):
        fewer, more = kind.num_groups < grid.tp_size, kind.num_groups > grid.tp_size
        features.add(
            f"Mamba-2: {'fewer groups than' if fewer else 'more groups than' if more else 'as many groups as'} ranks"
        )
    if getattr(kind, "tokens_per_state", 1) > 1:
        features.add("several tokens in one state")
    if isinstance(kind, Latent) and kind.row_bytes is not None:
        features.add("packed rows")
    if kind.is_state and style.speculative_tokens:
        features.add("speculative columns or entries")
