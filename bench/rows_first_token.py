"""Row f: the first token of two real engines, with our connector and with the in-tree one.

From the client's send of the prompt to the prefill engine until the decode engine's process has the first token, with a router in
between that does nothing else; the same prompt goes through both pairs, one right after the other, in turns (`engine_pairs`). The
first two requests of each pair are not counted: they carry the handshake. Every text is compared with that of an engine that
transfers nothing.

The in-tree connector is measured twice. *As it ships*, each of its ranks has a thread of NIXL's that spins on a core: on a machine
with fewer cores than ranks it slows down its own engines. *With cores to spare*, those threads run only where nobody else wants to:
what remains is the connector's own way, and there ours pays for its thread hops and for reading lease words.

The four engines are started once per pair. On a busy machine one side can be slower for all of a run, its own computing included:
the interval is that of the turns, not of starts, and `details` has the decode engines' part by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from tests.e2e.compare import compare
from tests.e2e.prompts import prompt

from bench import bars
from bench.beside import named
from bench.compare import interval
from bench.results import Result, skipped

if TYPE_CHECKING:
    from bench.engine_pairs import Pair, Turn

ROW = "f first token"
SHIPPED, SPARE = "as it ships", "with cores to spare"
LENGTHS = (256, 1024)
PAIRS = (("gemma3", 1, 2),)
MORE_PAIRS = (("llama", 1, 1), ("llama", 1, 2), ("llama", 2, 1), ("nemotron-h", 1, 1))
NUM_WARM = 2
NUM_ROUNDS, NUM_ROUNDS_FULL = 24, 60
LEAST_ROUNDS, BUDGET_S, BUDGET_FULL_S = 8, 3.0, 60.0  # no prompt is begun after the budget, once there are so many


def run(release: str, full: bool) -> Iterator[Result]:
    """Each pair of engines, each length, beside both."""
    yield from on_pairs(ROW, release, (*PAIRS, *(MORE_PAIRS if full else ())), full, _measure)


def on_pairs(
    row: str, release: str, pairs: Sequence[tuple[str, int, int]], full: bool, measure: Callable[..., Iterator[Result]]
) -> Iterator[Result]:
    """What is measured on each pair of engines: model, prefill TP, decode TP. All engines are of the release of vLLM that is imported."""
    from tests.e2e.engine import EngineFailed
    from tests.e2e.engines import Nursery

    from bench.engine_pairs import both_pairs

    with Nursery() as nursery:
        for model, prefill_tp, decode_tp in pairs:
            name, beside = f"{model} TP {prefill_tp} -> {decode_tp}", named(release)
            try:
                with both_pairs(nursery, model, prefill_tp, decode_tp) as (ours, theirs):
                    yield from measure(name, beside, ours, theirs, full, prefill_tp + decode_tp)
            except EngineFailed as error:
                yield skipped(row, name, f"an engine did not start or ended: {str(error).splitlines()[0]}", beside)


def _measure(name: str, beside: str, ours: Pair, theirs: Pair, full: bool, num_ranks: int) -> Iterator[Result]:
    first_ms = [1e3 * pair.turn(prompt(LENGTHS[0], 0)).total_s for pair in (ours, theirs)]
    for how in (SHIPPED, SPARE):
        if how == SPARE:
            found = theirs.make_yield()
            if found != num_ranks:
                why = f"{found} of {num_ranks} spinning threads of NIXL's were found"
                yield skipped(ROW, name, why, f"{beside} {how}")
                return
        for length in LENGTHS:
            num_prompts = NUM_WARM + (NUM_ROUNDS_FULL if full else NUM_ROUNDS)
            prompts = [prompt(length, 1 + seed) for seed in range(num_prompts)]
            turns = _take_turns(ours, theirs, prompts, BUDGET_FULL_S if full else BUDGET_S)
            gap = _check_texts(ours, prompts, turns)
            yield _result(
                f"{name}, {length} tokens", f"{beside} {how}", turns[NUM_WARM:], first_request_ms=first_ms, logprob_gap=gap
            )  # fmt: skip


def _take_turns(ours: Pair, theirs: Pair, prompts: Sequence[list[int]], budget_s: float) -> list[tuple[Turn, Turn]]:
    """(ours, theirs) of each prompt that there is time for; who is first changes from prompt to prompt."""
    turns: list[tuple[Turn, Turn]] = []
    started_s = time.monotonic()
    for number, words in enumerate(prompts):
        if number >= NUM_WARM + LEAST_ROUNDS and time.monotonic() > started_s + budget_s:
            break
        order = (ours, theirs) if number % 2 else (theirs, ours)
        first, second = (pair.turn(words) for pair in order)
        turns.append((first, second) if order[0] is ours else (second, first))
    return turns


def _check_texts(ours: Pair, prompts: Sequence[list[int]], turns: Sequence[tuple[Turn, Turn]]) -> float:
    """The largest difference of a log-probability from an engine that transfers nothing. Raises AssertionError if a text differs."""
    expected, gap = ours.ordinary(prompts[: len(turns)]), 0.0
    for side in (0, 1):
        found = compare(expected, [turn[side].output for turn in turns])
        assert (found.answered, found.wrong_tokens) == (True, ()), f"{('ours', 'in-tree')[side]}: {found}"
        gap = max(gap, found.logprob_gap)
    return gap


def _result(name: str, beside: str, turns: Sequence[tuple[Turn, Turn]], **details: object) -> Result:
    total_ms, decode_ms = (
        1e3 * np.array([[getattr(turn, part) for turn in pair] for pair in turns]) for part in ("total_s", "decode_s")
    )
    ratio, low, high = interval(total_ms[:, 1] / total_ms[:, 0])
    ours, theirs = np.median(total_ms, axis=0)
    of_decode = [round(float(value), 2) for value in np.median(decode_ms, axis=0)]
    return Result(
        ROW, name, float(ours), "ms", beside, float(theirs), ratio, (low, high), bars.first_token((low, high)),
        details={"pairs": len(turns), "decode_ms": of_decode, "load": round(os.getloadavg()[0], 1), **details},
    )  # fmt: skip
