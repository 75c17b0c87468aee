"""Random pairs of engines with requests, each from one integer seed: what the planner is tried on.

Two layers that share nothing but the request generator: `kinds` draws models and engines (`kind_pairs`), `raw` draws layouts
from the nouns alone (`raw_pairs`). `make_pair(layer, seed)` gives the same pair each time, and `check_pair` says whether
the planner moves what the oracle moves; a failure names both arguments, so that

    check_pair(make_pair("raw", 123))

is all that it takes to see it again. `features` says what a pair has, so that a corpus can be shown to leave nothing out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tests.pairs import kind_pairs, raw_pairs
from tests.pairs.apply import WrongBytes, check_transfer, compile_all
from tests.pairs.requests import make_request

from kvreshard.model import EngineLayout, LayoutError, wire
from kvreshard.model.changed import replace
from kvreshard.model.tables import Request
from kvreshard.plan import Route

PairLayer = Literal["kinds", "raw"]
LAYERS: Sequence[PairLayer] = ("kinds", "raw")
MAX_DRAWS = 100
# Two draws are never equal by chance, and equal engines merge more than any others.
EQUAL_RATE = 0.08


@dataclass(frozen=True)
class Pair:
    """Two engines of one model and a request between them. `redraws`: why earlier draws of this seed were refused."""

    layer: PairLayer
    seed: int
    src: EngineLayout
    dst: EngineLayout
    request: Request
    features: frozenset[str]
    redraws: tuple[str, ...]

    @property
    def name(self) -> str:
        return f'make_pair("{self.layer}", {self.seed})'


@dataclass(frozen=True)
class Outcome:
    """What one pair showed: `error` is None if plan and oracle agree."""

    layer: PairLayer
    seed: int
    error: str | None
    features: frozenset[str]
    redraws: tuple[str, ...]
    changed_bytes: int


def make_pair(layer: PairLayer, seed: int) -> Pair:
    """The pair of this layer and seed: always the same one."""
    rng = np.random.default_rng([LAYERS.index(layer), seed])
    redraws: list[str] = []
    drawn: tuple[EngineLayout, EngineLayout, int] | None = None
    features: set[str] = set()
    while drawn is None:
        features.clear()
        try:
            drawn = (_draw_kinds if layer == "kinds" else _draw_raw)(rng, features)
        except LayoutError as error:
            redraws.append(str(error))
            if len(redraws) == MAX_DRAWS:
                raise
    src, dst, num_tokens = drawn
    request = make_request(rng, src, dst, num_tokens, features)
    if rng.random() < 0.25:
        features.add("staged")
    return Pair(layer, seed, src, dst, request, frozenset(features | _compared(src, dst)), tuple(redraws))


def _draw_kinds(rng: np.random.Generator, features: set[str]) -> tuple[EngineLayout, EngineLayout, int]:
    model = kind_pairs.draw_model(rng)
    num_tokens = int(rng.integers(1, int(rng.choice([10, 40, 100]))))
    src = kind_pairs.draw_engine(rng, "prefill", model, 0, num_tokens, features)
    if rng.random() < EQUAL_RATE:
        features.add("equal engines")
        return src, replace(src, engine="decode"), num_tokens
    return src, kind_pairs.draw_engine(rng, "decode", model, 1, num_tokens, features), num_tokens


def _draw_raw(rng: np.random.Generator, features: set[str]) -> tuple[EngineLayout, EngineLayout, int]:
    model = raw_pairs.draw_model(rng)
    num_tokens = int(rng.integers(1, int(rng.choice([10, 40, 120]))))
    src = raw_pairs.draw_engine(rng, "src", model, num_tokens, features)
    if rng.random() < EQUAL_RATE:
        features.add("equal engines")
        dst = replace(src, engine="dst")
    else:
        dst = raw_pairs.draw_engine(rng, "dst", model, num_tokens, features)
    optional = {field.name for field in src.fields if field.optional}
    if optional and optional != {field.name for field in src.fields}:
        features.add("optional field on one side")
        if rng.random() < 0.5:
            src = raw_pairs.without(src, optional)
        else:
            dst = raw_pairs.without(dst, optional)
    return src, dst, num_tokens


def check_pair(pair: Pair) -> int:
    """Raises WrongBytes unless the planner moves exactly what the oracle moves; returns how many bytes changed."""
    rng = np.random.default_rng([2, pair.seed])
    for layout in (pair.src, pair.dst):
        if wire.decode(wire.encode(layout, "json"), "json") != layout:
            raise WrongBytes(f"the JSON of engine '{layout.engine}' does not decode to an equal layout")
    # As between engines: planned with layouts that travelled.
    src, dst = (wire.decode(wire.encode(layout)) for layout in (pair.src, pair.dst))
    if (src, dst) != (pair.src, pair.dst):
        raise WrongBytes(f"the wire form of engine '{src.engine}' or '{dst.engine}' does not decode to an equal layout")
    routes = compile_all(src, dst)
    _check_reporters(pair, routes)
    staging_bytes = int(rng.choice([1, 100, 1000, 1 << 16])) if "staged" in pair.features else None
    return check_transfer(pair.src, pair.dst, routes, pair.request, rng, staging_bytes)


def run_pair(layer: PairLayer, seed: int) -> Outcome:
    """Make and check one pair; an error of any type is the outcome, not an exception."""
    pair = None
    try:
        pair = make_pair(layer, seed)
        changed = check_pair(pair)
    except Exception as error:  # noqa: BLE001 (the seed must be reported whatever happened)
        text = f"{type(error).__name__}: {error}"
        return Outcome(layer, seed, text, pair.features if pair else frozenset(), pair.redraws if pair else (), 0)
    return Outcome(layer, seed, None, pair.features, pair.redraws, changed)


def count_features(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many pairs had each feature."""
    return Counter(feature for outcome in outcomes for feature in outcome.features)


