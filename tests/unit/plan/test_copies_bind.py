"""Does bind give the fewest copies that are right, in lists of bounded size, and does zeroing take exactly the rest?"""

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.pairs.apply import check_transfer, compile_all
from tests.pairs.small import GROUP, changed, engine, request

from kvreshard.kinds import Attention, Latent, Mamba1, Ring, Style
from kvreshard.model import EngineLayout, Rank, Region
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import ByteRanges, CopyList, bind, compile_route, find_unwritten
from kvreshard.plan import bind as _bind
from kvreshard.plan.byte_ranges import cut, merged, subtract

SIDES = ("prefill", "decode")
ONE_FIELD = Latent(4, "bfloat16")  # 8 bytes per token


def array(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def ranges(found: ByteRanges) -> list[tuple[int, int]]:
    return list(zip(found.start.tolist(), found.stop.tolist(), strict=True))


def listed(lists: list[CopyList]) -> list[tuple[int, int, int]]:
    """All copies as (offset in the source's region, offset in the destination's, length), in order."""
    return [
        (src - 1_000_000, dst - 2_000_000, length)
        for copies in lists
        for src, dst, length in zip(
            copies.src_address.tolist(), copies.dst_address.tolist(), copies.length.tolist(), strict=True
        )
    ]


def one_to_one(src: EngineLayout, dst: EngineLayout, wanted: Request) -> list[tuple[int, int, int]]:
    return listed(list(bind(compile_route(src, dst, 0), wanted)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([(3, 5)], [(3, 5)]),
        ([(5, 7), (0, 5)], [(0, 7)]),
        ([(0, 5), (6, 7)], [(0, 5), (6, 7)]),
        ([(0, 9), (2, 3), (4, 12)], [(0, 12)]),
        ([(0, 2), (0, 2)], [(0, 2)]),
    ],
)
def test_merged(given: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert ranges(merged(array(*(a for a, _ in given)), array(*(b for _, b in given)))) == expected


@pytest.mark.parametrize(
    ("whole", "taken", "expected"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([], [(0, 10)], []),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10)], [(-5, 3), (8, 20)], [(3, 8)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(0, 4), (6, 10)], [(4, 6)], [(0, 4), (6, 10)]),
        ([(5, 6)], [(0, 100)], []),
    ],
)
def test_subtract(whole: list[tuple[int, int]], taken: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    sides = [ByteRanges(array(*(a for a, _ in side)), array(*(b for _, b in side))) for side in (whole, taken)]
    assert ranges(subtract(*sides)) == expected


@pytest.mark.parametrize(
    ("given", "at", "expected"),
    [
        ([(0, 10)], [5], [(0, 5), (5, 10)]),
        ([(0, 10)], [0, 10, 11, -1], [(0, 10)]),
        ([(0, 4), (6, 10)], [8, 4, 6, 1, 5], [(0, 1), (1, 4), (6, 8), (8, 10)]),
        ([(0, 4)], [], [(0, 4)]),
        ([], [3], []),
    ],
)
def test_cut(given: list[tuple[int, int]], at: list[int], expected: list[tuple[int, int]]) -> None:
    assert ranges(cut(ByteRanges(array(*(a for a, _ in given)), array(*(b for _, b in given))), array(*at))) == expected


def test_neighbouring_pages_are_one_copy() -> None:
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD)
    wanted = request(src, dst, 12, src_pages=[1, 2, 3], dst_pages=[5, 6, 7])
    assert one_to_one(src, dst, wanted) == [(32, 160, 96)]


def test_pages_in_descending_order_are_one_copy_each() -> None:
    """The last token of a page does not continue in the page below it."""
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD)
    wanted = request(src, dst, 12, src_pages=[3, 2, 1], dst_pages=[7, 6, 5])
    assert sorted(one_to_one(src, dst, wanted)) == [(32, 160, 96)]


def test_pages_that_continue_on_one_side_only_are_not_joined() -> None:
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD)
    wanted = request(src, dst, 12, src_pages=[1, 2, 3], dst_pages=[5, 7, 6])
    assert one_to_one(src, dst, wanted) == [(32, 160, 32), (64, 224, 32), (96, 192, 32)]
    wanted = request(src, dst, 12, src_pages=[1, 3, 2], dst_pages=[5, 6, 7])
    assert sorted(one_to_one(src, dst, wanted)) == [(32, 160, 32), (64, 224, 32), (96, 192, 32)]


def test_padded_pages_are_not_joined() -> None:
    src = engine("prefill", kind=ONE_FIELD, padded_page_bytes=40)
    dst = engine("decode", kind=ONE_FIELD, padded_page_bytes=40)
    wanted = request(src, dst, 8, src_pages=[1, 2], dst_pages=[5, 6])
    assert one_to_one(src, dst, wanted) == [(40, 200, 32), (80, 240, 32)]


def test_a_page_is_cut_where_the_other_side_ends() -> None:
    """Pages of 4 and of 6 tokens over 12 tokens: pieces of 4, 2, 2, 4, of which none continue on both sides."""
    src, dst = engine("prefill", kind=ONE_FIELD, page=4), engine("decode", kind=ONE_FIELD, page=6)
    wanted = request(src, dst, 12, src_pages=[1, 3, 5], dst_pages=[2, 4])
    assert one_to_one(src, dst, wanted) == [(32, 96, 32), (96, 128, 16), (112, 192, 16), (160, 208, 32)]


