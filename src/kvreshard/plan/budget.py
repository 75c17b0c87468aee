"""Budget of predicted work to plan one pair of engines.

A peer's layout arrives over the network, and a handshake that spins is an engine that stands still. So the election, and then each
route, predicts its work before it is done, in steps of some 10 ns, and is refused where the sum is above `MAX_STEPS`. Real pairs take a
hundredth of it. Steps are counted, not seconds: a pair is planned, or refused, on every machine alike.
"""

from __future__ import annotations

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout

# 256 ranks that share the sequence with 251 take a fifth of it. All of it takes two to three seconds.
MAX_STEPS = 1 << 28


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
