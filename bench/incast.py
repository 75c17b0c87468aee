"""How fairly do many readers share one source, and how much of what it gives does each get?

    python -m bench.incast                       every case, as a table
    python -m bench.incast --json FILE           and its figures

1. One source process and several readers, each a process with a NIXL agent of its own; all start to read at one moment.
2. Each reader keeps so many transfers of 8 MiB on their way for some seconds, and counts the bytes that settled in them (`measure`); or
   it reads a given number of them, however long that takes (`read_all`). In the greedy cases the first reader keeps many more than the others.
3. Jain's index of the counts: 1 where all got as much, 1/n where one got everything.

Over shared memory (CMA) the readers' own processors copy; over TCP the source sends, and what it sends whom is its choice. There NIXL's
threads are left out: they poll without rest while a network reads, and what six readers' threads leave the source of two cores is no
share that it chose (docs/design/0020).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kvreshard.model.changed import replace
from kvreshard.plan.copies import CopyList
from kvreshard.transport.base import Direction, MemoryRegion, Transfer
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.nixl_agent import NixlOptions, usual_threads
from kvreshard.transport.posting import Pace

MEMORY_BYTES = 64 << 20
TRANSFER_BYTES = 8 << 20
PIECE_BYTES = 64 << 10
NUM_READERS = 6
GREEDY_DEPTH = 32
PATIENCE_S = 60.0
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class Case:
    """Readers that keep `depths[i]` transfers on their way. `network`: UCX's transports, "" for its own choice."""

    name: str
    network: str
    depths: tuple[int, ...]
    max_in_flight_bytes: int = Pace().max_in_flight_bytes


@dataclass(frozen=True)
class Shares:
    """Bytes that each reader got in the window, and the longest that one transfer of each took."""

    case: str
    seconds: float
    num_bytes: tuple[int, ...]
    slowest_s: tuple[float, ...]

    @property
    def jain(self) -> float:
        """1 for equal shares, 1 / readers where one got everything."""
        total, squares = sum(self.num_bytes), sum(count * count for count in self.num_bytes)
        return total * total / (len(self.num_bytes) * squares) if squares else 0.0

    @property
    def ratio(self) -> float:
        """The largest share over the smallest."""
        return max(self.num_bytes) / max(1, min(self.num_bytes))


EQUAL, GREEDY = (4,) * NUM_READERS, (GREEDY_DEPTH, *(1,) * (NUM_READERS - 1))
CASES = (
    Case("shared memory, equal", "", EQUAL),
    Case("shared memory, one greedy", "", GREEDY),
    Case("TCP, equal", "tcp", EQUAL),
    Case("TCP, one greedy", "tcp", GREEDY),
    Case("TCP, one greedy, bound of 8 MiB", "tcp", GREEDY, 8 << 20),
    Case("TCP, one greedy, no bound", "tcp", GREEDY, UNBOUNDED),
)


def _surroundings(network: str) -> None:
    os.environ.update(UCX_NET_DEVICES="lo", UCX_MODULES="^ib", NIXL_LOG_LEVEL="ERROR", UCX_LOG_LEVEL="error")
    if network:
        os.environ["UCX_TLS"] = network


def _options(network: str) -> NixlOptions:
    return NixlOptions(num_threads=usual_threads(network))


def _source(pipe: Connection, network: str) -> None:
    _surroundings(network)
    memory = np.full(MEMORY_BYTES, 7, np.uint8)
    transport = NixlTransport("incast-source", _options(network))
    transport.register([MemoryRegion(int(memory.ctypes.data), memory.nbytes)])
    transport.set_attentive(True)
    pipe.send((transport.metadata(), int(memory.ctypes.data)))
    pipe.recv()
    transport.close()


