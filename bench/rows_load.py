"""Row g: two real engines that have several requests at a time, with our connector and with the in-tree one.

As row f (`rows_first_token`), whose engines and router these are: clients ask one request after the other, each with a prompt of its own. Both pairs take turns,
in rounds of some requests per client. Of a round there are the median first token and the requests per second; ratios are those of rounds side by
side. The 99th percentile is of all requests of all rounds. Every text is compared with that of an engine that transfers nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.e2e.compare import compare
from tests.e2e.prompts import prompt

from bench import bars
from bench.compare import interval
from bench.results import Result, skipped
from bench.rows_first_token import SHIPPED, SPARE, on_pairs

if TYPE_CHECKING:
    from bench.engine_pairs import Pair, Turn

ROW = "g load"
NUM_CLIENTS = (1, 8, 32)
LENGTH = 256
PAIRS = (("gemma3", 1, 2),)
MORE_PAIRS = (("llama", 2, 1),)
NUM_ROUNDS, NUM_ROUNDS_FULL = 6, 12
LEAST_REQUESTS, REQUESTS_PER_CLIENT = 12, 2


def run(release: str, full: bool) -> Iterator[Result]:
    """Each pair of engines, beside the release's connector as it ships and with cores to spare."""
    yield from on_pairs(ROW, release, (*PAIRS, *(MORE_PAIRS if full else ())), full, _measure)


def _measure(name: str, beside: str, ours: Pair, theirs: Pair, full: bool, num_ranks: int) -> Iterator[Result]:
    for pair in (ours, theirs):
        pair.serve([prompt(LENGTH, seed) for seed in range(2)], 1)  # the handshake
    for how in (SHIPPED, SPARE):
        if how == SPARE and (found := theirs.make_yield()) != num_ranks:
            why = f"{found} of {num_ranks} spinning threads of NIXL's were found"
            yield skipped(ROW, name, why, f"{beside} {how}")
            return
        for num_clients in NUM_CLIENTS:
            yield from _rounds(f"{name}, {num_clients} at a time", f"{beside} {how}", ours, theirs, num_clients, full)


def _rounds(name: str, beside: str, ours: Pair, theirs: Pair, num_clients: int, full: bool) -> Iterator[Result]:
    num_requests = max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * num_clients)
    first_ms, per_s = [], []
    for number in range(NUM_ROUNDS_FULL if full else NUM_ROUNDS):
        prompts = [prompt(LENGTH, 1000 * (number + 1) + seed) for seed in range(num_requests)]
        order = (ours, theirs) if number % 2 else (theirs, ours)
        served = {pair: pair.serve(prompts, num_clients) for pair in order}
        _check_texts(ours, prompts, served[ours][1], served[theirs][1])
        first_ms.append([[1e3 * turn.total_s for turn in served[pair][1]] for pair in (ours, theirs)])
        per_s.append([num_requests / served[pair][0] for pair in (ours, theirs)])
    yield from results(name, beside, np.array(first_ms), np.array(per_s))


def results(name: str, beside: str, first_ms: NDArray[np.float64], per_s: NDArray[np.float64]) -> Iterator[Result]:
    """`first_ms`: (rounds, 2, requests), ours and theirs. `per_s`: (rounds, 2)."""
    details = {"rounds": len(per_s), "requests": first_ms.shape[2], "load": round(os.getloadavg()[0], 1)}
    medians = np.median(first_ms, axis=2)
    ratio, low, high = interval(medians[:, 1] / medians[:, 0])
    ours, theirs = (float(value) for value in np.median(medians, axis=0))
    yield Result(
        ROW, f"{name}: first token, median", ours, "ms", beside, theirs, ratio, (low, high), bars.first_token((low, high)), details=details
    )  # fmt: skip
    ours, theirs = (float(value) for value in np.quantile(first_ms, 0.99, axis=(0, 2)))
    yield Result(
        ROW, f"{name}: first token, 99th percentile", ours, "ms", beside, theirs, theirs / ours, details=details
    )
    ratio, low, high = interval(per_s[:, 0] / per_s[:, 1])
    ours, theirs = (float(value) for value in np.median(per_s, axis=0))
    yield Result(
        ROW, f"{name}: requests per second", ours, "/ s", beside, theirs, ratio, (low, high), bars.throughput((low, high)),
        "ours / theirs", details,
    )  # fmt: skip


def _check_texts(ours: Pair, prompts: list[list[int]], *sides: list[Turn]) -> None:
    """Raises AssertionError if a text is not that of an engine that transfers nothing."""
    expected = ours.ordinary(prompts)
    for side, turns in zip(("ours", "in-tree"), sides, strict=True):
        found = compare(expected, [turn.output for turn in turns])
        assert (found.answered, found.wrong_tokens) == (True, ()), f"{side}: {found}"
