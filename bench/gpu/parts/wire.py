"""Which of UCX's transports carry the bytes, between device and device, device and host, in both directions?

UCX tells the protocol that it chose for every kind of operation (`UCX_PROTO_INFO`). Between two devices it must be `cuda_ipc`, for
reads too: the processor of the peer is several hundred times slower.
"""

from __future__ import annotations

import re

import numpy as np

from bench.gpu.findings import Bench
from kvreshard.plan.copies import CopyList
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import Direction

MEMORY_BYTES = 256 << 20
TOLD = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
PIECE_BYTES = 4 << 20
VERB = {Direction.READ: "read by ucp_get", Direction.WRITE: "write by ucp_put"}


def run(bench: Bench) -> None:
    """All pairs of devices, READ and WRITE, each of a few large pieces and of many small ones."""
    kinds = sorted({bench.device, "cpu"}, reverse=True)
    for local in kinds:
        for remote in kinds:
            with ProcessRanks(2, MEMORY_BYTES, environment=TOLD, devices=[local, remote]) as ranks:
                ranks.connect_all()
                ranks.attend(1, True)
                for direction in Direction:
                    _one(bench, ranks, direction)


def _one(bench: Bench, ranks: ProcessRanks, direction: Direction) -> None:
    local, remote = ranks.device(0), ranks.device(1)
    with bench.check(f"{local} {direction.name} {remote}") as found:
        at = np.arange(0, MEMORY_BYTES // 2, PIECE_BYTES, dtype=np.uint64)
        source, target = (1, 0) if direction is Direction.READ else (0, 1)
        addresses = ranks.address(source), ranks.address(target)
        content = np.random.default_rng(1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        ranks.memory(source)[:] = content
        ranks.give(source)
        large = CopyList.of(*(address + at for address in addresses), PIECE_BYTES)
        seconds = min(ranks.run(0, 1, direction, large).seconds or 1.0 for _ in range(3))
        arrived = ranks.memory(target)[: MEMORY_BYTES // 2]
        if not np.array_equal(arrived, content[: MEMORY_BYTES // 2]):
            found.fail(f"{int(np.count_nonzero(arrived != content[: MEMORY_BYTES // 2]))} bytes are not the source's")
        small = np.arange(2000, dtype=np.uint64) * np.uint64(8192)
        pieces = CopyList.of(*(address + small for address in addresses), 4096)
        each = min(ranks.run(0, 1, direction, pieces).seconds or 1.0 for _ in range(3)) / len(small)
        found.figure(gb_per_s=large.num_bytes / seconds / 1e9, us_per_piece_of_4_kib=each * 1e6)
        used = protocols(ranks.words(0), direction)
        found.figure(protocols="; ".join(used))
        if local.startswith("cuda") and remote.startswith("cuda") and not any("cuda_ipc" in one for one in used):
            found.fail(
                "cuda_ipc does not carry it: is UCX's CUDA module loaded, and does the owner's thread have a context?"
            )


def protocols(words: str, direction: Direction) -> list[str]:
    """What UCX tells of one direction: the description and transport of the largest sizes, each once.

    >>> protocols(
    ...     "[1] [vm:1 :0] | a intra-node cfg#1 |\\n[1] [vm:1 :0] | remote memory read by ucp_get*(multi) into cuda memory from host |\\n"
    ...     "[1] [vm:1 :0] | 0..inf | zero-copy | cuda_ipc/cuda |",
    ...     Direction.READ,
    ... )
    ['into cuda memory from host: zero-copy cuda_ipc/cuda']
    """
    found: dict[str, None] = {}
    title = ""
    for line in words.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1 and VERB[direction] in cells[0]:
            title = re.sub(r"^.*?(into|from) ", r"\1 ", cells[0])
        elif len(cells) == 1 and " by ucp_" in cells[0]:
            title = ""
        elif len(cells) == 3 and title and cells[0].endswith("inf"):
            found[f"{title}: {cells[1]} {cells[2]}".strip()] = None
    return list(found)
