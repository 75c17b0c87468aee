"""The registered regions of one rank, and the region in which each copy lies.

1. `RegionTable` sorts the regions by address once; overlaps are refused, so a binary search has one answer.
2. `locate` finds the region of every copy at once (NumPy, no loop over copies) and checks its end.
3. `Metadata` carries a table to a peer, versioned and bounded.

Refused: overlapping regions, copies outside, copies that cross from one region to the next (a NIXL descriptor must
lie in one registration), metadata that is malformed, too large or of a later version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.expect import expect
from kvreshard.model.form import SAME_RELEASE
from kvreshard.plan.copies import Int64s
from kvreshard.transport.base import MemoryRegion, TransportError

METADATA_VERSION = 1

MAX_METADATA_BYTES = 64 * 1024 * 1024
# Of one rank: twice as many as its layout may have. Real engines register a few hundred. A region takes a byte of a message, and 60 times as
# much where it is read.
MAX_REGIONS = 1 << 15


class RegionTable:
    """Registered regions of one rank, sorted by address. Immutable."""

    __slots__ = ("_last", "_start", "device", "devices", "regions")

    def __init__(self, regions: Iterable[MemoryRegion] = ()) -> None:
        # In the order of their addresses.
        self.regions = tuple(sorted(regions, key=lambda region: region.address))
        self._start = np.array([region.address for region in self.regions], dtype=np.int64)
        # The last byte, not the end: an end of 2^63 has no int64.
        self._last = np.array([region.end - 1 for region in self.regions], dtype=np.int64)
        self.devices = tuple([region.device for region in self.regions])
        # The device that all regions lie on; None where they differ.
        self.device = self.devices[0] if len(set(self.devices)) == 1 else None
        for at in np.flatnonzero(self._last[:-1] >= self._start[1:]).tolist():
            lower, upper = self.regions[at : at + 2]
            raise TransportError(f"region {upper} overlaps region {lower}; register each allocation once")

    def plus(self, regions: Iterable[MemoryRegion]) -> RegionTable:
        """A table with `regions` added."""
        return RegionTable((*self.regions, *regions))

    def minus(self, regions: Iterable[MemoryRegion]) -> RegionTable:
        """A table without `regions`; raises `TransportError` if one of them is not in this one."""
        rest = list(self.regions)
        for region in regions:
            if region not in rest:
                raise TransportError(
                    f"region {region} is not registered; deregister what was registered: {self.describe()}"
                )
            rest.remove(region)
        return RegionTable(rest)

    def has(self, start: int, stop: int) -> bool:
        """Whether one region has all the bytes `[start, stop)`."""
        region = bisect_right(self._start, start) - 1
        return region >= 0 and stop - 1 <= int(self._last[region])

    def locate(self, side: str, address: Int64s, length_bytes: Int64s) -> NDArray[np.intp]:
        """The index into `regions` for each copy, shape (n,). Addresses are not negative, lengths positive.

        Raises:
            TransportError: a copy is not inside one region; `side` ("local", "remote of 'x'") names whose.
        """
        index = self._start.searchsorted(address, side="right") - 1
        if not address.size:
            return index
        # Below all regions the index is -1, which is the last of them: its end says nothing then.
        if not self.devices or index.min() < 0 or (length_bytes - 1 > self._last[index] - address).any():
            raise self._outside(side, address, length_bytes, index)
        return index

    def _outside(self, side: str, address: Int64s, length_bytes: Int64s, index: NDArray[np.intp]) -> TransportError:
        inside = index >= 0
        if self.devices:
            inside &= length_bytes - 1 <= self._last[index] - address
        outside = np.flatnonzero(~inside)
        row = int(outside[0])
        start = int(address[row])
        return TransportError(
            f"copy {row} of {address.size}: {side} [{start:#x}, {start + int(length_bytes[row]):#x}) is not "
            f"inside one registered region ({outside.size} such copies); registered: {self.describe()}; "
            "register the memory before metadata() is taken, and cut copies where a region ends"
        )

    def describe(self) -> str:
        """The regions in words, at most four of them."""
        if not self.regions:
            return "none"
        more = f" and {len(self.regions) - 4} more" if len(self.regions) > 4 else ""
        return ", ".join(str(region) for region in self.regions[:4]) + more


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What `Transport.metadata()` carries: who, which kind of transport, which regions, and the kind's own bytes.

    `addresses`, `sizes_bytes`, `devices`: of each region; one device stands for all.
    """

    version: int = METADATA_VERSION
    kind: str
    name: str
    addresses: Annotated[list[int], msgspec.Meta(max_length=MAX_REGIONS)]
    sizes_bytes: Annotated[list[int], msgspec.Meta(max_length=MAX_REGIONS)]
    devices: Annotated[list[str], msgspec.Meta(max_length=MAX_REGIONS)]
    native: bytes = b""

    def table(self) -> RegionTable:
        """The regions, checked."""
        devices = self.devices * len(self.addresses) if len(self.devices) == 1 else self.devices
        if not len(self.addresses) == len(self.sizes_bytes) == len(devices):
            raise TransportError(
                f"peer {self.name!r} gives {len(self.addresses)} addresses, {len(self.sizes_bytes)} sizes and {len(devices)} devices of "
                "its regions; run the same releases of kvreshard and NIXL on both sides"
            )
        return RegionTable(map(MemoryRegion, self.addresses, self.sizes_bytes, devices))


def encode_metadata(kind: str, name: str, table: RegionTable, native: bytes = b"") -> bytes:
    """The msgpack form of a transport's metadata."""
    addresses, sizes = [r.address for r in table.regions], [r.size_bytes for r in table.regions]
    devices = list(table.devices) if table.device is None else [table.device]
    return msgspec.msgpack.encode(
        Metadata(kind=kind, name=name, addresses=addresses, sizes_bytes=sizes, devices=devices, native=native)
    )


class _Version(msgspec.Struct):
    version: int


# Made here and not at first use: peers are met on several threads at once (see `session.engine_metadata`).
_version_decoder, _decoder = msgspec.msgpack.Decoder(_Version), msgspec.msgpack.Decoder(Metadata)


def decode_metadata(kind: str, data: bytes) -> Metadata:
    """Read metadata that `encode_metadata` wrote.

    Raises:
        TransportError: too large, malformed, of another version, or of another kind of transport than `kind`.
    """
    expect(data, (bytes, bytearray, memoryview), "a peer's metadata", "what `metadata()` of its transport returns")
    if len(data) > MAX_METADATA_BYTES:
        raise TransportError(f"peer metadata of {len(data)} bytes; the limit is {MAX_METADATA_BYTES}")
    try:
        version = _version_decoder.decode(data).version
        if version != METADATA_VERSION:
            raise TransportError(
                f"peer metadata has version {version}; this side reads version {METADATA_VERSION}: {SAME_RELEASE}"
            )
        metadata = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(
            f"peer metadata is not readable: {error}; run the same releases of kvreshard and NIXL on both sides"
        ) from error
    if metadata.kind != kind:
        raise TransportError(
            f"peer {metadata.name!r} uses transport {metadata.kind!r}, this side {kind!r}; configure both alike"
        )
    return metadata
