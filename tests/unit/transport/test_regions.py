"""Is every copy found in the one region that holds it, and is metadata read with suspicion?"""

import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from kvreshard.plan.copies import Int64s
from kvreshard.transport.base import MemoryRegion, TransportError
from kvreshard.transport.regions import MAX_REGIONS, RegionTable, decode_metadata, encode_metadata

A, B, C = MemoryRegion(1000, 100), MemoryRegion(1100, 50), MemoryRegion(5000, 10, "cuda:1")
TABLE = RegionTable([C, A, B])


def locate(address: list[int], length: list[int]) -> list[int]:
    found = TABLE.locate("local", np.array(address, dtype=np.int64), np.array(length, dtype=np.int64))
    return [int(index) for index in found]


def test_pieces_are_located_by_address_order() -> None:
    assert TABLE.regions == (A, B, C)
    assert locate([1000, 1099, 1100, 5009, 1000], [100, 1, 50, 1, 1]) == [0, 0, 1, 2, 0]
    assert locate([], []) == []


def check(table: RegionTable, address: Int64s, length: Int64s) -> None:
    """As a transport looks at copies: at the ends of all, and at each where these do not lie in one region."""
    if not len(address) or not table.has(int(address.min()), int(address.max()) + int(length.max())):
        table.locate("local", address, length)


@pytest.mark.parametrize(
    ("address", "length"), [(999, 1), (999, 2), (1149, 2), (1090, 20), (4999, 2), (5009, 2), (0, 1), (2**63 - 1, 1)]
)
def test_a_piece_outside_or_across_is_refused(address: int, length: int) -> None:
    with pytest.raises(TransportError, match=r"copy 1 of 2: local .*registered: "):
        locate([1000, address], [1, length])


@pytest.mark.parametrize(
    ("address", "length"), [(999, 1), (1149, 2), (1090, 20), (1050, 51), (4999, 2), (5009, 2), (0, 1), (2**63 - 1, 1)]
)
def test_a_check_refuses_what_locating_refuses(address: int, length: int) -> None:
    with pytest.raises(TransportError, match=r"copy 1 of 2: local .*registered: "):
        check(TABLE, np.array([1000, address], dtype=np.int64), np.array([1, length], dtype=np.int64))