def _check_reporters(pair: Pair, routes: Sequence[Route]) -> None:
    """Every source rank has a reporter, every reader is one, and all destination ranks agree on who reports."""
    for route in routes:
        if dict(route.reporters) != dict(routes[0].reporters):
            raise WrongBytes(f"ranks {routes[0].dst_rank} and {route.dst_rank} disagree on who reports")
        for rank in route.src_ranks:
            if route.dst_rank not in route.reporters[rank]:
                raise WrongBytes(f"rank {route.dst_rank} reads rank {rank} and does not report to it")
    silent = [rank.rank for rank in pair.src.ranks if not routes[0].reporters.get(rank.rank)]
    if silent:
        raise WrongBytes(f"nobody reports to source ranks {silent}")


def _compared(src: EngineLayout, dst: EngineLayout) -> set[str]:
    """What a pair has that shows only between its two sides."""
    found = set()
    sizes = [1 + max(dict(rank.place).get("tp", 0) for rank in layout.ranks) for layout in (src, dst)]
    stages = [1 + max(dict(rank.place).get("pp", 0) for rank in layout.ranks) for layout in (src, dst)]
    cyclic = [_is_cyclic(layout) for layout in (src, dst)]
    if "pp" in dict(src.ranks[0].place):
        big, small = max(sizes), min(sizes)
        found.add("TP: equal" if big == small else "TP: dividing" if big % small == 0 else "TP: not dividing")
        found |= {f"TP {size}" for size in sizes}
        if stages[0] != stages[1]:
            found.add("PP: unequal")
        elif stages[0] > 1:
            found.add("PP: equal, more than one")
    if any(cyclic):
        found.add("DCP: both sides" if all(cyclic) else "DCP: source only" if cyclic[0] else "DCP: destination only")
    if _pages(src) != _pages(dst):
        found.add("page sizes: unequal")
    if _is_replicated(src):
        found.add("replicas: source")
    if _is_replicated(dst):
        found.add("replicas: destination")
    return found


def _is_cyclic(layout: EngineLayout) -> bool:
    return any(m.owned.period > 1 for rank in layout.ranks for shard in rank.shards for m in shard.geometry.axes)


def _pages(layout: EngineLayout) -> dict[str, int | None]:
    tokens = {group.name: group.tokens_per_page for group in layout.groups}
    return {shard.field: tokens[shard.geometry.group] for rank in layout.ranks for shard in rank.shards}


def _is_replicated(layout: EngineLayout) -> bool:
    seen: set[tuple[object, ...]] = set()
    for rank in layout.ranks:
        for shard in rank.shards:
            key = (shard.field, *(mapped.owned for mapped in shard.geometry.axes))
            if key in seen:
                return True
            seen.add(key)
    return False
