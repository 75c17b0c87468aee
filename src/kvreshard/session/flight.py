"""What does a flight record hold, and how is it read back?

One failed load on one rank, as msgpack: everything that `kvreshard replay` needs to do it again without the engines
(docs/flight-recorder.md). Both layouts in their own wire form, facts, block tables, intervals, the failure, the events, and a
digest of the copy list, with the list itself when it is short.

Not in it: tokens, prompts, cached values, lease words, keys, and NIXL's metadata. Request ids, host names and addresses are.

Refused by `decode_flight` with WireError: anything else, a later version included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np

from kvreshard.model.errors import WireError
from kvreshard.model.request_form import RequestForm
from kvreshard.plan.copies import CopyList

FORM = "kvreshard.flight"
VERSION = 1
# Two layouts of 64 ranks take about 1 MB, a million tokens' block tables some MB.
MAX_FLIGHT_BYTES = 32 << 20
MAX_KEPT_COPIES = 4096
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
    """One engine: who it is, what it runs, and its layout in the form of `model.wire`."""

    engine: str
    incarnation: str
    facts: dict[str, str]
    layout: bytes


class FlightCopies(msgspec.Struct, frozen=True):
    """The copy list of the load on this rank. `rows`: the list itself when it is short.

    A row is (source rank, destination rank, source address, destination address, length). The digest is over the rows in
    ascending order, each as five little-endian 64-bit numbers.
    """

    num_copies: Number
    num_bytes: Number
    digest: str
    rows: list[tuple[Number, Number, Number, Number, Number]] | None = None


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `src` is None when the source was never met, `copies` when there is no list, for `copies_error`."""

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
    transfer: RequestForm
    copies: FlightCopies | None
    copies_error: str = ""
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
    """The bytes of a record; without its copy list where that would make it too long. Raises WireError beyond that."""
    message = _encoder.encode(flight)
    if len(message) > MAX_FLIGHT_BYTES and flight.copies is not None:
        message = _encoder.encode(
            msgspec.structs.replace(flight, copies=msgspec.structs.replace(flight.copies, rows=None))
        )
    if len(message) > MAX_FLIGHT_BYTES:
        raise WireError(f"a flight record of {len(message)} bytes; more than {MAX_FLIGHT_BYTES} are not written")
    return message


def decode_flight(message: bytes) -> Flight:
    """The record. Raises WireError, never anything else."""
    try:
        head = _head_decoder.decode(message)
        if head.form != FORM:
            raise WireError(f"this is '{head.form[:80]}', not a '{FORM}'")
        if not 1 <= head.version <= VERSION:
            raise WireError(
                f"flight record of version {head.version}; this command reads versions 1 to {VERSION}: upgrade kvreshard"
            )
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a flight record ({len(message)} bytes): {error}") from None


def summarize(lists: Iterable[CopyList], max_rows: int = MAX_KEPT_COPIES) -> FlightCopies:
    """What a record keeps of a copy list."""
    tables = [
        np.stack(
            [
                np.full(len(part.length), part.src_rank, dtype=np.int64),
                np.full(len(part.length), part.dst_rank, dtype=np.int64),
                part.src_address,
                part.dst_address,
                part.length,
            ],
            axis=1,
        )
        for part in lists
    ]
    rows = np.concatenate(tables) if tables else np.zeros((0, 5), dtype=np.int64)
    rows = rows[np.lexsort(rows.T[::-1])]
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
    kept = [tuple(row) for row in rows.tolist()] if len(rows) <= max_rows else None
    return FlightCopies(len(rows), int(rows[:, 4].sum()), digest, kept)
