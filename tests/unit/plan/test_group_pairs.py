"""Are requests cut where pages end, and are transfers put together exactly where one page can say what each of them copies?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs.small import GROUP, engine, request

from kvreshard.kinds import Attention, Latent
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable
from kvreshard.plan import RankTransfer, compile_route, plan_reads
from kvreshard.plan.copies import MAX_COPY_BYTES, MIN_JOINED_BYTES, Page, PagedCopies
from kvreshard.plan.pairs import GroupPair, PageRange, _by_length, _entries, cut, make_pairs
from kvreshard.plan.pattern import Bases, Pattern
from kvreshard.plan.transfer import Span

SIZES = st.integers(1, 40)


@given(st.integers(0, 200), st.integers(1, 300), SIZES, SIZES)
def test_pieces_are_each_index_once_and_none_crosses_a_page(start: int, count: int, src: int, dst: int) -> None:
    stop, seen = start + count, list[int]()
    step = np.lcm(src, dst)
    for (src_low, dst_low, length), first, times, recurs in cut(start, stop, src, dst):
        assert times > 0
        for low in range(first, first + times * step, step):
            assert (low % src, low % dst) == (src_low, dst_low)
            assert src_low + length <= src
            assert dst_low + length <= dst
            begins, ends = 0 in (src_low, dst_low), src_low + length == src or dst_low + length == dst
            assert recurs == (begins and ends)
            seen += range(low, low + length)
    assert sorted(seen) == list(range(start, stop))


def test_alike_pieces_are_cut_as_one() -> None:
    assert list(cut(5, 70, 16, 32)) == [
        ((5, 5, 11), 5, 1, False),
        ((0, 16, 16), 16, 2, True),
        ((0, 0, 16), 32, 1, True),
        ((0, 0, 6), 64, 1, False),
    ]
    assert list(cut(0, 160_000, 16, 16)) == [((0, 0, 16), 0, 10_000, True)]
    assert list(cut(3, 9, 16, 16)) == [((3, 3, 6), 3, 1, False)]


@pytest.mark.parametrize("ring_pages", [None, 3])
def test_page_ids_of_a_piece(ring_pages: int | None) -> None:
    table = PageTable([50, 51, 52, 53, 54, 55, 56], 100, 0 if ring_pages else 2)
    page_range = PageRange((0, 0, 4), 8, 2, 8, True, table, table)
    # Spans of 8 indices in 2 pages: the pieces lie in spans 1 and 2, pages 2 to 5.
    found = [
        page_range.page_ids(table, Span(8, 2, ring_pages, 12 if ring_pages else None), step).tolist() for step in (0, 1)
    ]
    assert found == ([[52, 51], [50, 52]] if ring_pages else [[50, 52], [51, 53]])


def test_pages_that_a_table_does_not_have_are_a_bug() -> None:
    """A negative number must not be taken for one from the end."""
    table = PageTable([50, 51], 100, 2)
    for first, count in ((0, 1), (4, 1), (8, 3), (12, 2)):
        with pytest.raises(AssertionError, match="of a table of 2"):
            PageRange((0, 0, 4), first, count, 4, True, table, table).page_ids(table, Span(4, 1, None, None), 0)


def transfers_of(tp: int) -> tuple[RankTransfer, ...]:
    return compile_route(engine("prefill", tp=tp, order="HND"), engine("decode", order="HND"), 0).transfers


def pages_of(pair: GroupPair, transfers: tuple[RankTransfer, ...] | None = None) -> list[Page]:
    """Of a whole page over a whole page."""
    table = PageTable(range(1, 9), 100)
    whole = PageRange((0, 0, pair.src.span.indices), 0, 1, pair.src.span.indices, True, table, table)
    return [one.page for one in pair.pages(whole, transfers or pair.transfers)]


def test_transfers_of_one_rank_and_one_pair_of_groups_are_one_page_per_run_length() -> None:
    layers = [Layer(f"layers.{i}", Attention(2, 2 + i, "bfloat16")) for i in range(2)]
    groups = [PagedGroup("full", ("layers.0", "layers.1"), 4)]
    src, dst = (assemble(name, layers, groups, Grid(), order="HND", num_pages=9) for name in ("prefill", "decode"))
    (pair,) = compile_route(src, dst, 0).pairs
    assert len(pair.transfers) > 1
    pages = pages_of(pair)
    assert len({page.run_bytes for page in pages}) == len(pages)
    assert sum(page.run_bytes * page.num_entries for page in pages) == sum(
        transfer.pattern((0, 0, 4)).num_bytes for transfer in pair.transfers
    )


def test_every_source_rank_and_every_stride_has_its_own_page() -> None:
    first, second = transfers_of(tp=2)
    (pair,) = make_pairs([first, second])
    assert len(pages_of(pair)) == 2
    for name in ("src_page_stride_bytes", "dst_page_stride_bytes"):
        wider = replace(first, **{name: 2 * getattr(first, name)})
        (pair,) = make_pairs([first, wider])
        strides = {(page.src_stride, page.dst_stride) for page in pages_of(pair)}
        assert len(strides) == 2


def test_some_transfers_of_a_pair_have_pages_of_their_own() -> None:
    (pair,) = make_pairs(transfers_of(tp=2))
    assert [
        len(pages_of(pair, transfers))
        for transfers in (pair.transfers, pair.transfers[:1], pair.transfers[1:], pair.transfers)
    ] == [
        2,
        1,
        1,
        2,
    ]


def test_groups_that_overlay_one_another_share_a_page() -> None:
    layers = [Layer(name, Latent(4, "bfloat16")) for name in ("a", "b")]
    groups = [PagedGroup("one", ("a",), 4), PagedGroup("two", ("b",), 4)]
    src, dst = (assemble(name, layers, groups, Grid(), order="NHD", num_pages=9) for name in ("prefill", "decode"))
    route = compile_route(src, dst, 0)
    first, second = (page for pair in route.pairs for page in pages_of(pair))
    assert first is second
    assert (first.num_entries, first.run_bytes) == (1, 4 * 4 * 2)
    # Nothing else keeps it once the route has gone.
    known = route.pairs[0].shared_pages
    assert len(known) == 1
    route.drop_patterns()
    del first, second
    assert len(known) == 0


def test_what_is_longer_than_a_copy_may_be_is_cut() -> None:
    kind = Latent(1 << 20, "bfloat16")  # 2 MiB per token
    src, dst = (engine(name, kind=kind, page=20, num_pages=3) for name in ("prefill", "decode"))
    (pair,) = compile_route(src, dst, 0).pairs
    (page_range,) = pair.page_ranges(request(src, dst, 20))
    found = [
        (start, one.page.run_bytes)
        for one in pair.pages(page_range, pair.transfers)
        for start in one.page.src_start.tolist()
    ]
    first, second, third = sorted(found)
    assert [first[1], second[1], third[1]] == [MAX_COPY_BYTES, MAX_COPY_BYTES, (40 << 20) - 2 * MAX_COPY_BYTES]
    assert (second[0] - first[0], third[0] - second[0]) == (MAX_COPY_BYTES, MAX_COPY_BYTES)


def runs(src: list[int], dst: list[int], lengths: list[int], region: int = 0) -> Pattern:
    """One field whose page has these runs."""
    zero = np.zeros(len(lengths), dtype=np.int64)
    bases = Bases(np.array([1000]), np.array([5000]), np.array([region]))
    return Pattern(bases, (), np.array(src), np.array(dst), np.array(lengths), zero, zero)


def entries_of(*found: Pattern) -> list[tuple[int, ...]]:
    return [tuple(entry) for entry in np.stack(_entries(found), axis=1).tolist()]


def test_fields_that_lie_side_by_side_on_both_sides_are_one_entry() -> None:
    """The parts of a state: they are as long as they are, and no request tells them apart."""
    x, bc, ssm = runs([0], [0], [6]), runs([6], [6], [3]), runs([9], [9], [50])
    assert entries_of(ssm, x, bc) == [(1000, 5000, 59, 0)]
    assert entries_of(x, runs([6], [7], [3]), ssm) == [(1000, 5000, 6, 0), (1006, 5007, 3, 0), (1009, 5009, 50, 0)]
    assert entries_of(x, runs([6], [6], [3], region=1)) == [(1000, 5000, 6, 0), (1006, 5006, 3, 1)]
    long = MIN_JOINED_BYTES - 1
    lengths = [long, 2, 3, 4]
    starts = np.cumsum(lengths) - lengths
    parts = [runs([at], [at], [length]) for at, length in zip(starts.tolist(), lengths, strict=True)]
    assert [entry[2] for entry in entries_of(*parts)] == [long + 2, 7]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=30), st.data())
def test_the_entries_of_a_page_have_every_byte_of_its_runs_once(gaps: list[tuple[int, int, int]], data: Any) -> None:
    listed, src, dst = [], 0, 0
    for src_gap, dst_gap, length in gaps:
        listed.append((src + src_gap, dst + dst_gap, length))
        src, dst = src + src_gap + length, dst + dst_gap + length
    fields = [runs([src], [dst], [length]) for src, dst, length in data.draw(st.permutations(listed))]
    wanted = sorted((1000 + src + n, 5000 + dst + n) for src, dst, length in listed for n in range(length))
    found = entries_of(*fields)
    assert sorted((src + n, dst + n) for src, dst, length, _ in found for n in range(length)) == wanted
    parts = [
        entry for part in _by_length(*_entries(fields)) for entry in zip(*(one.tolist() for one in part), strict=True)
    ]
    assert sorted(parts) == sorted(found)
    assert len({length for _, _, length, _ in found}) == len(list(_by_length(*_entries(fields))))


def test_the_end_of_a_request_is_listed_and_whole_pages_are_pages() -> None:
    """A page that ends where a request happens to end is not prepared for others."""
    src, dst = engine("prefill", num_pages=60), engine("decode", num_pages=60, order="HND")
    wanted = request(src, dst, 4 * 20 + 3, src_pages=range(1, 60, 2), dst_pages=range(59, 0, -2))
    found = plan_reads(compile_route(src, dst, 0), wanted, min_paged=1).direct
    paged = [one for one in found if isinstance(one, PagedCopies)]
    assert [len(one.src_page) for one in paged] == [20] * len(paged)
    assert len(found) == len(paged) + 1
    assert GROUP in wanted.intervals
