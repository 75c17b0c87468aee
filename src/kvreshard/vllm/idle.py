"""How long an engine that computes nothing waits for its loads, in steps that vLLM makes without rest while requests wait.

A step without work costs some 3 ms of processor time. A load of a finished prefill takes milliseconds: each rank waits a few for it in a step.
Where all loads wait for prefills at other engines, nothing may happen for seconds. Then the wait grows from step to step, up to `LONGEST_S`.
It ends early where a load ends, or where a listener has news of a request that has no blocks yet. A request that arrives meanwhile waits for
its end.
"""

from __future__ import annotations

from kvreshard.vllm.consumer import Consumer

# A load of a megabyte takes some 3 ms; after a step that finds nothing the next one comes 3 ms later (vLLM 0.32 sleeps 1 ms, the rest is
# messages between its processes).
SHORTEST_S, LONGEST_S, GROWTH = 0.004, 0.064, 1.25


class Idle:
    """Of one engine."""

    def __init__(self) -> None:
        self._patience_s = SHORTEST_S

    def is_over(self) -> None:
        """Something has happened: a request has arrived."""
        self._patience_s = SHORTEST_S

    def patience_s(self, consumer: Consumer) -> float:
        """For the ranks, in this step."""
        if consumer.waiting.num_loading == consumer.waiting.num_early:
            self._patience_s = min(LONGEST_S, self._patience_s * GROWTH)
        else:
            self._patience_s = SHORTEST_S
        return self._patience_s

    def wait(self, consumer: Consumer) -> None:
        """Where no rank has anything to wait for: for news of prefills that are under way."""
        if consumer.following is not None and consumer.following.num_unknown:
            consumer.following.wait(self._patience_s)
