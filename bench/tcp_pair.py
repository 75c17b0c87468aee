"""Mooncake's transfer engine and ours, both over TCP on the loopback interface, in processes of their own.

`python -m bench.tcp_pair` starts the source as another process (`... source`), reads the same scattered pieces of its memory in turn
by both, compares the bytes, and prints one line of JSON per size of a piece. UCX takes its transports from the environment when
it is loaded, so this cannot be the process that measures everything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import numpy as np

from bench.compare import compare
from kvreshard.plan.copies import CopyList
from kvreshard.transport.base import Direction, MemoryRegion
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.nixl_agent import NixlOptions, usual_threads

HOST = "127.0.0.1"
MEMORY_BYTES = 128 << 20
SIZES = ((4096, 2048), (64 << 10, 512), (16 << 20, 4))
# Mooncake 0.3.13 rejects what exceeds the queue of a TCP lane.
MAX_BATCH = 64
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR"}


class Both:
    """One process: memory that both engines know."""

    def __init__(self) -> None:
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.engine: Any = import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine does not start")
        if self.engine.register_memory(self.address, MEMORY_BYTES):
            raise RuntimeError("Mooncake does not register the memory")
        # NIXL's threads would poll two cores without rest for as long as the network reads (docs/design/0020).
        self.transport = NixlTransport("tcp", NixlOptions(num_threads=usual_threads(ENVIRONMENT["UCX_TLS"])))
        self.transport.register([MemoryRegion(self.address, MEMORY_BYTES)])


def serve() -> None:
    """The source: says where it is, then waits until its input ends."""
    both = Both()
    both.memory[:] = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    told = {
        "port": both.engine.get_rpc_port(),
        "address": both.address,
        "metadata": both.transport.metadata().hex(),
    }
    both.transport.set_attentive(True)  # as a source with a lease is
    print("READY " + json.dumps(told), flush=True)
    sys.stdin.read()
    both.transport.close()
    os._exit(0)  # Mooncake's threads do not end by themselves


def measure() -> None:
    """The destination."""
    source = subprocess.Popen(
        [sys.executable, "-m", "bench.tcp_pair", "source"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert source.stdout is not None
    told = next(json.loads(line[6:]) for line in source.stdout if line.startswith("READY "))
    both = Both()
    both.transport.add_peer("source", bytes.fromhex(told["metadata"]))
    expected = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    target = f"{HOST}:{told['port']}"
    for size, count in SIZES:
        offsets = np.random.default_rng(0).permutation(MEMORY_BYTES // size)[:count].astype(np.int64) * size
        here, there = both.address + offsets, told["address"] + offsets

        def ours() -> None:
            copies = CopyList.of(there, here, size)  # noqa: B023 (called here)
            both.transport.post("source", Direction.READ, copies).wait(120)

        def theirs() -> None:
            for low in range(0, count, MAX_BATCH):  # noqa: B023
                part = slice(low, low + MAX_BATCH)
                told = here[part].tolist(), there[part].tolist(), [size] * len(here[part])  # noqa: B023
                if both.engine.batch_transfer_sync_read(target, *told):
                    raise RuntimeError("Mooncake's read failed")

        for work in (ours, theirs):
            both.memory[:] = 0
            work()
            for offset in offsets.tolist():
                assert np.array_equal(both.memory[offset : offset + size], expected[offset : offset + size])
        found = compare(ours, theirs, pairs=9, budget_s=5)
        line = {
            "size": size, "count": count, "ours_s": found.ours.wall_s, "theirs_s": found.theirs.wall_s, "ratio": found.wall_ratio,
            "cpu_ratio": found.cpu_ratio, "pairs": found.pairs,
        }  # fmt: skip
        print("RESULT " + json.dumps(line), flush=True)
    both.transport.close()
    source.communicate(timeout=20)
    os._exit(0)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    serve() if sys.argv[1:] == ["source"] else measure()
