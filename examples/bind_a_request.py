"""Bind one request to a route and look at its copies: which addresses go where, and which bytes are zeroed.

Prefill wrote 40 tokens to pages of 16, decode has pages of 24 and the first 8 tokens already.
"""

import numpy as np

from kvreshard import PageTable, Request, bind, compile_routes, describe, find_unwritten, load, parse_engine

model = load("llama-3.1-8b")
prefill = describe(model, parse_engine("tp=2,page=16"), "prefill")
decode = describe(model, parse_engine("tp=1,page=24"), "decode")
(route,) = compile_routes(prefill, decode)

request = Request(
    src_tables={"full": PageTable([7, 3, 12], num_tokens=40)},
    dst_tables={"full": PageTable([5, 9], num_tokens=40)},
    intervals={"full": [(8, 40)]},
    dst_new_pages={"full": np.array([9])},
)

copies = list(bind(route, request))
for part in copies:
    print(f"from prefill rank {part.src_rank}: {part.num_copies} copies, {part.num_bytes} bytes")
first = copies[0]
print(f"the first: {first.length[0]} bytes from {first.src_address[0]:#x} to {first.dst_address[0]:#x}")

zeroed = find_unwritten(decode, 0, request, copies)
print(f"{int((zeroed.stop - zeroed.start).sum())} bytes of page 9 hold no token and are zeroed")
