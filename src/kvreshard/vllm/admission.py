"""Ways out for requests that vLLM's scheduler, or engines among one another, would let wait for ever.

Four things in vLLM 0.32.0 (`Scheduler.schedule`) can stop an engine for ever:

- A request whose load has failed loses its blocks, and stays in the queue of those that hold some. If it needs blocks that others of
  that queue hold, vLLM does not schedule any request behind it.
- Its blocks stay reserved (`_inflight_prefills`). Under `--scheduling-policy priority` a request with a load may come before it, not fit
  beside the reservation, and end the search. vLLM then never reaches the request that holds the reservation.
- A loaded request may want more blocks than vLLM has kept free for it (`groups.blocks_to_compute`). If a loaded request behind it holds them,
  neither goes on: vLLM does not look behind a request that gets no blocks.
- A load must fit together with what drafts need in a step, a prompt without. A pool that has room for the largest prompt may have
  none for its load.

vLLM goes on to the next request while a connector cannot say how many tokens it can load. `Admission` uses that:

1. A request whose load has failed goes behind those that hold blocks, once (`fail`, `puts_behind`).
2. If a load got no blocks in a step while a failed request has none, all loads go behind in the next step (`step`). Those that fit beside
   the reservation have their blocks by then.
3. Beside loads whose requests are not computed yet, a load begins only if what all of them want fits into the free blocks (`has_room`).
   Those behind it wait as well, so that it is not overtaken for ever.
4. A load that gets no blocks for `PATIENCE_S` seconds although the whole pool is free is computed here (`step` returns it).

Engines that prefill and decode (`kv_both`) can also wait for one another in a circle: each fills its pool with finished prefills for the
others, while the others wait for blocks that are held in the same way. Readers that wait renew their leases, so no lease runs out.
`DeadlockDetector` finds that from within one engine.

Early loads hold blocks while their prefills are computed, and can be part of a circle too. A request here gets no blocks beside the early load, or is
preempted again and again. Those behind it wait, and so does their source, whose blocks the prefill needs. If a request lacks blocks and no
early load has gone on for the patience of the detector, the early load of the youngest request is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Other reasons for which vLLM lets a load wait (the output of an encoder is on its way) pass within this time.
PATIENCE_S = 1.0


class WantedBlocks(NamedTuple):
    """Blocks that a loaded request may yet want, and how many of them vLLM may not have counted."""

    num_blocks: int
    num_uncounted: int

    def plus(self, other: WantedBlocks, times: int) -> WantedBlocks:
        """So many times another beside it."""
        return WantedBlocks(
            self.num_blocks + times * other.num_blocks, self.num_uncounted + times * other.num_uncounted
        )


class Admission:
    """Order in which one engine admits requests, by request id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: set[str] = set()
        self._behind: set[str] = set()
        # Of requests that have been given blocks for a load, and are not computed: what they may yet want, and all of it together.
        self._wanted: dict[str, WantedBlocks] = {}
        self._all_wanted = WantedBlocks(0, 0)
        self._candidate: str | None = None
        self._loads_wait = self._is_looking = False
        self._stuck: tuple[str, float] | None = None
        # How many tokens of each request have been computed at most.
        self._reached: dict[str, int] = {}

    @property
    def is_looking(self) -> bool:
        """Whether vLLM has looked for requests to start in this step. It does not while it is paused."""
        return self._is_looking

    def is_still(
        self, num_scheduled: Mapping[str, int], requests: Mapping[str, Request], preempted: Collection[str]
    ) -> bool:
        """Whether a step computes nothing new, and the engine is not paused. `requests`: those that have not ended, as they are before it.

        A request that gets no more blocks is preempted and computes the same tokens again, without end where nobody gives blocks back.
        """
        self._reached = {name: most for name, most in self._reached.items() if name in requests}
        goes_on = False
        for name in num_scheduled.keys() & requests.keys():
            reached = int(requests[name].num_computed_tokens) + num_scheduled[name]
            if reached > self._reached.get(name, 0):
                self._reached[name], goes_on = reached, True
        return not goes_on and (self._is_looking or bool(num_scheduled) or bool(preempted))

    def fail(self, request_id: str) -> None:
        """The load of a request that goes on has failed."""
        self._failed.add(request_id)
        self._has_all(request_id)

    def has_room(self, num_free: int, num_blocks: int, wanted: WantedBlocks) -> bool:
        """Whether a load of `num_blocks` blocks may begin, whose request may then want some more. vLLM decides alone where it has counted all."""
        if not self._wanted or not wanted.num_uncounted + self._all_wanted.num_uncounted:
            return True
        return num_free >= num_blocks + wanted.num_blocks + self._all_wanted.num_blocks

    def puts_behind(self, request_id: str, num_external: int, *, has_room: bool = True) -> bool:
        """Whether vLLM shall skip this request for now, of which `num_external` tokens can be loaded."""
        self._is_looking = True
        if request_id in self._failed:
            self._failed.remove(request_id)
            self._behind.add(request_id)
            return True
        self._loads_wait |= num_external > 0 and not has_room
        if num_external and self._loads_wait:
            return True
        self._candidate = request_id if num_external else None
        return False

    def got_blocks(self, request_id: str, wanted: WantedBlocks | None = None) -> None:
        """vLLM has given the request blocks. `wanted`: how many more it may want when its load has ended; None: nothing is loaded."""
        self._candidate = None
        self.end(request_id)
        if wanted is not None:
            self._wanted[request_id] = wanted
            self._all_wanted = self._all_wanted.plus(wanted, 1)

    def compute(self, request_ids: Iterable[str]) -> None:
        """These are computed in this step: they have what they want."""
        for request_id in self._wanted.keys() & request_ids if self._wanted else ():
            self._has_all(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended, or needs no special care any more."""
        self._failed.discard(request_id)
        self._behind.discard(request_id)
        self._has_all(request_id)

    def _has_all(self, request_id: str) -> None:
        """A request has what it wants, or wants nothing any more."""
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None:
            self._all_wanted = self._all_wanted.plus(wanted, -1)

    def step(self, *, is_pool_free: bool) -> str | None:
        """End an engine step. Returns the load that will never get blocks, if any. `is_pool_free`: no request holds blocks."""
        candidate, self._candidate, now_s = self._candidate, None, self._clock()
        self._loads_wait = candidate is not None and bool(self._behind)
        self._is_looking = False
        if candidate is None or not is_pool_free:
            self._stuck = None
        elif self._stuck is None or self._stuck[0] != candidate:
            self._stuck = candidate, now_s
        elif now_s >= self._stuck[1] + PATIENCE_S:
            self._stuck = None
            return candidate
        return None


class DeadlockDetector:
    """Finds that this engine may be part of a circle. `patience_s`: seconds.

    An engine stands still when it computes nothing new and loads nothing, requests wait for a load, and it holds blocks for other engines. A paused
    engine, whose scheduler looks at no request, does not stand still; nor does one that only prefills or only decodes.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._since_s: float | None = None

    def step(self, is_still: bool) -> bool:
        """Whether one waiting request shall release its source and be computed here: every `patience_s` of standstill, another."""
        now_s = self._clock()
        if not is_still:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s >= self._since_s + self._patience_s:
            self._since_s = now_s
            return True
        return False
