"""Check a transfer without sending the data again: digests of both sides agree exactly when the cells do.

Each side reads its own memory and its own block tables only; page sizes, orders and parallel sizes may all differ.
"""

import numpy as np

from kvreshard import (
    HostMemory,
    PageTable,
    Request,
    compare,
    compile_routes,
    describe,
    digest_transfers,
    load,
    oracle_transfer,
    parse_engine,
    relocate,
)

model = load("deepseek-v2-lite")
prefill = describe(model, parse_engine("tp=1"), "prefill", num_pages=4)
decode = describe(model, parse_engine("tp=1,page=24"), "decode", num_pages=4)
request = Request(
    src_tables={"latent": PageTable([3, 1], num_tokens=20)},
    dst_tables={"latent": PageTable([2], num_tokens=20)},
    intervals={"latent": [(0, 20)]},
    dst_new_pages={},
)
rng = np.random.default_rng(0)
src_memory = {(0, "kv"): rng.integers(0, 256, prefill.ranks[0].regions[0].size_bytes, dtype=np.uint8)}
dst_memory = {(0, "kv"): np.zeros(decode.ranks[0].regions[0].size_bytes, dtype=np.uint8)}
sent, arrived = src_memory[0, "kv"], oracle_transfer(prefill, decode, src_memory, dst_memory, request)[0, "kv"]

# Digests are read at addresses: say where these arrays are.
prefill = relocate(prefill, {0: {"kv": sent.ctypes.data}})
decode = relocate(decode, {0: {"kv": arrived.ctypes.data}})
(route,) = compile_routes(prefill, decode)


def verdict():
    key = b"one key per request"
    return compare(*(digest_transfers(route.transfers, side, request, HostMemory(), key) for side in ("src", "dst")))


print("as it arrived:", "equal" if verdict().equal else "wrong")
arrived[arrived.nonzero()[0][1000]] ^= 1
print("with one bit flipped:", "equal" if verdict().equal else f"wrong, {verdict().differences[0].part}")
