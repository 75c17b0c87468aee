"""Which requests are refused, before the first address is given out, and does the error name what is wrong?"""

import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from tests.pairs.small import GROUP, changed, engine, request

from kvreshard.kinds import Attention, Latent, Mamba1, Opaque, Ring
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import BindError, EngineLayout, wire
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import bind, budget, compile_route, compile_routes, find_unwritten, pairs
from kvreshard.plan.cost import Way
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.reads import plan_reads
from kvreshard.plan.transfer import Overlap, RankTransfer

SRC, DST = engine("prefill", null_page=0), engine("decode", null_page=0)
GOOD = request(SRC, DST, 10)


def refused(facts: str, wanted: Request, src: EngineLayout = SRC, dst: EngineLayout = DST) -> None:
    """bind itself raises, not the first list; the words have all facts, which are separated by '|'."""
    with pytest.raises(BindError) as caught:
        bind(compile_route(src, dst, 0), wanted)
    for fact in facts.split("|"):
        assert fact in str(caught.value), str(caught.value)


def src_table(pages: list[int], num_tokens: int = 10, first_page: int = 0) -> Request:
    return changed(GOOD, src_tables={GROUP: PageTable(pages, num_tokens, first_page)})


def dst_table(pages: list[int], num_tokens: int = 10, first_page: int = 0) -> Request:
    return changed(GOOD, dst_tables={GROUP: PageTable(pages, num_tokens, first_page)})


def test_the_good_one_is_good() -> None:
    assert sum(copies.num_bytes for copies in bind(compile_route(SRC, DST, 0), GOOD)) == 10 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ("group 'full'|source|page 10|[0, 10)", src_table([1, 10, 3])),
        ("group 'full'|source|page -1|[0, 10)", src_table([1, -1, 3])),
        ("group 'full'|destination|page 99|[0, 10)", dst_table([1, 99, 3])),
        ("group 'full'|source|null page 0", src_table([1, 0, 3])),
        ("group 'full'|destination|null page 0", dst_table([0, 2, 3])),
        ("group 'full'|tokens [0, 10)|source's pages [0, 3)|has pages [0, 2)", src_table([1, 2])),
        ("group 'full'|destination's pages [0, 3)|has pages [0, 2)", dst_table([1, 2])),
        ("group 'full'|source's pages [0, 3)|has pages [1, 4)", src_table([1, 2, 3], first_page=1)),
        ("group 'full'|tokens up to 10|source's pages hold 9", src_table([1, 2, 3], 9)),
        ("group 'full'|tokens up to 10|destination's pages hold 4", dst_table([1, 2, 3], 4)),
        ("page 5|pool 'pages'|written twice, by 'full':", dst_table([5, 3, 5])),
        (
            "page 5|pool 'pages'|written twice, by 'full':",
            changed(dst_table([5, 3, 5]), intervals={GROUP: [(0, 4), (8, 10)]}),
        ),
        ("group 'full'|source gives no block table", changed(GOOD, src_tables={})),
        ("group 'full'|destination gives no block table", changed(GOOD, dst_tables={})),
        ("group 'full'|no token intervals|empty list", changed(GOOD, intervals={})),
        ("group 'ful'|token intervals|groups are full", changed(GOOD, intervals={GROUP: [(0, 10)], "ful": []})),
        ("group 'ful'|new pages|groups are full", changed(GOOD, dst_new_pages={"ful": np.array([1])})),
        (
            "group 'full'|page 9 is called new|not in the destination's",
            changed(GOOD, dst_new_pages={GROUP: np.array([9])}),
        ),
        (
            "group 'full'|destination|page 77|[0, 10)",
            changed(dst_table([2, 3, 4, 77]), dst_new_pages={GROUP: np.array([77])}),
        ),
        (
            "group 'full'|destination|null page 0",
            changed(dst_table([2, 3, 4, 0]), dst_new_pages={GROUP: np.array([4, 0])}),
        ),
    ],
)
def test_tables_intervals_and_new_pages(facts: str, wanted: Request) -> None:
    refused(facts, wanted)


@pytest.mark.parametrize(
    "intervals", [[(0, 4), (3, 6)], [(4, 6), (0, 3)], [(3, 3)], [(5, 2)], [(-2, 3)], [(0, 4), (4, 4)]]
)
def test_intervals_are_ascending_disjoint_and_not_empty(intervals: list[tuple[int, int]]) -> None:
    with pytest.raises(
        BindError, match=f"group 'full'.*{re.escape(str(intervals))}.*ascending, disjoint and not empty"
    ):
        changed(GOOD, intervals={GROUP: intervals})


