"""Move one request between two engines in this process: real memory, the transport for tests, no GPU and no NIXL.

With NIXL, `NixlTransport` takes the place of `MemoryTransport`, and metadata travels between processes; the rest is the same.
"""

import numpy as np

from kvreshard import (
    EngineLayout,
    Fabric,
    HostMemory,
    MemoryRegion,
    MemoryTransport,
    Mover,
    PageTable,
    Request,
    compile_routes,
    describe,
    load,
    parse_engine,
    pull,
    relocate,
)


def allocate(layout: EngineLayout) -> tuple[EngineLayout, dict[int, np.ndarray]]:
    """Memory for every rank, and the layout with its addresses in place of the made-up ones."""
    memory = {rank.rank: np.zeros(rank.regions[0].size_bytes, dtype=np.uint8) for rank in layout.ranks}
    return relocate(layout, {rank: {"kv": array.ctypes.data} for rank, array in memory.items()}), memory


model = load("deepseek-v2-lite")
prefill, prefill_memory = allocate(describe(model, parse_engine("tp=2"), "prefill", num_pages=8))
decode, decode_memory = allocate(describe(model, parse_engine("tp=1,page=24"), "decode", num_pages=8))
for array in prefill_memory.values():
    array[:] = 7  # what the prefill engine computed

fabric = Fabric()
transports = {}
for layout, memory in ((prefill, prefill_memory), (decode, decode_memory)):
    for rank, array in memory.items():
        transport = MemoryTransport(fabric, f"{layout.engine}-{rank}")
        transport.register([MemoryRegion(array.ctypes.data, array.nbytes)])
        transports[layout.engine, rank] = transport

reader = transports["decode", 0]
peers = {rank: f"prefill-{rank}" for rank in prefill_memory}
for rank, name in peers.items():
    reader.add_peer(name, transports["prefill", rank].metadata())
    transports["prefill", rank].add_peer("decode-0", reader.metadata())

request = Request(
    src_tables={"latent": PageTable([4, 2], num_tokens=20)},
    dst_tables={"latent": PageTable([1], num_tokens=20)},
    intervals={"latent": [(0, 20)]},
    dst_new_pages={"latent": np.array([1])},
)
(route,) = compile_routes(prefill, decode)
moved = pull(Mover(reader, HostMemory(), peers), route, request, decode, report=b"request 0")

print(f"moved {moved.num_bytes} bytes in {moved.num_copies} copies")
print(f"arrived: {int((decode_memory[0] == 7).sum())} bytes")
for rank in peers:
    told = [message.payload for message in transports["prefill", rank].notifications()]
    print(f"prefill rank {rank} was told: {told}")
