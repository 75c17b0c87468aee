"""Row n: reading while the prompt is computed, with real engines whose compute and link are both paced (`paced`).

Per case the same prompts go through one pair of engines after the prefill and beside it, in turns. What is judged is the exposed time, from
the last computed token to the loaded cache, as a share of the sequential one:

- by chunk, of N chunks, at least `max(1/N, 1 - s(N-1)/N)`, where s is the time of the prefill over that of the transfer;
- by layer in every chunk, of L layers, the same with N L in place of N.

s is what was measured: compute that is slower than its pace makes it larger. The first token is beside the same pair's sequential one,
and beside vLLM's push, which begins when the prefill has ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tests.releases import INSTALLED

from bench import bars
from bench.compare import interval
from bench.early_pairs import CACHE_BYTES, NUM_LAYERS, NUM_TOKENS, OURS, PUSHED, PacedPair, Paces, Passage, prompt
from bench.pace import Pace
from bench.results import Result, skipped
from kvreshard.session.lease import LeaseTable
from kvreshard.session.progress import ProgressBoard, StepProgress

ROW = "n early reads"
TIMELINE = Path(__file__).parent / "early_timeline.json"
PREFILL_S = 3.0
# Of each request in a step.
NEW_BLOCKS = [SimpleNamespace(block_id=number) for number in range(4)]
SHORT_SECONDS_PER_TOKEN = 0.002
CHUNK, LAYER = "by chunk", "by layer"
CASES = ((8, LAYER, 1.0), (8, CHUNK, 1.0))
ALL_CASES = (
    *((number, CHUNK, share) for number in (4, 8, 16) for share in (0.5, 1.0, 2.0)),
    *((number, LAYER, share) for number in (1, 4, 8) for share in (0.5, 1.0, 2.0)),
)
ROUNDS, ROUNDS_FULL = 3, 3


def run(release: str, full: bool) -> Iterator[Result]:
    """Each number of chunks with engines of its own. With the installed release only: what is measured is our own way."""
    if release != INSTALLED:
        return
    yield _followed(64)
    from tests.e2e.engine import EngineFailed
    from tests.e2e.engines import Nursery

    cases = ALL_CASES if full else CASES
    for number in dict.fromkeys(case[0] for case in cases):
        with Nursery() as nursery:
            try:
                paces = Paces()
                pair = PacedPair(nursery, paces, OURS, NUM_TOKENS // number)
                for warm in range(2):
                    pair.sequential(prompt(warm))
                    pair.early(prompt(warm))
                for chunks, how, share in cases:
                    if chunks == number:
                        yield from _measure(pair, paces, chunks, how, share, ROUNDS_FULL if full else ROUNDS)
                if number == 8:
                    yield _held(pair, paces, ROUNDS_FULL if full else ROUNDS)
                    yield _unpaced(paces, pair, 5 * (ROUNDS_FULL if full else ROUNDS))
                    yield _beside_push(nursery, paces, pair, ROUNDS_FULL if full else ROUNDS)
            except EngineFailed as error:
                yield skipped(
                    ROW, f"{number} chunks", f"an engine did not start or ended: {str(error).splitlines()[0]}"
                )


def _followed(num_requests: int) -> Result:
    """What a step of a prefill engine costs more while so many requests may be followed, on a rank and in the scheduler, whoever reads."""
    from tests.vllm.schedulers import full, groups, producer, request

    table, computed = LeaseTable(num_requests), [StepProgress(slot, slot + 1, 0, 192) for slot in range(num_requests)]
    board = ProgressBoard(table)
    for slot in range(num_requests):
        table[slot] = slot + 1
    rank_ms = 1e3 * _cpu_s(lambda: _step(board, computed))
    side = producer(groups(full(16)), slots=num_requests)
    held: dict[str, list[object]] = {}
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=held)]))
    asked = []
    for number in range(num_requests):
        params = {"do_remote_decode": True, "transfer_id": f"x{number}"}
        one = request(f"p-{number}", list(range(4096)), kv_transfer_params=params, num_computed_tokens=0)
        side.arrive(one)
        list(side.schedule(one))
        asked.append(one)
        held[one.request_id] = []

    def schedule() -> None:
        for one in asked:
            held[one.request_id].extend(NEW_BLOCKS)
        list(side.early.step({one.request_id: 64 for one in asked}, manager))

    schedule_ms = 1e3 * _cpu_s(schedule)
    return Result(
        ROW, f"{num_requests} requests followed, a step of {NUM_LAYERS} layers", rank_ms + schedule_ms, "ms CPU",
        bars=bars.followed(1e-3 * (rank_ms + schedule_ms)),
        details={"rank_ms": round(rank_ms, 4), "scheduler_ms": round(schedule_ms, 4)},
    )  # fmt: skip


def _step(board: ProgressBoard, computed: list[StepProgress]) -> None:
    board.begin(computed)
    for layer in range(NUM_LAYERS):
        board.layer(layer + 1)
    board.end()


def _cpu_s(work: Callable[[], None], times: int = 200) -> float:
    """Processor time of this thread for one call, after some."""
    for _ in range(10):
        work()
    began_s = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began_s) / times


def _measure(pair: PacedPair, paces: Paces, number: int, how: str, share: float, rounds: int) -> Iterator[Result]:
    paces.set(Pace(PREFILL_S / NUM_TOKENS, CACHE_BYTES * share / PREFILL_S, how == LAYER))
    after, beside = _take_turns(pair, rounds, num_warm=1)
    transfer_s = PREFILL_S / share
    measured = float(np.median([one.prefill_s for one in beside])) / transfer_s
    units = number * (NUM_LAYERS if how == LAYER else 1)
    bound = max(1 / units, 1 - measured * (units - 1) / units)
    exposed = [np.array([one.exposed_s for one in side]) for side in (beside, after)]
    ratio, low, high = interval(exposed[1] / exposed[0])
    name = f"{how}, {number} chunks, prefill {share:g} times the transfer"
    yield Result(
        ROW, name, float(np.median(exposed[0])), "s exposed", "sequential", float(np.median(exposed[1])), ratio, (low, high),
        bars.exposed(1 / ratio, bound),
        note=f"exposed {100 / ratio:.1f} % of sequential; at least {100 * bound:.1f} %",
        details={
            "bound": round(bound, 4), "prefill_over_transfer": round(measured, 3), "pairs": rounds,
            **_first_tokens(after, beside), "load": round(os.getloadavg()[0], 1),
        },
    )  # fmt: skip
    if (number, how, share) == (8, LAYER, 1.0):
        _keep_timeline({"sequential": after[-1], "early": beside[-1]})
        tokens = [np.array([one.first_token_s for one in side]) for side in (beside, after)]
        ratio, low, high = interval(tokens[1] / tokens[0])
        yield Result(
            ROW, "first token, by layer, 8 chunks", float(np.median(tokens[0])), "s", "sequential", float(np.median(tokens[1])), ratio,
            (low, high), bars.early_first_token((low, high), 1.6, "sequential"), details={"pairs": rounds},
        )  # fmt: skip


def _held(pair: PacedPair, paces: Paces, rounds: int) -> Result:
    """For how long an early load holds blocks where computing takes eight times as long as reading."""
    paces.set(Pace(PREFILL_S / NUM_TOKENS, 8 * CACHE_BYTES / PREFILL_S))
    after, beside = _take_turns(pair, rounds, 4000, num_warm=2)
    held, prefill = (np.array([getattr(one, name) for one in beside]) for name in ("held_s", "prefill_s"))
    ratio, low, high = interval(prefill / held)
    exposed = [round(float(np.median([one.exposed_s for one in side])), 3) for side in (beside, after)]
    return Result(
        ROW, "blocks held, by layer, 8 chunks, prefill 8 times the transfer", float(np.median(held)), "s", "the whole prefill",
        float(np.median(prefill)), ratio, (low, high), note=f"exposed {exposed[0]:g} s, sequential {exposed[1]:g} s",
        details={"pairs": rounds, "exposed_s": exposed},
    )  # fmt: skip


def _beside_push(nursery: object, paces: Paces, ours: PacedPair, rounds: int) -> Result:
    """First tokens beside vLLM's own push."""
    paces.set(Pace())
    theirs = PacedPair(nursery, paces, PUSHED, NUM_TOKENS // 8)  # type: ignore[arg-type]
    theirs.learn(prompt(1000))
    theirs.pushed(prompt(1001))
    paces.set(Pace(PREFILL_S / NUM_TOKENS, CACHE_BYTES / PREFILL_S))
    theirs.sleep()
    found = []
    for words in map(prompt, range(2000, 2001 + rounds)):
        mine_s = ours.early(words)
        ours.sleep()
        theirs.wake()
        found.append((mine_s, theirs.pushed(words)))
        theirs.sleep()
        ours.wake()
    theirs.wake()
    assert all(one.output.tokens == other.output.tokens for one, other in found)
    mine, pushed = (np.array([pair[side].first_token_s for pair in found[1:]]) for side in (0, 1))
    ratio, low, high = interval(pushed / mine)
    return Result(
        ROW, "first token, by layer, 8 chunks", float(np.median(mine)), "s", "NixlPushConnector", float(np.median(pushed)), ratio, (low, high),
        bars.early_first_token((low, high), 1.3, "in-tree push's"), details={"pairs": rounds},
    )  # fmt: skip


def _unpaced(paces: Paces, pair: PacedPair, rounds: int) -> Result:
    """A short prompt over a fast link: what following costs where there is little to hide.

    The compute is paced all the same: the idle processes of a decode engine spin on cores that a prefill on the CPU would use.
    """
    paces.set(Pace(SHORT_SECONDS_PER_TOKEN))
    tokens = 64
    turns = _take_turns(pair, rounds, 3000, tokens, num_warm=2)
    after, early = (np.array([one.first_token_s for one in side]) for side in turns)
    ratio, low, high = interval(after / early)
    return Result(
        ROW, f"first token of {tokens} tokens, link not paced", float(np.median(early)), "s", "sequential", float(np.median(after)), ratio,
        (low, high), bars.early_first_token((low, high), 0.97, "sequential"), details={"pairs": rounds},
    )  # fmt: skip


def _take_turns(
    pair: PacedPair, rounds: int, first: int = 100, num_tokens: int = NUM_TOKENS, *, num_warm: int
) -> tuple[list[Passage], list[Passage]]:
    """(sequential, early) of each prompt; who is first changes from prompt to prompt. Both must say the same.

    Before these, `num_warm` prompts teach the decode engine the new pace of the link: it takes blocks late where it knew a faster one.
    """
    after, beside = list[Passage](), list[Passage]()
    for number in range(num_warm + rounds):
        words = prompt(first + number)[:num_tokens]
        for is_early in (number % 2 == 0, number % 2 == 1):
            (beside if is_early else after).append(pair.early(words) if is_early else pair.sequential(words))
        assert beside[-1].output.tokens == after[-1].output.tokens
    return after[num_warm:], beside[num_warm:]


def _first_tokens(after: list[Passage], beside: list[Passage]) -> dict[str, object]:
    return {
        "first_token_s": [round(float(np.median([one.first_token_s for one in side])), 3) for side in (beside, after)],
        "prefill_s": [round(float(np.median([one.prefill_s for one in side])), 3) for side in (beside, after)],
    }


def _keep_timeline(passages: dict[str, Passage]) -> None:
    """For the picture (`plots`)."""
    drawn = {
        name: [*passage.events, {"event": "first token", "at_s": passage.first_token_s}]
        for name, passage in passages.items()
    }
    TIMELINE.write_text(json.dumps(drawn, default=float, indent=0))
