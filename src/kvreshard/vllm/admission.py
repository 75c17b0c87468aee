"""Loads and failed loads that vLLM's scheduler would wait for without an end: who is put behind others, and who is computed here.

Three things in vLLM 0.32.0 (`Scheduler.schedule`) can make an engine stand still for ever:

- A request whose load has failed loses its blocks, and stays in the queue of those that hold some. If it needs blocks that others of
  that queue hold, none of those behind it is looked at any more.
- Its blocks stay reserved (`_inflight_prefills`). Under `--scheduling-policy priority` a request that is to be loaded may come before
  it, does not fit beside the reservation, and ends the search; the one that holds the reservation is never reached.
- A load must fit together with what drafts need in a step, a prompt without. A pool that has room for the largest prompt may have
  none for its load.

vLLM goes on to the next request if the connector cannot say yet how many tokens can be loaded. So:

1. `fail` a request whose load has failed. When vLLM asks for it, it is put behind those that hold blocks, once.
2. `step` ends each engine step. If a load got no blocks in it and a failed request has none, all loads are put behind in the next
   step. Those that fit beside the reservation have got theirs.
3. A load that gets no blocks for `PATIENCE_S` seconds although the whole pool is free is named by `step`: it is to be computed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Other reasons for which vLLM lets a load wait (an encoder's output that is on its way) pass in this time.
PATIENCE_S = 1.0


class Admission:
    """Of one engine. Requests are named by their ids."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holding: set[str] = set()
        self._behind: set[str] = set()
        self._asked: str | None = None
        self._loads_wait = self._is_looking = False
        self._alone: tuple[str, float] | None = None

    @property
    def num_failed(self) -> int:
        """Requests whose load has failed and that have no blocks yet."""
        return len(self._holding) + len(self._behind)

    @property
    def is_looking(self) -> bool:
        """Whether vLLM has looked for a request to begin with in this step. It does not while it is paused."""
        return self._is_looking

    def fail(self, request_id: str) -> None:
        """The load of a request that has not ended has failed."""
        self._holding.add(request_id)

    def puts_behind(self, request_id: str, num_external: int) -> bool:
        """Whether vLLM shall go on to the next request, where it asks for this one and `num_external` tokens of it can be loaded."""
        self._is_looking = True
        if request_id in self._holding:
            self._holding.remove(request_id)
            self._behind.add(request_id)
            return True
        if num_external and self._loads_wait:
            return True
        self._asked = request_id if num_external else None
        return False

    def got_blocks(self, request_id: str) -> None:
        """vLLM has given the request blocks."""
        self._asked = None
        self.end(request_id)

    def end(self, request_id: str) -> None:
        """The request has ended, or is as any other."""
        self._holding.discard(request_id)
        self._behind.discard(request_id)

    def step(self, *, is_pool_free: bool) -> str | None:
        """The end of an engine step: the load that will never get blocks, if there is one. `is_pool_free`: nobody holds any."""
        asked, self._asked, now_s = self._asked, None, self._clock()
        self._loads_wait = asked is not None and bool(self._behind)
        self._is_looking = False
        if asked is None or not is_pool_free:
            self._alone = None
        elif self._alone is None or self._alone[0] != asked:
            self._alone = asked, now_s
        elif now_s >= self._alone[1] + PATIENCE_S:
            self._alone = None
            return asked
        return None
