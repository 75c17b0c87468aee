"""Write the record of a load that failed, read it back, and do the load again without its engines.

An engine does the first part by itself (`flight_recorder_dir`); `kvreshard replay FILE` does the second.
It uses modules that are not public and may change in any release: a program that needs records runs the command with `--json`.
"""

import time

from kvreshard import __version__
from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import wire
from kvreshard.model.tables import PageTable, Request
from kvreshard.session.commands import Failure
from kvreshard.tools.flight import Flight, FlightSide, decode_flight, encode_flight
from kvreshard.tools.replay import replay

model = load("deepseek-v2-lite")
prefill = describe(model, parse_engine("tp=2"), "prefill", num_pages=8)
decode = describe(model, parse_engine("tp=1,page=24"), "decode", num_pages=8)
wanted = Request(
    src_tables={"latent": PageTable([4, 2], num_tokens=20)},
    dst_tables={"latent": PageTable([1], num_tokens=20)},
    intervals={"latent": [(0, 20)]},
    dst_new_pages={"latent": [1]},
)

record = Flight(
    kvreshard=__version__,
    written_at_s=time.time(),
    rank=0,
    request="cmpl-1",
    source_request="cmpl-0",
    source_address="tcp://10.0.0.1:5600",
    failure=Failure("transfer", "the network was cut"),
    src=FlightSide("prefill", "its instance id", {}, wire.encode(prefill)),
    dst=FlightSide("decode", "its instance id", {}, wire.encode(decode)),
    transfer=wanted,
    is_routed=True,
)
message = encode_flight(record)
print(f"the record takes {len(message)} bytes")

outcome = replay(decode_flight(message))
print(f"its {outcome.copies.num_copies} copies follow from it; {outcome.outcome}: {outcome.reason}")
