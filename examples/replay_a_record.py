"""Write the record of a load that failed, read it back, and do the load again without its engines.

An engine does the first part by itself (`flight_recorder_dir`); `kvreshard replay FILE` does the second.
"""

import time

from kvreshard import __version__
from kvreshard.model import wire
from kvreshard.testing.small import engine, request
from kvreshard.tools.flight import Flight, FlightFailure, FlightRequest, FlightSide, decode_flight, encode_flight
from kvreshard.tools.replay import replay

prefill, decode = engine("prefill", tp=2, page=4), engine("decode", page=6)
wanted = request(prefill, decode, num_tokens=13, new_pages=[2, 3, 4])

record = Flight(
    kvreshard=__version__,
    written_at_s=time.time(),
    rank=0,
    request="cmpl-1",
    source_request="cmpl-0",
    source_address="tcp://10.0.0.1:5600",
    failure=FlightFailure("transfer", "the network was cut"),
    src=FlightSide("prefill", "its life", {}, wire.encode(prefill)),
    dst=FlightSide("decode", "its life", {}, wire.encode(decode)),
    transfer=FlightRequest.of(wanted),
    is_routed=True,
)
message = encode_flight(record)
print(f"the record takes {len(message)} bytes")

outcome = replay(decode_flight(message))
print(f"its {outcome.copies.num_copies} copies follow from it; {outcome.outcome}: {outcome.reason}")
