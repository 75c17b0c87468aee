"""Five block tables of a request, from the kindest to the unkindest.

- `fresh`: one ascending run. `half`: half of the pages so, the others scattered. `random`: all scattered.
- `reversed`: one descending run, as a stack of free pages hands them out.
- `steady`: what a simulated engine hands out after many requests of mixed length came and went, freed last page first into
  one queue, as vLLM's block pool does.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

KINDS = ("fresh", "half", "random", "reversed", "steady")


def page_table(kind: str, num_pages: int, pool: int, seed: int) -> NDArray[np.int64]:
    """`num_pages` distinct page ids in [1, pool): page 0 is vLLM's null page."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.permutation(np.arange(1, pool))[:num_pages]
    if kind == "steady":
        return steady(num_pages, pool, rng)
    ids = np.arange(1, 1 + num_pages, dtype=np.int64)
    if kind == "reversed":
        return ids[::-1].copy()
    if kind == "half":
        scattered = rng.permutation(np.arange(1 + num_pages // 2, pool))[: num_pages - num_pages // 2]
        return np.concatenate([ids[: num_pages // 2], scattered])
    return ids


def steady(num_pages: int, pool: int, rng: np.random.Generator, rounds: int = 400) -> NDArray[np.int64]:
    """The table that a request gets in an engine that has been busy for a while."""
    free = deque(range(1, pool))
    running: list[list[int]] = []
    for _ in range(rounds):
        wanted = int(rng.integers(1, max(2, pool // 12)))
        while len(free) < wanted + num_pages and running:
            free.extend(reversed(running.pop(int(rng.integers(len(running))))))
        running.append([free.popleft() for _ in range(min(wanted, len(free)))])
    while len(free) < num_pages:
        free.extend(reversed(running.pop(0)))
    return np.array([free.popleft() for _ in range(num_pages)], dtype=np.int64)