def test_an_interval_clips_the_first_and_last_page() -> None:
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD)
    wanted = request(src, dst, 12, [(1, 3), (6, 7)], src_pages=[1, 3, 5], dst_pages=[2, 4, 6])
    assert one_to_one(src, dst, wanted) == [(40, 72, 16), (112, 144, 8)]


def test_layers_side_by_side_are_one_copy() -> None:
    src = engine("prefill", kind=ONE_FIELD, order="BLNHC", stages=(0, 0, 0))
    dst = engine("decode", kind=ONE_FIELD, order="BLNHC", stages=(0, 0, 0))
    assert one_to_one(src, dst, request(src, dst, 4)) == [(96, 192, 96)]


def test_a_group_without_intervals_needs_no_tables() -> None:
    src, dst = engine("prefill"), engine("decode")
    nothing = Request({}, {}, {GROUP: []}, {})
    assert one_to_one(src, dst, nothing) == []


@pytest.mark.parametrize("first_page", [0, 3])
def test_a_state_is_one_page_whatever_its_first_page_is_called(first_page: int) -> None:
    kind = Mamba1(4, 2, 2, "bfloat16", "bfloat16")
    src, dst = engine("prefill", kind=kind), engine("decode", kind=kind)
    wanted = changed(request(src, dst, 9), src_tables={GROUP: PageTable([7], 9, first_page)})
    assert one_to_one(src, dst, wanted) == [(7 * 24, 2 * 24, 8), (7 * 24 + 8, 2 * 24 + 8, 16)]


def test_a_ring_takes_the_live_tail_from_where_it_wrapped() -> None:
    """5 entries at the source, 3 at the destination: tokens 6, 7, 8 go from entries 1, 2, 3 to 0, 1, 2; tokens 8, 9, 10 from
    3, 4, 0 to 2, 0, 1.
    """
    kind = Ring(3, 4, "bfloat16")
    src = engine("prefill", kind=kind, style=Style(speculative_tokens=2))
    dst = engine("decode", kind=kind)
    wanted = request(src, dst, 9, [(6, 9)], src_pages=[1], dst_pages=[2])
    assert sorted(one_to_one(src, dst, wanted)) == [(48, 48, 24)]
    late = request(src, dst, 11, [(8, 11)], src_pages=[1], dst_pages=[2])
    assert sorted(one_to_one(src, dst, late)) == [(40, 56, 8), (64, 64, 8), (72, 48, 8)]


def test_what_no_copy_writes_in_a_new_page_is_zeroed_in_full() -> None:
    """Page 2 gets tokens 0 to 3, page 3 tokens 4 and 5: the rest of it and its padding are zeroed, page 4 whole."""
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD, padded_page_bytes=40)
    wanted = request(src, dst, 6, dst_pages=[2, 3, 4], new_pages=[2, 3, 4])
    route = compile_route(src, dst, 0)
    holes = ranges(find_unwritten(dst, 0, wanted, _bind(route, wanted)))
    assert holes == [(2_000_000 + 112, 2_000_000 + 120), (2_000_000 + 136, 2_000_000 + 200)]


@pytest.mark.parametrize("gap", [0, 1])
def test_ranges_to_zero_end_with_their_region(gap: int) -> None:
    """The last page of one layer's region and the first of the next, neighbours by address: two allocations, two ranges."""
    src, dst = engine("prefill", kind=ONE_FIELD, stages=(0, 0)), engine("decode", kind=ONE_FIELD, stages=(0, 0))
    regions = [Region(f"r{i}", 2_000_000 + i * (320 + gap), 320) for i in range(2)]
    shards = [replace(shard, region=f"r{i}", offset_bytes=0) for i, shard in enumerate(dst.ranks[0].shards)]
    slabs = [replace(dst.ranks[0].slabs[0], region=region.name) for region in regions]
    dst = replace(dst, ranks=(Rank.of(0, (), tuple(regions), tuple(slabs), tuple(shards)),))
    wanted = request(src, dst, 6, [(2, 6)], dst_pages=[0, 9], new_pages=[0, 9])
    found = ranges(find_unwritten(dst, 0, wanted, bind(compile_route(src, dst, 0), wanted)))
    assert found == [(at, at + 16) for region in regions for at in (region.address, region.address + 304)]


def test_a_page_that_is_not_new_keeps_what_it_has() -> None:
    src, dst = engine("prefill", kind=ONE_FIELD), engine("decode", kind=ONE_FIELD)
    wanted = request(src, dst, 6, dst_pages=[2, 3])
    assert ranges(find_unwritten(dst, 0, wanted, bind(compile_route(src, dst, 0), wanted))) == []


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"])
def test_between_equal_engines_a_partial_page_is_not_taken_for_a_whole_one(order: str) -> None:
    """A whole page may be one run over all fields, the partial one a run per field: as many runs, other bases."""
    src, dst = [engine(name, order=order, stages=(0, 0, 0), kind=Attention(1, 2, "bfloat16")) for name in SIDES]
    wanted = request(src, dst, 10, src_pages=[1, 4, 2], dst_pages=[6, 3, 8])
    assert check_transfer(src, dst, compile_all(src, dst), wanted, np.random.default_rng(1)) > 0
