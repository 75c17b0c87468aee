"""Which registered region holds each piece, and does each piece lie inside one?

1. `RegionTable` sorts the regions by address once; overlaps are refused, so a binary search has one answer.
2. `locate` finds the region of every piece at once (NumPy, no loop over pieces) and checks its end.
3. `Metadata` carries a table to a peer, versioned and bounded.

Refused: overlapping regions, pieces outside, pieces that cross from one region to the next (a NIXL descriptor must
lie in one registration), metadata that is malformed, too large or of a later version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.form import SAME_RELEASE
from kvreshard.plan.copies import Int64s
from kvreshard.transport.base import MemoryRegion, TransportError, is_device

METADATA_VERSION = 1

# 64 MiB is some 10^6 regions; real engines register a few hundred.
MAX_METADATA_BYTES = 64 * 1024 * 1024


class RegionTable:
    """Registered regions of one rank, sorted by address. Immutable."""

    __slots__ = ("_last", "_regions", "_start", "_starts", "device")

    def __init__(self, regions: Iterable[MemoryRegion] = ()) -> None:
        found = tuple(sorted(regions, key=lambda region: region.address))
        for lower, upper in pairwise(found):
            if upper.address < lower.end:
                raise TransportError(f"region {upper} overlaps region {lower}; register each allocation once")
        starts = [region.address for region in found]
        # The last byte, not the end: an end of 2^63 has no int64.
        last = np.array([region.end - 1 for region in found], dtype=np.int64)
        self._set(found, starts, np.array(starts, dtype=np.int64), last, {region.device for region in found})

    def _set(
        self,
        regions: tuple[MemoryRegion, ...] | None,
        starts: list[int],
        start: Int64s,
        last: Int64s,
        devices: set[str],
    ) -> None:
        self._regions, self._starts, self._start, self._last = regions, starts, start, last
        # The device that all regions lie on; None where they differ.
        self.device = devices.pop() if len(devices) == 1 else None

    @staticmethod
    def in_order(addresses: list[int], sizes_bytes: list[int], device: str) -> RegionTable | None:
        """The table of regions on one device, seen at once to be right: in order, apart, none empty. None where somebody must look closer."""
        if not addresses or not is_device(device):
            return None
        try:
            start, size = np.array(addresses, dtype=np.int64), np.array(sizes_bytes, dtype=np.int64)
        except OverflowError:
            return None
        last = start + (size - 1)
        if start.min() < 0 or size.min() <= 0 or last.min() < 0 or (last[:-1] >= start[1:]).any():
            return None
        table = RegionTable.__new__(RegionTable)
        table._set(None, addresses, start, last, {device})
        return table

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """In the order of their addresses; made when somebody asks."""
        if self._regions is None and self.device is not None:
            sizes = (self._last - self._start).tolist()
            self._regions = tuple(
                MemoryRegion(start, size + 1, self.device) for start, size in zip(self._starts, sizes, strict=True)
            )
        return self._regions or ()

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

    def check(self, side: str, address: Int64s, length_bytes: Int64s) -> None:
        """`locate` without saying where: a look at the lowest and the highest byte is enough where one region has both."""
        if not address.size:
            return
        region = bisect_right(self._starts, int(address.min())) - 1
        if region < 0 or int(address.max()) + int(length_bytes.max()) - 1 > int(self._last[region]):
            self.locate(side, address, length_bytes)

    def locate(self, side: str, address: Int64s, length_bytes: Int64s) -> NDArray[np.intp]:
        """The index into `regions` for each piece, shape (n,). Addresses are not negative, lengths positive.

        Raises:
            TransportError: a piece is not inside one region; `side` ("local", "remote of 'x'") names whose.
        """
        index = self._start.searchsorted(address, side="right") - 1
        if not address.size:
            return index
        # Below all regions the index is -1, which is the last of them: its end says nothing then.
        if not self._starts or index.min() < 0 or (length_bytes - 1 > self._last[index] - address).any():
            raise self._outside(side, address, length_bytes, index)
        return index

    def _outside(self, side: str, address: Int64s, length_bytes: Int64s, index: NDArray[np.intp]) -> TransportError:
        inside = index >= 0
        if self.regions:
            inside &= length_bytes - 1 <= self._last[index] - address
        outside = np.flatnonzero(~inside)
        row = int(outside[0])
        start = int(address[row])
        return TransportError(
            f"piece {row} of {address.size}: {side} [{start:#x}, {start + int(length_bytes[row]):#x}) is not "
            f"inside one registered region ({outside.size} such pieces); registered: {self.describe()}; "
            "register the memory before metadata() is taken, and cut pieces where a region ends"
        )

    def describe(self) -> str:
        """The regions in words, at most four of them."""
        if not self.regions:
            return "none"
        more = f" and {len(self.regions) - 4} more" if len(self.regions) > 4 else ""
        return ", ".join(str(region) for region in self.regions[:4]) + more


class _Region(msgspec.Struct, array_like=True, frozen=True):
    address: int
    size_bytes: int
    device: str


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What `Transport.metadata()` carries: who, which kind of transport, which regions, and the kind's own bytes."""

    version: int = METADATA_VERSION
    kind: str
    name: str
    regions: list[_Region]
    native: bytes = b""

    def table(self) -> RegionTable:
        """The regions, checked."""
        devices = {entry.device for entry in self.regions}
        if len(devices) == 1:
            addresses, sizes = [entry.address for entry in self.regions], [entry.size_bytes for entry in self.regions]
            found = RegionTable.in_order(addresses, sizes, devices.pop())
            if found is not None:
                return found
        return RegionTable(MemoryRegion(entry.address, entry.size_bytes, entry.device) for entry in self.regions)


def encode_metadata(kind: str, name: str, table: RegionTable, native: bytes = b"") -> bytes:
    """The msgpack form of a transport's metadata."""
    regions = [_Region(region.address, region.size_bytes, region.device) for region in table.regions]
    return msgspec.msgpack.encode(Metadata(kind=kind, name=name, regions=regions, native=native))


class _Version(msgspec.Struct):
    version: int


# Made here and not at first use: peers are met on several threads at once (see `session.engine_metadata`).
_version_decoder, _decoder = msgspec.msgpack.Decoder(_Version), msgspec.msgpack.Decoder(Metadata)


def decode_metadata(kind: str, data: bytes) -> Metadata:
    """Read metadata that `encode_metadata` wrote.

    Raises:
        TransportError: too large, malformed, of another version, or of another kind of transport than `kind`.
    """
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
        raise TransportError(f"peer metadata is not readable: {error}; pass what metadata() gave there") from error
    if metadata.kind != kind:
        raise TransportError(
            f"peer {metadata.name!r} uses transport {metadata.kind!r}, this side {kind!r}; configure both alike"
        )
    return metadata
