"""Compiles a pair of engines: the proved routes of all ranks of the destination, from one election."""

from __future__ import annotations

from collections.abc import Iterable

from kvreshard.model.layout import EngineLayout
from kvreshard.plan.cost import CostModel, Way
from kvreshard.plan.election import elect
from kvreshard.plan.match import match_fields
from kvreshard.plan.route import Route, compile_route


def compile_routes(
    src: EngineLayout,
    dst: EngineLayout,
    ranks: Iterable[int] | None = None,
    *,
    cost: CostModel | None = None,
    way: Way | None = None,
) -> list[Route]:
    """One proved route for each rank of `dst`, or of `ranks`, in their order.

    Args:
        src: layout of the prefill engine.
        dst: layout of the decode engine.
        ranks: numbers of destination ranks; all of the layout if not given.
        cost: what copies cost, to choose between direct and staged; the defaults if not given.
        way: read everything directly, or through staging.

    Raises:
        LayoutMismatch: the engines cannot exchange caches, or there is no such rank.
        UsageError: something else than a layout was given.
    """
    election = elect(src, dst, match_fields(src, dst).names)
    numbers = list(dst.rank_by_number) if ranks is None else list(dict.fromkeys(ranks))
    return [compile_route(src, dst, number, election=election, cost=cost or CostModel(), way=way) for number in numbers]