def _reader(pipe: Connection, case: Case, depth: int, num_transfers: int | None) -> None:
    _surroundings(case.network)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    slices = UNBOUNDED if case.max_in_flight_bytes == UNBOUNDED else Pace().max_in_flight
    pace = Pace(max_in_flight=slices, max_in_flight_bytes=case.max_in_flight_bytes)
    transport = NixlTransport("incast-reader", replace(_options(case.network), pace=pace))
    here = int(memory.ctypes.data)
    transport.register([MemoryRegion(here, memory.nbytes)])
    metadata, there = pipe.recv()
    transport.add_peer("source", metadata)
    offsets = np.arange(0, TRANSFER_BYTES, PIECE_BYTES, dtype=np.uint64)
    num_places = MEMORY_BYTES // TRANSFER_BYTES

    def post(number: int) -> Transfer:
        base = np.uint64(number % num_places * TRANSFER_BYTES)
        copies = CopyList.of(np.uint64(there) + base + offsets, np.uint64(here) + base + offsets, PIECE_BYTES)
        return transport.post("source", Direction.READ, copies)

    post(0).wait(PATIENCE_S)  # connections are made with the first bytes
    pipe.send("ready")
    start_s, end_s = pipe.recv()
    while time.monotonic() < start_s:
        pass
    at_most = sys.maxsize if num_transfers is None else num_transfers
    flying = deque(post(number) for number in range(min(depth, at_most)))
    number, num_bytes, slowest_s = len(flying), 0, 0.0
    while flying and time.monotonic() < end_s:
        done = flying.popleft()
        done.wait(PATIENCE_S)
        slowest_s = max(slowest_s, done.seconds or 0.0)
        num_bytes += done.num_bytes if time.monotonic() < end_s else 0
        if number < at_most:
            flying.append(post(number))
            number += 1
    for left in flying:
        transport.cancel(left)
    pipe.send((num_bytes, slowest_s))
    pipe.recv()
    transport.close()
    assert memory[:TRANSFER_BYTES].min() == 7, "what was read is not what the source has"


def measure(case: Case, seconds: float = 3.0) -> Shares:
    """What each reader gets within some seconds."""
    return _run(case, seconds, None)


def read_all(case: Case, num_transfers: int) -> Shares:
    """What each reader has got when it has read so many transfers, or given up."""
    return _run(case, PATIENCE_S, num_transfers)


def _run(case: Case, seconds: float, num_transfers: int | None) -> Shares:
    """Run one case in processes of its own."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(1 + len(case.depths)):
        ours, theirs = spawn.Pipe()
        target = (
            (_source, (theirs, case.network))
            if number == 0
            else (_reader, (theirs, case, case.depths[number - 1], num_transfers))
        )
        process = spawn.Process(target=target[0], args=target[1], daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        where = _heard(pipes[0])
        for pipe in pipes[1:]:
            pipe.send(where)
        for pipe in pipes[1:]:
            _heard(pipe)
        start_s = time.monotonic() + 0.2
        for pipe in pipes[1:]:
            pipe.send((start_s, start_s + seconds))
        found = [_heard(pipe) for pipe in pipes[1:]]
        for pipe in reversed(pipes):
            pipe.send("end")
    finally:
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
    return Shares(case.name, seconds, tuple(count for count, _ in found), tuple(longest for _, longest in found))


def _heard(pipe: Connection) -> tuple:
    if not pipe.poll(2 * PATIENCE_S):
        raise TimeoutError(f"a process of the incast has said nothing for {2 * PATIENCE_S:g} s")
    return pipe.recv()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How fairly do many readers share one source?")
    parser.add_argument("words", nargs="*", help="only cases whose name has one of these words")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = []
    for case in CASES:
        if options.words and not any(word in case.name for word in options.words):
            continue
        shares = measure(case, options.seconds)
        found.append(shares)
        rates = ", ".join(f"{count / shares.seconds / 1e6:.0f}" for count in shares.num_bytes)
        print(f"{case.name:34} Jain {shares.jain:.3f}  max/min {shares.ratio:6.2f}  MB/s {rates}", flush=True)
    if options.json:
        rows = [{**asdict(shares), "jain": shares.jain, "ratio": shares.ratio} for shares in found]
        options.json.write_text(json.dumps({"kind": "incast", "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
