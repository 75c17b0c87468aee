"""How long an engine that computes nothing waits for its loads, in steps that vLLM makes without rest while requests wait.

A step without work costs some 3 ms of processor time, and the processes of an engine with several spin for a second after each (0.32.0,
`SpinCondition`).

1. A load of a finished prefill takes milliseconds: each rank waits `PATIENCE_S` for it in a step, also in the one that orders it.
2. Where all requests wait for prefills at other engines, the scheduler waits before the step, up to `LONGEST_S`: until a listener has news
   of a prefill, or a request arrives (`find_arrivals`). Where arrivals cannot be seen it waits up to `UNSEEN_S`, and up to `LOADING_S` while
   loads are under way: only a step tells how they have ended. Each wait in a row is longer than the one before.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import FrameType

from kvreshard.session.commands import Command
from kvreshard.vllm.consumer import Consumer

# A load of a megabyte takes some 3 ms; after a step that finds nothing the next one comes 3 ms later (vLLM 0.32 sleeps 1 ms, the rest is
# messages between its processes).
PATIENCE_S = 0.004
LONGEST_S, LOADING_S, UNSEEN_S, GROWTH = 60.0, 5.0, 0.064, 4.0
# How often it is looked whether a request has arrived.
LOOK_S = 0.002


class Idle:
    """Of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._wait_s = clock, PATIENCE_S
        self._has_arrivals: Callable[[], bool] | None = None
        self._is_sought = False

    def is_over(self) -> None:
        """Something has happened: a request has arrived."""
        self._wait_s = PATIENCE_S

    def wait(self, consumer: Consumer, alive: Iterable[str] = (), commands: Sequence[Command] = ()) -> float:
        """In a step that computes nothing: wait for news of prefills, or return how long the ranks may wait for loads. `alive`: requests that
        have not finished; another than those that wait for a prefill may wait for blocks, which only a step can give it. `commands`: of
        this step for the ranks; they are never kept waiting for news, and a short load ends in the step that orders it.
        """
        following = consumer.following
        is_followed = following.num_open > 0 and all(map(following.is_open, chain(consumer.waiting, alive)))
        if commands or not (is_followed and consumer.waiting.wait_for_prefills()):
            self._wait_s = PATIENCE_S
            return PATIENCE_S
        if not self._is_sought:
            self._is_sought, self._has_arrivals = True, find_arrivals()
        longest_s = LOADING_S if consumer.waiting.num_loading else LONGEST_S
        if self._has_arrivals is None:
            longest_s = UNSEEN_S
        self._wait_s = min(longest_s, self._wait_s * GROWTH)
        until_s = self._clock() + self._wait_s
        while (left_s := until_s - self._clock()) > 0:
            if self._has_arrivals is not None and self._has_arrivals():
                break
            if following.wait(left_s if self._has_arrivals is None else min(LOOK_S, left_s)):
                self._wait_s = PATIENCE_S
                break
        return 0.0


def find_arrivals() -> Callable[[], bool] | None:
    """Whether messages wait for vLLM's engine, which calls this function some frames above (0.32.0, `EngineCoreProc.input_queue`).

    None where it has no such queue: it runs in the process of its user.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = getattr(frame.f_locals.get("self"), "input_queue", None)
        if isinstance(found, queue.Queue):
            return lambda: not found.empty()
        frame = frame.f_back
    return None