@pytest.mark.parametrize(("address", "length"), [(999, 1), (1050, 51), (1099, 2), (1100, 1), (0, 1), (2**63 - 1, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_the_only_region_has_the_first_and_the_last_piece(address: int, length: int, last: bool) -> None:
    """One region, as most peers' transports have, is looked at by its ends only."""
    table, order = RegionTable([A]), slice(None, None, 1 if last else -1)
    pieces = np.array([1000, address], dtype=np.int64)[order], np.array([100, length], dtype=np.int64)[order]
    with pytest.raises(TransportError, match=r"copy [01] of 2: local .*registered: "):
        check(table, *pieces)
    check(table, np.array([1000, 1099], dtype=np.int64), np.array([100, 1], dtype=np.int64))


def test_a_check_lets_in_what_lies_in_one_region_or_in_several() -> None:
    for address, length in (([1000, 1099], [100, 1]), ([5009, 1000, 1149], [1, 1, 1]), ([], [])):
        check(TABLE, np.array(address, dtype=np.int64), np.array(length, dtype=np.int64))


def test_a_table_knows_its_device_where_there_is_one() -> None:
    assert RegionTable([A, B]).device == "cpu"
    assert RegionTable([C]).device == "cuda:1"
    assert TABLE.device is None
    assert RegionTable().device is None


def test_no_regions_hold_no_piece() -> None:
    with pytest.raises(TransportError, match="registered: none"):
        RegionTable().locate("local", np.array([1], dtype=np.int64), np.array([1], dtype=np.int64))


def test_a_region_at_the_top_of_the_address_space() -> None:
    table = RegionTable([MemoryRegion(2**63 - 8, 8)])
    last = np.array([2**63 - 1], dtype=np.int64)
    assert table.locate("local", last, np.array([1], dtype=np.int64)).tolist() == [0]


@pytest.mark.parametrize("name", ["addresses", "sizes_bytes", "devices"])
def test_a_peer_cannot_name_regions_without_end(name: str) -> None:
    """Of one byte each, 64 MiB of metadata would be 30 million regions: gigabytes, and a minute of work for whoever reads them."""
    lists = {"addresses": [5], "sizes_bytes": [5], "devices": ["cpu"]}
    lists[name] = lists[name] * (MAX_REGIONS + 1)
    message = {"version": 1, "kind": "nixl", "name": "p", **lists, "native": b""}
    with pytest.raises(TransportError, match=rf"not readable: .*{MAX_REGIONS}"):
        decode_metadata("nixl", msgspec.msgpack.encode(message))


def test_overlap_is_refused_and_contact_is_not() -> None:
    with pytest.raises(TransportError, match="overlaps"):
        TABLE.plus([MemoryRegion(1149, 5)])
    assert len(TABLE.plus([MemoryRegion(1150, 5)]).regions) == 4


def test_removing_regions() -> None:
    assert TABLE.minus([B]).regions == (A, C)
    with pytest.raises(TransportError, match="not registered"):
        TABLE.minus([MemoryRegion(1000, 99)])
    with pytest.raises(TransportError, match="not registered"):
        TABLE.minus([A, A])


def test_metadata_round_trip() -> None:
    metadata = decode_metadata("nixl", encode_metadata("nixl", "me", TABLE, b"\0native"))
    assert (metadata.name, metadata.native) == ("me", b"\0native")
    assert metadata.table().regions == TABLE.regions


def test_metadata_of_another_transport_or_version_is_refused() -> None:
    with pytest.raises(TransportError, match="'memory', this side 'nixl'"):
        decode_metadata("nixl", encode_metadata("memory", "me", TABLE))
    other = msgspec.msgpack.decode(encode_metadata("nixl", "me", TABLE))
    for version in (0, 99):
        other["version"] = version
        with pytest.raises(TransportError, match=f"version {version}; this side reads version 1"):
            decode_metadata("nixl", msgspec.msgpack.encode(other))


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_malformed_metadata_is_refused(cut: int) -> None:
    with pytest.raises(TransportError, match="not readable"):
        decode_metadata("nixl", encode_metadata("nixl", "me", TABLE)[:cut])


def test_metadata_with_impossible_regions_is_refused() -> None:
    wrong = msgspec.msgpack.decode(encode_metadata("nixl", "me", TABLE))
    wrong |= {"addresses": [2**64 - 1], "sizes_bytes": [2**63], "devices": ["cpu"]}
    with pytest.raises(TransportError, match="address space"):
        decode_metadata("nixl", msgspec.msgpack.encode(wrong)).table()


@pytest.mark.parametrize("column", ["addresses", "sizes_bytes", "devices"])
def test_metadata_whose_columns_differ_in_length_is_refused(column: str) -> None:
    wrong = msgspec.msgpack.decode(encode_metadata("nixl", "me", TABLE))
    wrong[column] = wrong[column][:2]
    with pytest.raises(TransportError, match=r"peer 'me' gives \d addresses, \d sizes and \d devices of its regions"):
        decode_metadata("nixl", msgspec.msgpack.encode(wrong)).table()


def of_rows(rows: list[tuple[int, int, str]]) -> RegionTable | str:
    """What a peer's metadata with these regions gives: a table, or what it is refused with."""
    addresses, sizes, devices = ([row[column] for row in rows] for column in range(3))
    data = msgspec.msgpack.encode(
        {"version": 1, "kind": "k", "name": "p", "addresses": addresses, "sizes_bytes": sizes, "devices": devices}
    )
    try:
        return decode_metadata("k", data).table()
    except TransportError as error:
        return str(error)


def each_looked_at(rows: list[tuple[int, int, str]]) -> list[MemoryRegion] | str:
    """The same in plain Python, region by region."""
    try:
        regions = sorted([MemoryRegion(*row) for row in rows], key=lambda region: region.address)
    except TransportError as error:
        return str(error)
    for lower, upper in pairwise(regions):
        if upper.address < lower.end:
            return f"region {upper} overlaps region {lower}; register each allocation once"
    return regions


def test_a_table_of_columns_is_what_each_region_says(run_seed: int) -> None:
    rng = random.Random(run_seed)
    kept = 0
    for _ in range(2000):
        rows, at = [], rng.choice([0, 4096, 2**62, 2**63 - 40])
        for _ in range(rng.randint(0, 4)):
            size = rng.choice([1, 8, 16, 8, 16, 0, -1, 2**61])
            rows.append(
                (max(-1, at - (rng.random() < 0.1)), size, "cpu" if rng.random() < 0.95 else rng.choice(DEVICES))
            )
            at = min(2**63 - 1, at + max(0, size) + rng.choice([0, 8]))
        if rng.random() < 0.2:
            rng.shuffle(rows)
        found, wanted = of_rows(rows), each_looked_at(rows)
        if isinstance(wanted, str):
            assert found == wanted, rows
            continue
        assert isinstance(found, RegionTable), rows
        kept += 1
        devices = {region.device for region in wanted}
        assert (list(found.regions), found.device) == (wanted, devices.pop() if len(devices) == 1 else None)
        for start, size, _ in rows:
            for first, length in ((start, size), (start, size + 1), (start - 1, 1), (start + size - 1, 1), (start, 1)):
                if first >= 0 and first + length <= 2**63:
                    holding = [one.device for one in wanted if one.address <= first and first + length <= one.end]
                    piece = np.array([first], dtype=np.int64), np.array([length], dtype=np.int64)
                    assert said(found, *piece) == (holding[0] if holding else None), (rows, first, length)
    assert kept > 200


DEVICES = ("cuda:0", "cuda:11", "cuda:", "gpu")


def said(table: RegionTable, address: Int64s, length_bytes: Int64s) -> str | None:
    """On which device a copy lies; None where it lies nowhere."""
    try:
        check(table, address, length_bytes)
        return table.regions[int(table.locate("local", address, length_bytes)[0])].device
    except TransportError as error:
        return None if "is not inside one registered region" in str(error) else str(error)
