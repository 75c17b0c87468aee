"""Caches as vLLM lays them out for a GPU's backends, made in the device's memory: route, move over NIXL, compare all bytes and every view.

The views were recorded from vLLM's own functions (`bench.gpu.record_views`). A description depends on a tensor's place below its storage,
shape, strides and device; the first three are compared with the recording, so that what was described there holds here.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.findings import Bench, Found
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout, wire
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.compile import compile_route
from kvreshard.plan.cost import usual_cost
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.transfer import pull
from kvreshard.testing.oracle import Bytes, differing_bytes, oracle_transfer, write_values
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.device import TensorMemory, allocate, enter_device
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport

STAGING_BYTES = 1 << 20


@dataclass
class _Engine:
    """One recorded engine with its caches on the device: storages by (rank, region), and the views of each rank by layer."""

    layout: EngineLayout
    storages: dict[tuple[int, str], Any]
    views: list[dict[str, Any]]
    tables: dict[str, list[int]]

    @staticmethod
    def of(recorded: dict[str, Any], device: str, found: Found) -> _Engine:
        layout = wire.decode(base64.b64decode(recorded["layout"]))
        storages, views = {}, []
        for rank, told in zip(layout.ranks, recorded["ranks"], strict=True):
            for name, size in told["regions"].items():
                storages[rank.rank, name] = allocate(size, device)
            views.append(
                {layer: _view(storages[rank.rank, view["region"]], view) for layer, view in told["views"].items()}
            )
            for layer, view in views[-1].items():
                storage = storages[rank.rank, told["views"][layer]["region"]]
                place = (view.data_ptr() - storage.data_ptr()) // view.element_size()
                if (place, list(view.shape), list(view.stride()), str(view.device)) != (
                    *(told["views"][layer][key] for key in ("offset", "shape", "stride")),
                    device,
                ):
                    found.fail(f"rank {rank.rank}, {layer}: the view on {device} is not the recorded one")
        addresses: dict[int, dict[str, int]] = {}
        for (number, name), storage in storages.items():
            addresses.setdefault(number, {})[name] = storage.data_ptr()
        return _Engine(relocate(layout, addresses, device), storages, views, recorded["tables"])

    def content(self) -> dict[tuple[int, str], Bytes]:
        """All bytes, as copies on the processor."""
        return {place: storage.cpu().numpy().copy() for place, storage in self.storages.items()}


def _view(storage: Any, told: dict[str, Any]) -> Any:
    import torch

    elements = torch.empty(0, dtype=getattr(torch, told["dtype"]), device=storage.device).set_(
        storage.untyped_storage()
    )
    return elements.as_strided(told["shape"], told["stride"], told["offset"])


def run(bench: Bench) -> None:
    """Every recorded pair."""
    from pathlib import Path

    recorded = json.loads(Path(__file__).parents[1].joinpath("views.json").read_text(encoding="utf-8"))
    for name, case in recorded.items():
        with bench.check(name) as found, contextlib.ExitStack() as stack:
            _case(bench, found, case, stack)


def _case(bench: Bench, found: Found, case: dict[str, Any], stack: contextlib.ExitStack) -> None:
    import torch

    src, dst = (_Engine.of(case[side], bench.device, found) for side in ("prefill", "decode"))
    wanted, rng = _request(src, dst, case["num_tokens"]), np.random.default_rng(0)
    contents = [
        {place: rng.integers(0, 256, len(storage), dtype=np.uint8) for place, storage in engine.storages.items()}
        for engine in (src, dst)
    ]
    write_values(src.layout, dst.layout, contents[0], wanted, 0)
    for engine, content in zip((src, dst), contents, strict=True):
        for place, storage in engine.storages.items():
            storage.copy_(torch.from_numpy(content[place]))
    expected = oracle_transfer(src.layout, dst.layout, contents[0], contents[1], wanted)
    num_read, num_staged = _move(bench, src, dst, wanted, stack)
    arrived = dst.content()
    wrong = differing_bytes(expected, arrived)
    if wrong:
        found.fail(f"bytes differ from the oracle's: {dict(list(wrong.items())[:2])}")
    compared = 0
    for rank, views, told in zip(dst.layout.ranks, dst.views, case["decode"]["ranks"], strict=True):
        for layer, view in views.items():
            there = _view(torch.from_numpy(expected[rank.rank, told["views"][layer]["region"]]), told["views"][layer])
            compared += view.numel()
            if not torch.equal(view.cpu().view(torch.uint8), there.contiguous().view(torch.uint8)):
                found.fail(f"rank {rank.rank}, {layer}: the view shows other values than the oracle's")
    if {place: bytes(content) for place, content in src.content().items()} != {
        place: bytes(content) for place, content in contents[0].items()
    }:
        found.fail("the source's memory has changed")
    found.figure(
        bytes_compared=sum(map(len, expected.values())),
        values_seen_through_views=compared,
        bytes_read=num_read,
        bytes_staged=num_staged,
    )


def _request(src: _Engine, dst: _Engine, num_tokens: int) -> Request:
    return Request(
        {name: PageTable(pages, num_tokens) for name, pages in src.tables.items()},
        {name: PageTable(pages, num_tokens) for name, pages in dst.tables.items()},
        {group.name: [(0, num_tokens)] for group in dst.layout.groups},
        {name: np.array(pages, dtype=np.int64) for name, pages in dst.tables.items()},
    )


def _move(bench: Bench, src: _Engine, dst: _Engine, wanted: Request, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Over NIXL, an agent per rank; (bytes read, bytes staged)."""
    agents: dict[tuple[str, int], NixlTransport] = {}
    for engine in (src, dst):
        for rank in engine.layout.ranks:
            agent = NixlTransport(f"{engine.layout.engine}-{rank.rank}", enter=lambda: enter_device(bench.device))
            stack.callback(agent.close)
            agent.register([MemoryRegion(region.address, region.size_bytes, region.device) for region in rank.regions])
            agents[engine.layout.engine, rank.rank] = agent
    read = staged = 0
    for rank in dst.layout.ranks:
        mine, route = (
            agents[dst.layout.engine, rank.rank],
            compile_route(src.layout, dst.layout, rank.rank, cost=usual_cost(bench.device)),
        )
        names = {other: f"{src.layout.engine}-{other}" for other in route.src_ranks}
        for other, name in names.items():
            mine.add_peer(name, agents[src.layout.engine, other].metadata())
        buffer = allocate(STAGING_BYTES, bench.device)
        mine.register([MemoryRegion(buffer.data_ptr(), STAGING_BYTES, bench.device)])
        tensors = [storage for (number, _), storage in dst.storages.items() if number == rank.rank]
        memory = HostMemory() if bench.device == "cpu" else TensorMemory([*tensors, buffer])
        moved = pull(Mover(mine, memory, names, Staging(buffer.data_ptr(), STAGING_BYTES)), route, wanted, dst.layout)
        read, staged = read + moved.num_read_bytes, staged + moved.num_staged_bytes
    return read, staged