@pytest.mark.parametrize(
    ("pages", "num_tokens", "first_page", "facts"),
    [
        ([[1, 2]], 4, 0, "flat list"),
        ([1.5], 4, 0, "flat list .* float64"),
        (["1"], 4, 0, "flat list"),
        ([2**63, -1], 4, 0, "flat list"),
        ([1], -4, 0, "holds -4 tokens"),
        ([1], 4, -1, "from page -1"),
    ],
)
def test_a_block_table_is_a_flat_list_of_ids(pages: list[object], num_tokens: int, first_page: int, facts: str) -> None:
    with pytest.raises(BindError, match=facts):
        PageTable(pages, num_tokens, first_page)


def test_a_page_outside_the_interval_may_be_anything_at_the_source() -> None:
    """Null pages in front of a window and lookahead behind the tokens are not looked at."""
    wanted = changed(src_table([0, 0, 3, 99]), intervals={GROUP: [(8, 10)]})
    assert sum(copies.num_bytes for copies in bind(compile_route(SRC, DST, 0), wanted)) == 2 * 16


def states() -> tuple[EngineLayout, EngineLayout, Request]:
    kind = Mamba1(4, 2, 2, "bfloat16", "bfloat16")
    src, dst = engine("prefill", kind=kind, null_page=0), engine("decode", kind=kind, null_page=0)
    return src, dst, request(src, dst, 9)


def test_a_state_of_another_moment_is_refused() -> None:
    src, dst, good = states()
    wanted = changed(good, src_tables={GROUP: PageTable([3], 10)})
    refused("group 'full'|absorbed 10 tokens|resumes at 9|stop the prefill", wanted, src, dst)


@pytest.mark.parametrize(
    ("pages", "facts"),
    [
        ([], "0 pages for a state"),
        ([3, 4], "2 pages for a state|one page"),
        ([0], "null page 0"),
        ([10], "page 10|[0, 10)"),
    ],
)
def test_a_state_is_one_page_that_exists(pages: list[int], facts: str) -> None:
    src, dst, good = states()
    refused(facts, changed(good, src_tables={GROUP: PageTable(pages, 9)}), src, dst)
    refused(facts, changed(good, dst_tables={GROUP: PageTable(pages, 9)}), src, dst)


@pytest.mark.parametrize("tokens", [(2, 9), (0, 9)])
def test_what_a_ring_has_overwritten_is_refused(tokens: tuple[int, int]) -> None:
    kind = Ring(6, 1, "bfloat16")
    src, dst = engine("prefill", kind=kind), engine("decode", kind=kind)
    good = request(src, dst, 9, [(3, 9)], src_pages=[1], dst_pages=[2])
    assert list(bind(compile_route(src, dst, 0), good))
    refused(
        f"group 'full'|tokens from {tokens[0]} of 9|only the last 6",
        changed(good, intervals={GROUP: [tokens]}),
        src,
        dst,
    )
    newer = changed(good, src_tables={GROUP: PageTable([1], 10)})
    refused("group 'full'|tokens from 3 of 10|source's ring keeps only the last 6", newer, src, dst)
    refused("source gives 0 pages for a ring of 1", changed(good, src_tables={GROUP: PageTable([], 9)}), src, dst)


def test_a_partial_page_counts_against_a_ring() -> None:
    """A ring of pages of unknown inside: 5 tokens in pages of 2 are three pages, the last one partial."""
    src, dst = (engine(name, kind=Opaque(4, 2, "tag"), page=2) for name in ("prefill", "decode"))
    ring = _as_ring(dst, 2)
    good = request(src, dst, 5, [(2, 5)])
    assert list(bind(compile_route(src, ring, 0), good))
    refused("tokens from 0 of 5|destination's ring keeps only the last 4", request(src, dst, 5), src, ring)


def _as_ring(layout: EngineLayout, num_pages: int) -> EngineLayout:
    from kvreshard.model import AxisMap, Digit

    def turned(axis: AxisMap) -> AxisMap:
        if axis.num_held is not None:
            return axis
        return replace(axis, digits=(Digit(num_pages, 1, 0), Digit(None, 0, 0)))

    ranks = []
    for rank in layout.ranks:
        shards = tuple(
            replace(shard, geometry=replace(shard.geometry, axes=tuple(map(turned, shard.geometry.axes))))
            for shard in rank.shards
        )
        ranks.append(rank.with_shards(shards))
    return replace(layout, ranks=tuple(ranks))


