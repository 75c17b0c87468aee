"""Two pairs of real engines that take turns on a small machine, without one disturbing the other.

Four engines of one model are up at the same time: prefill and decode with our connector, prefill and decode with the in-tree one.
All have vLLM's tiny models of `tests/e2e`, processes and settings. The pair whose turn it is not is stopped with SIGSTOP, since
every idle rank of the in-tree connector spins a thread of NIXL's on a core.

Those threads spin during their own pair's turn too, where there may be fewer cores than ranks. `make_yield` lets them run only on
cores that nobody else wants (SCHED_IDLE), as if there were cores to spare: the in-tree connector as it would be on a larger machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import processes
from tests.e2e.cases import IN_TREE, OURS
from tests.e2e.engine import Engine, EngineSpec, Output
from tests.e2e.engines import Nursery
from tests.e2e.router import PREFILL_PARAMS

MAX_MODEL_TOKENS = 2048
MAX_REQUESTS = 32
SETTLE_S = 0.03  # for processes that have just been woken up; a report of the last request takes some 5 ms
NUM_TOKENS = 3
IDLE_S = 0.5
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Seconds from the client's send to the prefill engine until the decode engine's process had the first
    token; `decode_s`: the part after the client's send to the decode engine.
    """

    total_s: float
    decode_s: float
    output: Output


class Pair:
    """Prefill and decode engine of one connector. Stopped, but for its turns."""

    def __init__(self, nursery: Nursery, model: str, prefill_tp: int, decode_tp: int, connector: str) -> None:
        self.engines: list[Engine] = []
        for tp, role in ((prefill_tp, "kv_producer"), (decode_tp, "kv_consumer")):
            arguments = (("max_model_len", MAX_MODEL_TOKENS), ("max_num_seqs", MAX_REQUESTS))
            spec = EngineSpec(model, tp=tp, connector=connector, role=role, arguments=arguments)
            self.engines.append(nursery.engine(spec))
        self.sleep()

    def wake(self) -> None:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)

    def turn(self, prompt: Sequence[int]) -> Turn:
        """One request through both engines. Raises AssertionError if either fails it."""
        turn = self.serve([prompt], 1)[1][0]
        return turn

    def serve(self, prompts: Sequence[Sequence[int]], num_clients: int) -> tuple[float, list[Turn]]:
        """All prompts, so many at a time: seconds until the last answer, and what became of each. Raises AssertionError if an engine fails one."""
        self.wake()
        began_s = time.monotonic()
        with ThreadPoolExecutor(num_clients) as clients:
            turns = list(clients.map(self._ask, prompts))
        took_s = time.monotonic() - began_s
        time.sleep(SETTLE_S)
        self.sleep()
        return took_s, turns

    def _ask(self, prompt: Sequence[int]) -> Turn:
        prefill, decode = self.engines
        sent_s = time.monotonic()
        first = prefill.wait(prefill.submit(prompt, 1, dict(PREFILL_PARAMS), prefill.new_id()))
        assert first.kv_transfer_params is not None, first
        handed_on_s = time.monotonic()
        output = decode.wait(decode.submit(prompt, NUM_TOKENS, first.kv_transfer_params, decode.new_id()))
        assert output.first_token_s is not None, output
        return Turn(output.first_token_s - sent_s, output.first_token_s - handed_on_s, output)

    def ordinary(self, prompts: Sequence[Sequence[int]]) -> list[Output]:
        """What the prefill engine answers by itself: nothing is transferred."""
        self.wake()
        outputs = self.engines[0].generate(prompts, NUM_TOKENS)
        self.sleep()
        return outputs

    def make_yield(self) -> int:
        """Let the threads that are busy while the pair idles run only where nobody else wants to; how many there are."""
        self.wake()
        spinning = [thread for engine in self.engines for thread in _spinning(engine)]
        for thread in spinning:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        self.sleep()
        return len(spinning)

    def _signal(self, number: signal.Signals) -> None:
        for engine in self.engines:
            engine.signal(number)


@contextmanager
def both_pairs(nursery: Nursery, model: str, prefill_tp: int, decode_tp: int) -> Iterator[tuple[Pair, Pair]]:
    """(ours, in-tree), ended afterwards. Raises EngineFailed."""
    try:
        theirs = Pair(nursery, model, prefill_tp, decode_tp, IN_TREE)
        yield Pair(nursery, model, prefill_tp, decode_tp, OURS), theirs
    finally:
        for engine in nursery.engines.values():
            engine.signal(signal.SIGCONT)
        nursery.stop_all()


def _spinning(engine: Engine) -> list[int]:
    """The busiest thread of each process that takes a tenth of a core or more although nobody asks the engine anything."""
    before = {pid: _ticks(pid) for pid in processes.members(engine.pid)}
    time.sleep(IDLE_S)
    found = []
    for pid, ticks in before.items():
        spent = {thread: count - ticks.get(thread, count) for thread, count in _ticks(pid).items()}
        thread = max(spent, key=lambda thread: spent[thread])
        if spent[thread] >= 0.1 * IDLE_S * CLOCK_TICKS:
            found.append(thread)
    return found


def _ticks(pid: int) -> dict[int, int]:
    """Processor time of each thread, in ticks."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found
