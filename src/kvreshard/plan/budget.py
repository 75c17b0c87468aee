"""What may it cost to plan a pair of engines?

A peer's layout arrives over the network, and a meeting that spins is an engine that stands still. So the election, and then each
route, counts its work before it is done, in steps of some 10 ns, and is refused where the sum is above `MAX_STEPS`. Real
pairs take a hundredth of it. Steps are counted, not seconds: a pair is planned, or refused, on every machine alike.
"""

from __future__ import annotations

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout

# 256 ranks that share the sequence with 251 take a fifth of it. All of it takes two to three seconds.
MAX_STEPS = 1 << 28
# Of the election: an axis of a family; an edge of an axis, and whether one owner holds what is behind it; what a destination rank meets
# of an axis; an axis of a cell, and looking at one source rank that holds it.
AXIS_STEPS, EDGE_STEPS, HOLDER_STEPS, MEET_STEPS = 10_000, 100, 4, 3000
CELL_STEPS, OWNER_STEPS = 400, 16
# Of a route: a lane, each of its fields; where two pages overlap each turn, cut, stretch that is kept, nest of loops
# and run.
LANE_STEPS, FIELD_STEPS = 40_000, 200
TURN_STEPS, CUT_STEPS, KEPT_STEPS, NEST_STEPS, RUN_STEPS = 10, 20, 300, 1000, 40


class Budget:
    """Steps that are left to plan one pair."""

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self._engines, self._left = (src, dst), MAX_STEPS

    def spend(self, field: str, steps: int, why: str) -> None:
        """Raises LayoutMismatch where the steps are more than what is left; `why`: what takes them."""
        self._left -= steps
        if self._left < 0:
            src, dst = (f"'{layout.engine}' ({len(layout.ranks)} ranks)" for layout in self._engines)
            raise LayoutMismatch(
                f"field '{field}': engines {src} and {dst} have {why}, and planning them takes more than {MAX_STEPS} steps; "
                "use fewer ranks, or parallel sizes, interleaves and page sizes that divide one another"
            )
