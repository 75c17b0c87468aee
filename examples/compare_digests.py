"""Check a transfer without sending the data again: digests of both sides agree exactly when the cells do.

Each side reads its own memory and its own block tables only; page sizes, orders and parallel sizes may all differ.
"""

import numpy as np

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import compile_route
from kvreshard.testing.oracle import oracle_transfer
from kvreshard.tools import ArrayBytes, compare, digest_lanes

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
arrived = oracle_transfer(prefill, decode, src_memory, dst_memory, request)[0, "kv"]

lanes = compile_route(prefill, decode, 0).lanes
key = b"one key per request"


def digests(side: str, address: int, content: np.ndarray) -> dict:
    return digest_lanes(lanes, side, request, ArrayBytes({address: content}), key)


sent = digests("src", prefill.ranks[0].regions[0].address, src_memory[0, "kv"])
print(
    "as it arrived:",
    "equal" if compare(sent, digests("dst", decode.ranks[0].regions[0].address, arrived)).equal else "wrong",
)

arrived[arrived.nonzero()[0][1000]] ^= 1
verdict = compare(sent, digests("dst", decode.ranks[0].regions[0].address, arrived))
print("with one bit flipped:", "equal" if verdict.equal else f"wrong, {verdict.differences[0].part}")