def overlaid() -> tuple[EngineLayout, EngineLayout]:
    layers = [Layer("a", Latent(4, "bfloat16")), Layer("b", Attention(1, 2, "bfloat16"))]
    groups = [PagedGroup("one", ("a",), 4), PagedGroup("two", ("b",), 4)]
    src, dst = (assemble(name, layers, groups, Grid(), order="NHD", num_pages=9) for name in ("prefill", "decode"))
    return src, dst


def test_the_ids_of_every_group_are_looked_at() -> None:
    src, dst = overlaid()
    good = {"one": PageTable([1, 2], 8), "two": PageTable([3, 4], 8)}
    bad = {**good, "two": PageTable([3, 99], 8)}
    intervals = {"one": [(0, 8)], "two": [(0, 8)]}
    refused("group 'two'|source|page 99|[0, 9)", Request(bad, good, intervals, {}), src, dst)
    refused("group 'two'|destination|page 99|[0, 9)", Request(good, bad, intervals, {}), src, dst)


def test_the_pages_of_every_source_rank_are_looked_at() -> None:
    """Two ranks share the sequence token by token; what is asked for lies on the second only."""
    kind = Latent(4, "bfloat16")
    src, dst = engine("prefill", kind=kind, tp=2, dcp=2, null_page=0), engine("decode", kind=kind)
    route = compile_route(src, dst, 0)
    assert {transfer.src_rank for transfer in route.transfers} == {0, 1}
    wanted = request(src, dst, 4, [(1, 2)], src_pages=[0])
    refused("group 'full'|source|null page 0", wanted, src, dst)


@pytest.mark.parametrize("num_pages", [255, 256, 257, 300, 65_535, 65_536, 65_537, 70_000])
def test_pages_are_told_apart_in_pools_of_every_size(num_pages: int) -> None:
    """Also those whose ids agree in their low bits."""
    dst = engine("decode", num_pages=num_pages)
    last = num_pages - 1
    pages = sorted({1, last} | {1 + (1 << bits) for bits in (8, 16) if 1 + (1 << bits) < last})
    wanted = request(SRC, dst, 4 * len(pages), dst_pages=pages)
    assert (
        sum(copies.num_bytes for copies in bind(compile_route(SRC, dst, 0), wanted)) == 4 * len(pages) * 2 * 2 * 2 * 2
    )
    again = request(SRC, dst, 4 * len(pages) + 4, dst_pages=[*pages, last])
    refused(f"page {last} of destination pool 'pages' is written twice", again, dst=dst)


@pytest.mark.parametrize(
    ("one", "two", "new"),
    [
        ([1, 2], [2, 3], {}),
        ([1, 2], [4, 5, 2], {"two": np.array([2])}),
        ([1, 2, 7], [4, 5, 7], {"one": np.array([7]), "two": np.array([7])}),
    ],
)
def test_a_page_belongs_to_one_of_the_groups_that_overlay_it(
    one: list[int], two: list[int], new: dict[str, np.ndarray]
) -> None:
    src, dst = overlaid()
    source = {"one": PageTable([1, 2], 8), "two": PageTable([3, 4], 8)}
    tables = {"one": PageTable(one, 8), "two": PageTable(two, 8)}
    wanted = Request(source, tables, {"one": [(0, 8)], "two": [(0, 8)]}, new)
    refused("destination pool 'pages'|written twice|'one' and 'two'|one group", wanted, src, dst)
    unmoved = changed(wanted, intervals={"one": [(0, 8)], "two": []})
    if new:
        refused("written twice|'one' and 'two'", unmoved, src, dst)
    else:
        assert list(bind(compile_route(src, dst, 0), unmoved))


def test_nothing_is_zeroed_of_a_refused_request() -> None:
    wanted = changed(dst_table([2, 3, 4, 77]), dst_new_pages={GROUP: np.array([77])})
    with pytest.raises(BindError):
        find_unwritten(DST, 0, wanted, bind(compile_route(SRC, DST, 0), wanted))


@pytest.mark.parametrize(
    ("pages", "facts"),
    [
        ([1, 2, 2], "group 'full'|page 2 is called new twice"),
        ([1.7], "group 'full'|new pages must be a flat list of page ids|float64"),
        ([[1]], "group 'full'|new pages must be a flat list of page ids|(1, 1)"),
        ([[1], [2, 3]], "group 'full'|new pages must be a flat list of page ids|lists of different lengths"),
        ([2**64 - 1], "group 'full'|new pages: there is page 18446744073709551615, which no pool has"),
    ],
)
def test_new_pages_are_named_once_and_are_page_ids(pages: list[object], facts: str) -> None:
    """Twice and with a part of a page, they would be zeroed neither way."""
    refused(facts, changed(GOOD, dst_new_pages={GROUP: pages}))


