"""The place of a rank in its engine, and what a rank at that place holds of an axis.

A place is an argument, never looked up, so a peer's layout is described by the same call as our own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvreshard.model import Cyclic, Interval, LayoutError, Ownership, split_evenly
from kvreshard.model.text import counted


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a tensor-parallel group of `tp_size`, in which `dcp_size` neighbours share the sequence.

    Decode context parallelism (DCP) gives `interleave` consecutive tokens to each of the `dcp_size` ranks in turn;
    these ranks are consecutive in the tensor-parallel group and hold the same heads.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.tp_size <= 0 or not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(f"tensor-parallel rank {self.tp_rank} of {self.tp_size}: sizes must be positive")
        if self.dcp_size <= 0 or self.interleave <= 0 or self.tp_size % self.dcp_size:
            raise LayoutError(
                f"context parallel size {self.dcp_size} (interleave {self.interleave}) must be positive and divide the "
                f"tensor-parallel size {self.tp_size}"
            )

    @property
    def dcp_rank(self) -> int:
        return self.tp_rank % self.dcp_size

    def tokens(self, tokens_per_state: int = 1) -> Ownership:
        """Tokens of the sequence on this rank, counted in states. Raises LayoutError where the interleave cuts a state."""
        if self.dcp_size == 1:
            return Interval(0, None)
        if self.interleave % tokens_per_state:
            raise LayoutError(
                f"context parallelism gives {counted(self.interleave, 'token')} at a time, which is no multiple of "
                f"{tokens_per_state} tokens per state; set interleave to a multiple of {tokens_per_state}"
            )
        run = self.interleave // tokens_per_state
        return Cyclic(self.dcp_rank * run, run, self.dcp_size * run)

    def heads(self, num_heads: int) -> Interval:
        """KV heads on this rank; ranks that share the sequence hold the same heads."""
        return split_evenly(num_heads, self.tp_size // self.dcp_size, self.tp_rank // self.dcp_size)

    def part(self, extent: int) -> Interval:
        """An axis that only tensor parallelism splits (states have no sequence to share)."""
        return split_evenly(extent, self.tp_size, self.tp_rank)


def whole(extent: int) -> Interval:
    """An axis that every rank holds whole."""
    return Interval(0, extent)


def size(interval: Interval) -> int:
    """The number of coordinates of an interval. Raises LayoutError for one without an end."""
    if interval.stop is None:
        raise LayoutError(f"interval {interval} has no end, so no size")
    return interval.stop - interval.start
