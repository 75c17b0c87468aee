"""A rank's session with its caches on the device: loads, lease words, new pages, digests of what arrived; the same as on the processor."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
from tests.pairs.small import engine
from tests.unit.session.world import (
    KIND,
    OPTIONS,
    SLOT,
    WORD,
    Clock,
    FakePeers,
    Side,
    World,
    collect,
    meet,
    order_load,
)

from bench.gpu.findings import Bench
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout
from kvreshard.plan.cost import CostModel
from kvreshard.session.commands import EndpointOptions
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.lease import LeaseTable
from kvreshard.session.mover import Staging
from kvreshard.testing.oracle import oracle_transfer
from kvreshard.testing.rank_memory import Block, make_block
from kvreshard.tools.observer import ObserverOptions, RankObserver
from kvreshard.transport.nixl import NixlTransport

STAGING_BYTES = 1 << 16
MANY_TURNS = 100_000
WATCHED = ObserverOptions(digest_share=1.0)


class DeviceWorld:
    """A source of two ranks with pages of 4 tokens, a destination of one with pages of 6, over NIXL, in this process."""

    def __init__(self, device: str, options: EndpointOptions, stack: contextlib.ExitStack) -> None:
        self.blocks: list[Block] = []
        self._device, self._options, self._stack = device, options, stack
        layouts = (
            engine(name, tp=tp, page=page, num_pages=24, kind=KIND, stages=(0, 0))
            for name, tp, page in (("prefill", 2, 4), ("decode", 1, 6))
        )
        self.world = World(Clock(), None, None, None, [], {}, [])  # type: ignore[arg-type]  # the network is NIXL
        self.world.src, self.world.dst = (self._side(layout, number) for number, layout in enumerate(layouts))
        for side in (self.world.src, self.world.dst):
            for endpoint in side.endpoints.values():
                endpoint.introduce(side.engine_metadata(), side.layout)
        stack.callback(self.world.close)

    def _side(self, layout: EngineLayout, seed: int) -> Side:
        side = Side(layout, {}, {}, {}, {})
        addresses, rng = {}, np.random.default_rng(seed)
        for rank in layout.ranks:
            (region,) = rank.regions
            seen, block = make_block(region.size_bytes + STAGING_BYTES, self._device)
            seen[:] = rng.integers(1, 256, len(seen), dtype=np.uint8)
            block.upload()
            self.blocks.append(block)
            side.memory[rank.rank, region.name] = seen[: region.size_bytes]
            addresses[rank.rank] = {region.name: block.region.address}
            transport = NixlTransport(f"{layout.engine}{rank.rank}", enter=block.enter)
            self._stack.callback(transport.close)
            table = LeaseTable(64)
            observer = RankObserver(rank.rank, block.memory, WATCHED, clock=self.world.clock)
            endpoint = Endpoint(
                rank.rank,
                transport,
                block.memory,
                self._options,
                table=table,
                staging=Staging(block.region.address + region.size_bytes, STAGING_BYTES),
                clock=self.world.clock,
                peers=FakePeers(self.world, rank.rank),
                observer=observer,
            )
            transport.register([block.region, table.region, *endpoint.regions])
            side.tables[rank.rank], side.transports[rank.rank] = table, transport  # type: ignore[assignment]
            side.endpoints[rank.rank], side.observers[rank.rank] = endpoint, observer
        side.layout = relocate(layout, addresses, self._device)
        return side

    def download(self) -> None:
        """See all memory as it is."""
        for block in self.blocks:
            block.download()

    def run(self) -> tuple[set[str], set[str], set[str]]:
        """Turn until the load is over: (received, kinds of failures, ends of comparisons)."""
        for _ in range(MANY_TURNS):
            self.world.turn(1)
            for endpoint in self.world.dst.endpoints.values():
                found = endpoint.collect()
                if found.received or found.failed:
                    return (
                        set(found.received),
                        {failure.kind for failure in found.failed.values()},
                        set(found.checks.values()),
                    )
        return set(), {"never ended"}, set()


def run(bench: Bench) -> None:
    """Each on the processor first where that is not the device."""
    for way, copy_s in (("direct", 1e-9), ("staged", 1.0)):
        options = dataclasses.replace(OPTIONS, cost=CostModel(copy_s=copy_s))
        with (
            bench.check(f"a {way} load: every byte, new pages zeroed, digests equal") as found,
            contextlib.ExitStack() as stack,
        ):
            made = DeviceWorld(bench.device, options, stack)
            world = made.world
            world.acquire_and_publish()
            before = {place: content.copy() for place, content in world.dst.memory.items()}
            wanted = order_load(world)
            expected = oracle_transfer(world.src.layout, world.dst.layout, world.src.memory, before, wanted)
            world.turn()
            meet(world)
            ended = made.run()
            made.download()
            wrong = sum(int((expected[place] != content).sum()) for place, content in world.dst.memory.items())
            found.figure(bytes_compared=sum(map(len, expected.values())), wrong_bytes=wrong, digest=", ".join(ended[2]))
            if ended != ({"d"}, set(), {"equal"}) or wrong:
                found.fail(f"received {ended[0]}, failures {ended[1]}, comparisons {ended[2]}, {wrong} wrong bytes")
        with bench.check(f"a {way} load whose lease is gone fails") as found, contextlib.ExitStack() as stack:
            made = DeviceWorld(bench.device, options, stack)
            world = made.world
            world.acquire_and_publish()
            world.src.turn()
            for table in world.src.tables.values():
                table[SLOT] = WORD + 1
            order_load(world)
            world.turn()
            meet(world)
            ended = made.run()
            found.figure(failure=", ".join(ended[1]))
            if ended[0] or ended[1] != {"stale lease"}:
                found.fail(f"received {ended[0]}, failures {ended[1]}")
            collect(world.src)