@pytest.mark.parametrize("staging_bytes", [0, 1 << 24])
def test_a_layout_of_which_hardly_two_pages_overlap_alike_is_refused_before_memory_is_taken(staging_bytes: int) -> None:
    """A small layout that is proved: 32 million copies for 8,000 tokens."""
    kind = Attention(8, 64, "bfloat16")
    there = engine("prefill", tp=2, dcp=2, interleave=1023, page=1024, num_pages=12, kind=kind, stages=(0,) * 4)
    here = engine("decode", page=16, num_pages=506, kind=kind, stages=(0,) * 4)
    there = apart(there)
    (route,) = compile_routes(there, here)
    tracemalloc.start()
    with pytest.raises(
        BindError, match=r"different ways or more, with \d+ pieces so far; at most 4194304 pieces are planned"
    ):
        plan_reads(route, request(there, here, 8000), staging_bytes)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 500e6


def test_a_request_whose_pages_each_overlap_in_a_way_of_their_own_is_refused_before_they_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """62,500 ways took 10 seconds, though each has a few pieces."""
    kind = Attention(2, 8, "bfloat16")
    there = engine("prefill", tp=2, dcp=2, interleave=4095, page=4096, num_pages=130, kind=kind)
    here = engine("decode", page=16, num_pages=62_510, kind=kind)
    (route,) = compile_routes(there, here)
    found: list[object] = []
    look = RankTransfer.pattern
    monkeypatch.setattr(RankTransfer, "pattern", lambda self, overlap: found.append(overlap) or look(self, overlap))
    monkeypatch.setattr(budget, "MAX_ENTRIES", 500 * budget.OVERLAP_ENTRIES)
    with pytest.raises(BindError, match=r"overlap in \d+ different ways or more.*page sizes and interleaves"):
        plan_reads(route, request(there, here, 1_000_000))
    assert len(found) <= 500
    assert plan_reads(route, request(there, here, 5_000)).direct


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_ranks_that_have_nothing_of_a_page_are_counted_when_they_are_looked_at(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks, of which one or two have something of each page: 128k tokens would take a minute and 8 million looks."""
    kind = Attention(1, 8, "bfloat16")
    there = engine("prefill", tp=64, dcp=64, interleave=1023, page=1024, num_pages=4, kind=kind)
    here = engine("decode", page=16, num_pages=70, kind=kind)
    (route,) = compile_routes(there, here, way=way)
    wanted = request(there, here, 1000)
    monkeypatch.setattr(budget, "MAX_ENTRIES", 64 * budget.LOOK_ENTRIES * 63 + 100 * budget.OVERLAP_ENTRIES)
    assert plan_reads(route, wanted, 1 << 16)
    monkeypatch.setattr(budget, "MAX_ENTRIES", 64 * budget.LOOK_ENTRIES * 50)
    with pytest.raises(BindError, match="page sizes and interleaves"):
        plan_reads(route, wanted, 1 << 16)


def test_the_pieces_of_one_overlap_are_counted_before_each_rank_s_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 42 ranks they would be 15 GB."""
    kind = Attention(8, 64, "bfloat16")
    there = apart(engine("prefill", tp=8, num_pages=3, kind=kind, page=16, stages=(0,) * 4))
    here = engine("decode", num_pages=3, kind=kind, page=16, stages=(0,) * 4)
    (route,) = compile_routes(there, here)
    made: list[int] = []
    make = pairs._entries

    def counted(found: Any) -> pairs.Entries:
        entries = make(found)
        made.append(len(entries[0]))
        return entries

    monkeypatch.setattr(pairs, "_entries", counted)
    monkeypatch.setattr(budget, "MAX_ENTRIES", 20_000)
    with pytest.raises(BindError, match=r"with \d+ pieces so far; at most 20000"):
        plan_reads(route, request(there, here, 16))
    assert 0 < sum(made) <= 20_000


def test_the_pieces_of_one_overlap_are_counted_before_the_next_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reads are staged, all overlaps of a transfer were found first: 16,000 of them took minutes."""
    kind = Attention(8, 64, "bfloat16")
    there = apart(engine("prefill", tp=2, dcp=2, interleave=1023, page=1024, num_pages=3, kind=kind))
    here = engine("decode", page=16, num_pages=70, kind=kind)
    (route,) = compile_routes(there, here, way="staged")
    found: list[int] = []
    look = RankTransfer.pattern

    def counted(self: RankTransfer, overlap: Overlap) -> Pattern:
        pattern = look(self, overlap)
        found.append(len(pattern.lengths))
        return pattern

    monkeypatch.setattr(RankTransfer, "pattern", counted)
    monkeypatch.setattr(budget, "MAX_ENTRIES", 100_000)
    with pytest.raises(BindError, match=r"with \d+ pieces so far; at most 100000"):
        plan_reads(route, request(there, here, 1000), 1 << 24)
    assert 0 < sum(found) <= 100_000 + max(found)


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_nests_of_loops_count_for_the_time_that_they_take(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a piece each, a million of them took a minute to refuse. Also where a request finds the overlap in the cache."""
    kind, tokens = Latent(1, "bfloat16"), 2 * 63 * 64
    there, here = (
        engine(name, tp=2, dcp=2, interleave=turn, page=tokens, kind=kind)
        for name, turn in (("prefill", 63), ("decode", 64))
    )
    route = compile_route(there, here, 0, way=way)
    assert [len(transfer.pattern(Overlap(0, 0, tokens)).runs) for transfer in route.transfers] == [63, 63]
    for _ in range(2):
        monkeypatch.setattr(budget, "MAX_ENTRIES", 2 * 63 * budget.NEST_ENTRIES)
        with pytest.raises(BindError, match="page sizes and interleaves"):
            plan_reads(route, request(there, here, tokens), 1 << 24)
        monkeypatch.setattr(budget, "MAX_ENTRIES", 2 * 63 * (budget.NEST_ENTRIES + budget.PAGE_ENTRIES + 2))
        assert plan_reads(route, request(there, here, tokens), 1 << 24)


def test_copies_that_must_be_listed_are_counted_over_all_groups_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = engine("prefill", num_pages=600, page=4), engine("decode", num_pages=600, page=4, order="HND")
    for way in ("direct", "staged"):
        route = compile_route(src, dst, 0, way=way)
        scattered = request(src, dst, 2000, src_pages=range(1, 501), dst_pages=range(500, 0, -1))
        plan = plan_reads(route, scattered, 1 << 12, min_paged=1 << 30)
        posted = sum(one.num_copies for one in plan.direct) + sum(batch.reads.num_copies for batch in plan.batches)
        monkeypatch.setattr(budget, "MAX_LISTED", posted)
        plan_reads(route, scattered, 1 << 12, min_paged=1 << 30)
        monkeypatch.setattr(budget, "MAX_LISTED", posted - 1)
        with pytest.raises(BindError, match=rf"this request is {posted} copies or more, and at most {posted - 1}"):
            plan_reads(route, scattered, 1 << 12, min_paged=1 << 30)
        monkeypatch.undo()


def test_staged_reads_that_cannot_be_joined_are_refused_before_memory_is_taken() -> None:
    """Cells farther apart than a gap that is read: 32 million reads, 0.8 GB."""
    kind = Attention(8, 64, "bfloat16")
    there = apart(engine("prefill", page=16, num_pages=506, kind=kind, stages=(0,) * 4), 11_000)
    here = engine("decode", page=16, num_pages=506, kind=kind, stages=(0,) * 4)
    (route,) = compile_routes(there, here, way="staged")
    tracemalloc.start()
    with pytest.raises(BindError, match="and at most 16777216 are listed; choose memory orders that agree"):
        plan_reads(route, request(there, here, 8000), 1 << 24)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 600e6


def apart(layout: EngineLayout, cell_step: int = 0) -> EngineLayout:
    """The same engine, with no two cells of a field side by side, but `cell_step` bytes apart."""
    document = json.loads(wire.encode(layout, "json"))
    step = first = cell_step or 2 * len(document["fields"])
    for geometry in document["geometries"].values():
        step = first
        for axis in reversed(geometry["axes"]):
            for digit in axis["digits"]:
                if digit["extent"] and digit["extent"] > 1:
                    digit["byte_step"] = step
                    step *= digit["extent"]
        geometry["page_stride_bytes"] = step
    size = step * document["groups"][0]["num_pages"]
    for number, rank in enumerate(document["ranks"]):
        rank["regions"] = [{"name": "kv", "address": (number + 1) << 50, "size_bytes": size}]
        slab = {"pool": "pages", "region": "kv", "offset_bytes": 0, "page_stride_bytes": step, "page_bytes": step}
        rank["slabs"] = [slab]
        for place, shard in enumerate(rank["shards"]):
            shard["offset_bytes"] = 2 * place
    return wire.decode(json.dumps(document).encode(), "json")
