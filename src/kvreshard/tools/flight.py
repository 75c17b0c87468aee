"""The form of a flight record: one failed load on one rank, and how it is written and read back.

It is msgpack: everything from which `kvreshard replay` plans it again without the engines
(docs/flight-recorder.md). Both layouts as they travelled, facts, block tables, intervals, the failure and the events. Copies are not listed:
they follow from these.

Not in it: tokens, prompts, cached values, lease words, keys, and NIXL's metadata. Request ids, host names and addresses are.

Refused by `decode_flight` with WireError: anything else, another version included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import WireError
from kvreshard.model.request_form import Count
from kvreshard.model.tables import PageTable, Request

FORM = "kvreshard.flight"
VERSION = 1
# Two layouts of 64 ranks with 160 regions each take about 0.3 MB, two block tables of a million pages 8 MB. One of this size is made in 30 ms and
# 32 MB of memory.
MAX_FLIGHT_BYTES = 16 << 20
# Page ids are little-endian numbers of four bytes.
PAGE_BYTES = 4
MAX_PAGE = 2 ** (8 * PAGE_BYTES) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class FlightFailure(msgspec.Struct, frozen=True):
    """Why the load failed."""

    kind: str
    text: str
    is_quarantined: bool = False


class FlightEvent(msgspec.Struct, frozen=True, array_like=True):
    """`at_s`: seconds since the load was ordered."""

    at_s: float
    name: str
    text: str


class FlightSide(msgspec.Struct, frozen=True):
    """One engine: who it is, what it runs, and its layout as it came, in the form of `model.wire`."""

    engine: str
    instance_id: str
    compatibility: dict[str, str]
    layout: bytes


class FlightTable(msgspec.Struct, frozen=True):
    """A `PageTable`; its `pages` are numbers of `PAGE_BYTES` bytes."""

    pages: bytes
    num_tokens: Count
    first_page: Count


class FlightRequest(msgspec.Struct, frozen=True):
    """A `Request`; its new pages are written like those of a table."""

    src_tables: dict[str, FlightTable]
    dst_tables: dict[str, FlightTable]
    intervals: dict[str, list[tuple[Count, Count]]]
    dst_new_pages: dict[str, bytes]

    @classmethod
    def of(cls, request: Request) -> FlightRequest:
        """A request as it is recorded. Raises WireError for a page id that does not fit, or for more of them than a record holds."""
        listed = [table.pages for of in (request.src_tables, request.dst_tables) for table in of.values()]
        num_pages = sum(map(len, [*listed, *request.dst_new_pages.values()]))
        if num_pages * PAGE_BYTES > MAX_FLIGHT_BYTES:
            raise WireError(f"{num_pages} page ids; a flight record of {MAX_FLIGHT_BYTES} bytes does not hold them")

        def tables(of: Mapping[str, PageTable]) -> dict[str, FlightTable]:
            return {
                name: FlightTable(_page_bytes(table.pages), table.num_tokens, table.first_page)
                for name, table in of.items()
            }

        intervals = {name: [(int(a), int(b)) for a, b in pairs] for name, pairs in request.intervals.items()}
        new_pages = {name: _page_bytes(np.asarray(pages)) for name, pages in request.dst_new_pages.items()}
        return cls(tables(request.src_tables), tables(request.dst_tables), intervals, new_pages)

    def request(self) -> Request:
        """The request that was recorded. Raises BindError or WireError."""

        def tables(of: Mapping[str, FlightTable]) -> dict[str, PageTable]:
            return {name: PageTable(_pages(one.pages), one.num_tokens, one.first_page) for name, one in of.items()}

        new_pages = {name: _pages(pages) for name, pages in self.dst_new_pages.items()}
        return Request(tables(self.src_tables), tables(self.dst_tables), self.intervals, new_pages)


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `src` is None when the source was never met. `is_routed`: the two engines could be worked with."""

    form: str = FORM
    version: int = VERSION
    kvreshard: str
    written_at_s: float
    rank: Number
    request: str
    source_request: str
    source_address: str
    failure: FlightFailure
    dst: FlightSide
    src: FlightSide | None
    transfer: FlightRequest
    is_routed: bool
    staging_bytes: Number = 0
    allow_mismatch: list[str] = []
    events: list[FlightEvent] = []
    num_events_forgotten: Number = 0


class _Head(msgspec.Struct):
    form: str
    version: int


_encoder = msgspec.msgpack.Encoder()
_head_decoder, _decoder = msgspec.msgpack.Decoder(_Head), msgspec.msgpack.Decoder(Flight)


def encode_flight(flight: Flight) -> bytes:
    """The bytes of a record. Raises WireError for one that is too long."""
    message = _encoder.encode(flight)
    if len(message) > MAX_FLIGHT_BYTES:
        raise WireError(f"a flight record of {len(message)} bytes; more than {MAX_FLIGHT_BYTES} are not written")
    return message


def decode_flight(message: bytes) -> Flight:
    """The record. Raises WireError, never anything else."""
    try:
        head = _head_decoder.decode(message)
        if head.form != FORM:
            raise WireError(f"this is '{head.form[:80]}', not a '{FORM}'")
        if head.version != VERSION:
            raise WireError(
                f"flight record of version {head.version}; this command reads version {VERSION}: use the release that wrote it"
            )
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a flight record ({len(message)} bytes): {error}") from None


def _page_bytes(pages: NDArray[np.int64]) -> bytes:
    if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) <= MAX_PAGE:
        raise WireError(f"page ids from {int(pages.min())} to {int(pages.max())}; a record holds 0 to {MAX_PAGE}")
    return pages.astype(f"<u{PAGE_BYTES}").tobytes()


def _pages(content: bytes) -> NDArray[Any]:
    if len(content) % PAGE_BYTES:
        raise WireError(f"{len(content)} bytes of page ids; each has {PAGE_BYTES}")
    return np.frombuffer(content, f"<u{PAGE_BYTES}").astype(np.int64)
