"""The form of a flight record: one failed load on one rank (docs/flight-recorder.md), as msgpack.

A record holds all that `kvreshard replay` needs to plan the load again without the engines. Copies are not listed: they follow from the
layouts and the request. Tokens, prompts, cached values, lease words, keys and NIXL's metadata are not in it. Request ids, host names and
addresses are.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError, WireError
from kvreshard.model.form import Head
from kvreshard.model.ownership import MAX_SIZE
from kvreshard.model.tables import Request
from kvreshard.session.commands import Failure
from kvreshard.session.engine_metadata import EngineMetadata

FORM = "kvreshard.flight"
VERSION = 1
# Two layouts of 64 ranks with 160 regions each take about 0.3 MB, two block tables of a million pages 8 MB. A record of this size takes
# 30 ms and 32 MB of memory to write.
MAX_FLIGHT_BYTES = 16 << 20
# Page ids are little-endian numbers of four bytes.
PAGE_BYTES = 4
MAX_PAGE = 2 ** (8 * PAGE_BYTES) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# No NaN, and below the year 5139: a time that can be written as a date.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class FlightEvent(msgspec.Struct, frozen=True, array_like=True):
    """`at_s`: seconds since the load was commanded."""

    at_s: Seconds
    name: str
    text: str


class FlightSide(msgspec.Struct, frozen=True):
    """One engine. `layout`: as it travelled, in the form of `model.wire`."""

    engine: str
    instance_id: str
    compatibility: dict[str, str]
    layout: bytes
    accepts: dict[str, list[str]] = {}

    @classmethod
    def of(cls, metadata: EngineMetadata) -> FlightSide:
        """What a record holds of an engine's metadata."""
        return cls(
            metadata.engine, metadata.instance_id, dict(metadata.compatibility), metadata.layout, metadata.accepts
        )


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `src` is None when the source's metadata never arrived. `is_routed`: there was a route from it."""

    form: str = FORM
    version: int = VERSION
    kvreshard: str
    written_at_s: Seconds
    rank: Number
    request: str
    source_request: str
    source_address: str
    failure: Failure
    dst: FlightSide
    src: FlightSide | None
    transfer: Request
    is_routed: bool
    staging_bytes: Number = 0
    allow_mismatch: list[str] = []
    events: list[FlightEvent] = []
    num_events_forgotten: Number = 0


def encode_flight(flight: Flight) -> bytes:
    """The bytes of a record. Raises WireError for one that is too long, or for a page id that does not fit."""
    wanted = flight.transfer
    listed = [table.pages for table in chain(wanted.src_tables.values(), wanted.dst_tables.values())]
    new_pages = {name: np.asarray(pages) for name, pages in wanted.dst_new_pages.items()}
    num_pages = sum(map(len, [*listed, *new_pages.values()]))
    if num_pages * PAGE_BYTES > MAX_FLIGHT_BYTES:
        raise WireError(f"{num_pages} page ids; a flight record of {MAX_FLIGHT_BYTES} bytes does not hold them")
    wanted = msgspec.structs.replace(wanted, dst_new_pages=new_pages)
    message = _encoder.encode(msgspec.structs.replace(flight, transfer=wanted))
    if len(message) > MAX_FLIGHT_BYTES:
        raise WireError(f"a flight record of {len(message)} bytes; more than {MAX_FLIGHT_BYTES} are not written")
    return message


def decode_flight(message: bytes) -> Flight:
    """The record. Raises WireError for anything else, another version included."""
    try:
        _head_decoder.decode(message).check(FORM, VERSION, "use the release that wrote it")
        flight = _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BindError) as error:
        raise WireError(f"not a flight record ({len(message)} bytes): {error}") from None
    _check_sizes(flight.transfer)
    return flight


def _check_sizes(wanted: Request) -> None:
    tables = [*wanted.src_tables.values(), *wanted.dst_tables.values()]
    counts = [count for table in tables for count in (table.num_tokens, table.first_page)]
    ends = [stop for intervals in wanted.intervals.values() for _, stop in intervals]
    largest = max([*counts, *ends], default=0)
    if largest > MAX_SIZE:
        raise WireError(f"not a flight record: a table or an interval reaches {largest}; at most {MAX_SIZE}")


def _encode_pages(pages: Any) -> bytes | int:
    if isinstance(pages, np.integer):  # the end of an interval
        return int(pages)
    if not isinstance(pages, np.ndarray):
        raise NotImplementedError(f"a flight record holds no {type(pages).__name__}")
    if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) <= MAX_PAGE:
        raise WireError(f"page ids from {int(pages.min())} to {int(pages.max())}; a record holds 0 to {MAX_PAGE}")
    return pages.astype(f"<u{PAGE_BYTES}").tobytes()


def _decode_pages(_: type, content: Any) -> NDArray[np.int64]:
    if not isinstance(content, bytes) or len(content) % PAGE_BYTES:
        size = len(content) if isinstance(content, bytes) else "no"
        raise WireError(f"{size} bytes of page ids; each has {PAGE_BYTES}")
    return np.frombuffer(content, f"<u{PAGE_BYTES}").astype(np.int64)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_pages)
_head_decoder = msgspec.msgpack.Decoder(Head)
_decoder = msgspec.msgpack.Decoder(Flight, dec_hook=_decode_pages)
