"""Does a request get the way that its block tables deserve, and do pages name the copies that a list names?"""

from dataclasses import fields

import msgspec
import numpy as np
import pytest

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import BindError, EngineLayout, UsageError
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import CopyList, PagedCopies, bind, compile_route, stage
from kvreshard.plan.bind import (
    MIN_JOINED_BYTES,
    SHARED_COPIES,
    SPLIT_BYTES,
    group_aligned,
    max_joined_bytes,
)
from kvreshard.plan.copies import Page
from kvreshard.plan.cost import DEVICE_COST, MEASURED_SPEEDUP, CostModel, Work
from kvreshard.plan.reads import plan_reads
from kvreshard.plan.stage import fill_bytes
from kvreshard.transport.slices import SPLIT_COPIES

NUM_TOKENS = 2000
STAGING_BYTES = 8 << 20
# Copies are dear and moving is cheap, so that neighbours at the source are worth staging, single pages are not.
COST = CostModel(3e-6, 7e9, 3e-8, 8e9, 7e9, min_speedup=MEASURED_SPEEDUP)


def pair(prefill: str, decode: str) -> tuple[EngineLayout, EngineLayout]:
    model = load("llama-3.1-8b")
    return (
        describe(model, parse_engine(prefill), "prefill", 1000),
        describe(model, parse_engine(decode), "decode", 1000),
    )


def make_request(src: EngineLayout, dst: EngineLayout, src_pages: np.ndarray, dst_pages: np.ndarray) -> Request:
    (src_group,), (dst_group,) = src.groups, dst.groups
    return Request(
        {src_group.name: PageTable(src_pages, NUM_TOKENS)},
        {dst_group.name: PageTable(dst_pages, NUM_TOKENS)},
        {dst_group.name: [(0, NUM_TOKENS)]},
        {},
    )


def scattered() -> np.ndarray:
    return 2 * np.random.default_rng(0).permutation(np.arange(1, 400))[:125]


def rows(lists: list[CopyList]) -> list[tuple[int, int, int]]:
    """All copies, sorted by source; those that continue one another on both sides as one."""
    found: list[tuple[int, int, int]] = []
    for one in lists:
        found += zip(one.src_address.tolist(), one.dst_address.tolist(), one.length.tolist(), strict=True)
    joined: list[tuple[int, int, int]] = []
    for src, dst, length in sorted(found):
        last = joined[-1] if joined else (0, 0, 0)
        if (src, dst) == (last[0] + last[2], last[1] + last[2]):
            joined[-1] = (*last[:2], last[2] + length)
        else:
            joined.append((src, dst, length))
    return joined


def test_pages_name_the_copies_of_the_list() -> None:
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    route, request = compile_route(src, dst, 1), make_request(src, dst, scattered(), scattered())
    paged = list(plan_reads(route, request, min_paged=1).direct)
    assert any(isinstance(one, PagedCopies) for one in paged)
    listed = [one.flat() for one in paged]
    assert rows(listed) == rows(list(bind(route, request)))
    assert sum(one.num_copies for one in paged) == sum(one.num_copies for one in listed)
    assert sum(one.num_bytes for one in paged) == sum(one.num_bytes for one in listed)


def test_a_page_stays_the_same_object() -> None:
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    route = compile_route(src, dst, 0)
    found = [
        one.page
        for _ in range(2)
        for one in plan_reads(route, make_request(src, dst, scattered(), scattered())).direct
        if isinstance(one, PagedCopies)
    ]
    assert len(found) == 2 * len(route.transfers)
    assert found[0] is found[len(route.transfers)]


def test_neighbouring_pages_are_joined() -> None:
    src, dst = pair("tp=8,order=HND", "tp=8,order=HND")
    pages = np.arange(1, 126)
    lists = plan_reads(compile_route(src, dst, 0), make_request(src, dst, pages, pages)).direct
    # 125 pages per layer, 8 KiB with K and V together; more than 8 MiB in all, so a copy has 128 KiB at most.
    assert sum(one.num_copies for one in lists) == 32 * 8
    assert all(isinstance(one, CopyList) for one in lists)


def test_long_neighbours_are_not_joined_and_stay_pages() -> None:
    src, dst = pair("tp=1,order=HND,page=256", "tp=1,order=HND,page=256")
    pages = np.arange(1, 9)
    route, request = compile_route(src, dst, 0), make_request(src, dst, pages, pages)
    (aligned, _) = group_aligned(
        [one for each in route.pairs for one in each.copies(each.page_ranges(request), each.transfers)]
    )
    # 7 whole pages of 1 MiB for each of 32 layers: as long as a joined copy may be.
    assert (aligned.num_pages, aligned.num_joined, aligned.num_copies) == (7, 0, 7 * 32)
    found = plan_reads(route, request, min_paged=7 * 32).direct
    assert [type(one) for one in found] == [PagedCopies, CopyList]  # of the last page only a part
    assert found[0].num_copies == 7 * 32
    assert rows([one.flat() for one in found]) == rows(list(bind(route, request)))


@pytest.mark.parametrize(
    ("num_bytes", "most_bytes"),
    [
        (1, 1 << 20),
        ((8 << 20) - 1, 1 << 20),
        (8 << 20, 128 << 10),
        (33 << 20, 132 << 10),
        (255 << 20, 255 << 12),
        (256 << 20, 1 << 20),
        (1 << 40, 1 << 20),
    ],
)
def test_neighbours_are_joined_so_far_that_threads_can_share_them(num_bytes: int, most_bytes: int) -> None:
    assert max_joined_bytes(num_bytes) == most_bytes


def test_what_is_too_little_to_be_shared_is_what_the_transport_does_not_share() -> None:
    """The planner knows no transport: that both mean the same bound is held here."""
    assert SPLIT_BYTES == SPLIT_COPIES * MIN_JOINED_BYTES
    assert SHARED_COPIES >= 4 * SPLIT_COPIES


def test_neighbouring_pages_are_a_list_of_runs() -> None:
    src, dst = pair("tp=8,order=HND", "tp=8,order=HND")
    route = compile_route(src, dst, 0)
    src_pages = np.concatenate([np.arange(1, 41), np.arange(60, 101), [50, 110]])
    dst_pages = np.concatenate([np.arange(101, 141), np.arange(1, 42), [200, 201]])
    (src_group,), (dst_group,) = src.groups, dst.groups
    num_tokens = len(src_pages) * 16
    tables = {src_group.name: PageTable(src_pages, num_tokens)}, {dst_group.name: PageTable(dst_pages, num_tokens)}
    request = Request(*tables, {dst_group.name: [(0, num_tokens)]}, {})
    (found,) = plan_reads(route, request).direct
    assert isinstance(found, CopyList)
    # Of 21.5 MB a copy has 128 KiB, 16 pages, at most.
    assert (found.length[:8] // 8192).tolist() == [16, 16, 8, 1, 16, 16, 9, 1]
    assert rows([found]) == rows(list(bind(route, request)))


@pytest.mark.parametrize("reverse", [False, True])
def test_neighbours_at_the_source_are_staged(reverse: bool) -> None:
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    pages = np.arange(1, 126)[:: -1 if reverse else 1]
    plan = plan_reads(compile_route(src, dst, 0, cost=COST), make_request(src, dst, pages, pages), STAGING_BYTES)
    assert plan.batches
    assert not plan.direct


def test_scattered_pages_are_read_directly() -> None:
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    route = compile_route(src, dst, 0, cost=COST)
    plan = plan_reads(route, make_request(src, dst, scattered(), scattered()), STAGING_BYTES)
    assert plan.direct
    assert not plan.batches


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_a_forced_way_is_kept(way: str) -> None:
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    for pages in (np.arange(1, 126), scattered()):
        route = compile_route(src, dst, 0, way=way)
        plan = plan_reads(route, make_request(src, dst, pages, pages), STAGING_BYTES)
        assert bool(plan.batches) == (way == "staged")
        assert bool(plan.direct) == (way == "direct")


def test_without_a_buffer_everything_is_direct() -> None:
    src, dst = pair("tp=4,order=NHD", "tp=8,order=NHD")
    route = compile_route(src, dst, 0)
    plan = plan_reads(route, make_request(src, dst, scattered(), scattered()), 0)
    assert plan.direct
    assert not plan.batches


def test_a_page_that_does_not_fit_is_refused_only_where_staging_is_forced() -> None:
    src, dst = pair("tp=4,order=NHD", "tp=8,order=NHD")
    request = make_request(src, dst, scattered(), scattered())
    assert plan_reads(compile_route(src, dst, 0, way="direct"), request, 64).direct
    with pytest.raises(BindError, match="one page needs"):
        plan_reads(compile_route(src, dst, 0, way="staged"), request, 64)


def test_a_part_of_a_page_that_does_not_fit_is_read_directly() -> None:
    """A request shorter than a page has no whole one whose cost could be looked at."""
    src, dst = pair("tp=4,order=NHD", "tp=8,order=NHD")
    (src_group,), (dst_group,) = src.groups, dst.groups
    tables = {src_group.name: PageTable([3], 5)}, {dst_group.name: PageTable([7], 5)}
    request = Request(*tables, {dst_group.name: [(0, 5)]}, {})
    route = compile_route(src, dst, 0)
    assert route.transfers[0].choice.way == "staged"
    assert plan_reads(route, request, STAGING_BYTES).batches
    assert plan_reads(route, request, 64).direct


@pytest.mark.parametrize(
    "constant", [field.name for field in fields(CostModel) if field.name not in ("hidden_share", "batch_s")]
)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf")])
def test_constants_must_be_positive(constant: str, value: float) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        CostModel(**{constant: value})


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(UsageError, match="a share is from 0 to 1"):
        CostModel(hidden_share=share)


def test_staging_must_be_twice_as_fast_unless_the_host_was_measured() -> None:
    """By the default constants, HND pages that are halved are 1.3 times as fast staged, head splits of token-major pages many times."""
    for engines, wanted in (
        (("tp=8,order=HND", "tp=4,order=HND"), {2.0: "direct", 1.2: "staged", 1.5: "direct"}),
        (("tp=4,order=NHD", "tp=8,order=NHD"), {2.0: "staged", 1.2: "staged"}),
        (("tp=8,order=HND", "tp=8,order=HND"), {2.0: "direct", 1.2: "direct"}),
    ):
        src, dst = pair(*engines)
        pages = np.arange(1, 126)
        for speedup, way in wanted.items():
            route = compile_route(src, dst, 0, cost=CostModel(min_speedup=speedup))
            plan = plan_reads(route, make_request(src, dst, pages, pages), STAGING_BYTES)
            assert (bool(plan.direct), bool(plan.batches)) == (way == "direct", way == "staged"), (engines, speedup)
    assert CostModel().min_speedup == 2.0


def test_a_state_that_is_read_directly_is_so_in_every_request() -> None:
    """One page has no neighbours that could make staging pay; of the attention pages of the same size a request has many."""
    model = load("nemotron-3-nano-30b-a3b")
    src, dst = (describe(model, parse_engine("tp=2,kernel=16"), name, 10) for name in ("prefill", "decode"))
    may_pay_anywhere = CostModel(copy_s=1e-3)
    choices = {
        (transfer.is_state, transfer.choice.way, transfer.choice.is_open)
        for transfer in compile_route(src, dst, 0, cost=may_pay_anywhere).transfers
    }
    assert choices == {(True, "direct", False), (True, "staged", True), (False, "direct", True)}


def test_the_estimate_counts_descriptors_and_bytes_wanted_and_read() -> None:
    model = CostModel(copy_s=1e-6, read_bytes_per_s=1e9, move_run_s=1e-8, move_bytes_per_s=1e9, stage_bytes_per_s=1e9)
    work = Work(num_copies=1000, num_bytes=100_000, num_reads=10, num_read_bytes=100_000, num_runs=1000)
    assert model.direct_s(work) == pytest.approx(1.1e-3)
    assert model.staged_s(work) == pytest.approx(0.22e-3)
    assert model.prefers_staging(work)
    for more in ({"num_read_bytes": 500_000}, {"num_reads": 400}, {"num_runs": 100_000}, {"num_copies": 200}):
        assert not model.prefers_staging(msgspec.structs.replace(work, **more)), more


def test_where_no_request_can_be_staged_none_is_counted() -> None:
    """`may_prefer_staging` is never wrong about it."""
    rng = np.random.default_rng(3)
    said = 0
    for _ in range(500):
        model = CostModel(*(10.0 ** rng.uniform((-7, 8, -9, 8, 8), (-5, 11, -7, 11, 11))), float(rng.random()))
        num_copies, num_bytes = int(rng.integers(1, 10**5)), int(rng.integers(1, 10**9))
        work = Work(
            num_copies, num_bytes, int(rng.integers(1, 100)), num_bytes, num_copies, float(rng.integers(1, 100))
        )
        if not model.may_prefer_staging(num_copies, num_bytes):
            said += 1
            assert not model.prefers_staging(work)
    assert 50 < said < 450


def test_what_is_hidden_is_of_the_shorter_and_not_of_the_last_batch() -> None:
    """8 ms of reading and 2 of moving, or the other way round."""
    for model in (CostModel(1e-6, 1e9, 1e-9, 4e9, 1e9, 0.5), CostModel(1e-6, 1e9, 1e-9, 1e9, 4e9, 0.5)):
        found = [model.staged_s(Work(0, 8_000_000, 0, 8_000_000, 0, batches)) for batches in (0.1, 1, 2, 4, 1e12)]
        assert found == pytest.approx([0.01, 0.01, 0.0095, 0.00925, 0.009])


def test_what_a_batch_takes_beside_its_bytes_is_counted_and_makes_batches_larger() -> None:
    model = CostModel(1e-6, 1e9, 1e-9, 4e9, 1e9, batch_s=0.01)
    found = [model.staged_s(Work(0, 8_000_000, 0, 8_000_000, 0, batches)) for batches in (0, 1, 3)]
    assert found == pytest.approx([0.01, 0.02, 0.04])
    assert model.least_batch_bytes == 40_000_000
    assert fill_bytes(1 << 30, model=model) == 40_000_000
    assert fill_bytes(1 << 20, model=model) == 1 << 20
    assert fill_bytes(1 << 30, model=CostModel()) == fill_bytes(1 << 30) == 5 << 20


def test_equal_pages_side_by_side_are_not_staged_on_a_device() -> None:
    """On an H200 staging took 6 times as long for 32k tokens; pages that are halved were 3 times as fast staged."""
    for engines, way in (
        (("tp=8,order=HND", "tp=8,order=HND"), "direct"),
        (("tp=8,order=HND", "tp=4,order=HND"), "staged"),
    ):
        src, dst = pair(*engines)
        route = compile_route(src, dst, 0, cost=DEVICE_COST)
        pages = np.arange(1, 513)
        (src_group,), (dst_group,) = src.groups, dst.groups
        tables = {src_group.name: PageTable(pages, 8192)}, {dst_group.name: PageTable(pages, 8192)}
        found = plan_reads(route, Request(*tables, {dst_group.name: [(0, 8192)]}, {}), 32 << 20)
        assert ("staged" if found.batches else "direct") == way, engines


def test_a_request_of_many_batches_is_staged_where_moving_them_hides() -> None:
    """By the page staging costs a tenth more; with two thirds of the shorter hidden it is cheaper, for 4096 tokens and not for 64."""
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    ways = {}
    for share in (0.0, 0.67):
        model = CostModel(1.4e-6, 1e10, 1e-9, 8e9, 6e9, share, min_speedup=MEASURED_SPEEDUP)
        route = compile_route(src, dst, 0, cost=model)
        assert {transfer.choice.way for transfer in route.transfers} == {"direct"}
        for count in (4, 256):
            told = PageTable(range(1, count + 1), 16 * count)
            groups = src.groups[0].name, dst.groups[0].name
            request = Request({groups[0]: told}, {groups[1]: told}, {groups[1]: [(0, 16 * count)]}, {})
            plan = plan_reads(route, request, STAGING_BYTES)
            ways[share, count] = "staged" if plan.batches and not plan.direct else "direct"
    assert ways == {(0.0, 4): "direct", (0.0, 256): "direct", (0.67, 4): "direct", (0.67, 256): "staged"}


@pytest.mark.parametrize(("share", "way"), [(0.0, "direct"), (0.67, "staged")])
def test_what_hides_counts_for_pages_of_unequal_size_too(share: float, way: str) -> None:
    src, dst = pair("tp=8,order=HND,page=16", "tp=4,order=HND,page=64")
    route = compile_route(src, dst, 0, cost=CostModel(6e-6, 1e10, 1e-9, 8e9, 6e9, share, min_speedup=MEASURED_SPEEDUP))
    tables = {src.groups[0].name: PageTable(range(1, 257), 4096)}, {dst.groups[0].name: PageTable(range(1, 65), 4096)}
    plan = plan_reads(route, Request(*tables, {dst.groups[0].name: [(0, 4096)]}, {}), STAGING_BYTES)
    assert (bool(plan.direct), bool(plan.batches)) == (way == "direct", way == "staged")


@pytest.mark.parametrize(("constant", "way"), [("read_bytes_per_s", "direct"), ("stage_bytes_per_s", "staged")])
def test_the_way_whose_reads_are_faster_is_taken(constant: str, way: str) -> None:
    """Pages of which two thirds of the time are bytes: whichever is read ten times as fast wins, by page and by request."""
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    model = CostModel(1e-6, 2e9, 1e-9, 4e9, 2e9, min_speedup=1.0)
    route = compile_route(src, dst, 0, cost=replace(model, **{constant: 2e10}))
    assert {transfer.choice.way for transfer in route.transfers} == {way}
    tables = {src.groups[0].name: PageTable(range(1, 65), 1024)}, {dst.groups[0].name: PageTable(range(1, 65), 1024)}
    plan = plan_reads(route, Request(*tables, {dst.groups[0].name: [(0, 1024)]}, {}), STAGING_BYTES)
    assert (bool(plan.direct), bool(plan.batches)) == (way == "direct", way == "staged")


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (16, 48), (48, 16)])
def test_copies_are_counted_as_they_would_be_listed(sizes: tuple[int, int]) -> None:
    """Of 80 layers and several kinds of overlaps, parts of pages at both ends."""
    src, dst = pair(*(f"tp=4,order={order},page={size}" for order, size in zip(("HND", "NHD"), sizes, strict=True)))
    (src_group,), (dst_group,) = src.groups, dst.groups
    pages = [np.random.default_rng(1).permutation(200)[: 2000 // size + 1] + 1 for size in sizes]
    tables = {src_group.name: PageTable(pages[0], 1999)}, {dst_group.name: PageTable(pages[1], 1999)}
    request = Request(*tables, {dst_group.name: [(5, 1999)]}, {})
    (pair_of_groups,) = compile_route(src, dst, 0).pairs
    aligned = group_aligned(pair_of_groups.copies(pair_of_groups.page_ranges(request), pair_of_groups.transfers))
    assert aligned
    for one in aligned:
        listed = one.listed(1 << 60)
        assert one.num_copies == listed.num_copies
        assert one.num_bytes == listed.num_bytes
    assert sum(one.num_bytes for one in aligned) == sum(
        one.num_bytes for one in bind(compile_route(src, dst, 0), request)
    )


@pytest.mark.parametrize("num_pages", [64, 2048])
@pytest.mark.parametrize("falls", [False, True])
def test_neighbours_two_by_two_join_wherever_the_pairs_lie(num_pages: int, falls: bool) -> None:
    page = Page.of([0, 1 << 20], [0, 1 << 20], 64, (64, 64), (3 * num_pages, 3 * num_pages))
    first = 1 + 3 * np.random.default_rng(num_pages).permutation(num_pages // 2)
    src = np.stack([first + 1, first] if falls else [first, first + 1], axis=1).reshape(-1)
    (aligned,) = group_aligned([PagedCopies(0, 0, page, src, src)])
    assert aligned.num_joined == num_pages // 2
    assert aligned.listed(1 << 60).num_copies == aligned.num_copies == num_pages


@pytest.mark.parametrize("pool", [300, 40_000, 70_000, 1 << 33])
@pytest.mark.parametrize(("run_bytes", "stride"), [(2, 2), (64, 64), (63, 64), (65, 65), (127, 127), (96, 4096)])
def test_pages_are_put_in_the_sources_order_in_pools_of_every_size(pool: int, run_bytes: int, stride: int) -> None:
    """Whole pages, and both bytes of two other pages one by one."""
    whole = Page.of([1000], [0], run_bytes, (stride, stride), (pool, pool))
    bytes_of = [Page.of([1000 + at], [at], 1, (stride, stride), (pool, pool)) for at in (1, 0)]
    ids = np.unique(np.random.default_rng(pool).integers(0, pool, 200))
    src = np.random.default_rng(stride).permutation(ids)
    parts = [PagedCopies(0, 0, page, src[:2], src[:2]) for page in bytes_of]
    (aligned,) = group_aligned([*parts, PagedCopies(0, 0, whole, src[2:], src[2:])])
    first = aligned.first_entries
    assert first.src.tolist() == sorted([*(1000 + stride * ids), *(1001 + stride * src[:2])])
    assert (first.dst == first.src - 1000).all()


def test_short_lists_of_a_source_are_posted_as_one() -> None:
    model = load("gemma-4-26b-a4b")
    src, dst = (describe(model, parse_engine("tp=2,order=HND"), name, 500) for name in ("prefill", "decode"))
    num_tokens, tables = 600, []
    for layout in (src, dst):
        pages, found = np.arange(1, 500), {}
        for group in layout.groups:
            count = -(-num_tokens // (group.tokens_per_page or num_tokens))
            found[group.name], pages = PageTable(pages[:count], num_tokens), pages[count:]
        tables.append(found)
    request = Request(*tables, {group.name: [(0, num_tokens)] for group in dst.groups}, {})
    route = compile_route(src, dst, 0)
    plan = plan_reads(route, request)
    assert len(route.transfers) > 1
    assert len(plan.direct) == len(route.src_ranks)
    assert rows([one.flat() for one in plan.direct]) == rows(list(bind(route, request)))


@pytest.mark.parametrize("fill_bytes", [1, 4096, 100_000])
def test_a_batch_is_no_larger_than_a_cache_or_one_slot(fill_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the buffer is; and the batches read and move what one large batch does."""
    src, dst = pair("tp=8,order=HND", "tp=4,order=HND")
    pages = np.arange(1, 126)
    route, request = compile_route(src, dst, 0, way="staged"), make_request(src, dst, pages, pages)
    whole = plan_reads(route, request, STAGING_BYTES)
    monkeypatch.setattr(stage, "FILL_BYTES", fill_bytes)
    monkeypatch.setattr(stage, "MAX_SMALL_BATCHES", 1 << 40)
    parts = plan_reads(route, request, STAGING_BYTES)
    one_slot = 2 * 16 * 128 * 2  # K and V of one head
    assert {batch.buffer_bytes <= max(fill_bytes, one_slot) for batch in parts.batches} == {True}
    assert len(parts.batches) > len(whole.batches)
    assert sum(batch.num_bytes for batch in parts.batches) == sum(batch.num_bytes for batch in whole.batches)

    def sources(batches: tuple[stage.Batch, ...]) -> list[int]:
        return sorted(
            start + byte
            for batch in batches
            for start, length in zip(batch.reads.src_address.tolist(), batch.reads.length.tolist(), strict=True)
            for byte in range(0, length, 256)
        )

    assert sources(parts.batches) == sources(whole.batches)


@pytest.mark.parametrize("first", [0, 32, 40, 1000])
@pytest.mark.parametrize("prefill", ["page=16", "page=16,order=HND"])
def test_neighbours_that_go_to_several_places_of_a_page_are_one_read(prefill: str, first: int) -> None:
    """Four source pages fill one destination page: each lies elsewhere in it, and they are neighbours all the same."""
    src, dst = pair(f"tp=4,{prefill}", "tp=4,order=NHD,page=64" if "HND" in prefill else "tp=4,order=HND,page=64")
    (src_group,), (dst_group,) = src.groups, dst.groups
    dst_pages = scattered()[: -(-NUM_TOKENS // 64)]
    tables = (
        {src_group.name: PageTable(np.arange(1, 126), NUM_TOKENS)},
        {dst_group.name: PageTable(dst_pages, NUM_TOKENS)},
    )
    request = Request(*tables, {dst_group.name: [(first, NUM_TOKENS)]}, {})
    route = compile_route(src, dst, 0, way="staged")
    plan = plan_reads(route, request, STAGING_BYTES)
    num_fields = sum(len(transfer.bases.src) for transfer in route.transfers)
    # One read of a field per batch that it is in; and one more for a part of a page.
    assert sum(batch.reads.num_copies for batch in plan.batches) <= num_fields * (2 if first == 40 else 1) + len(
        plan.batches
    )
    assert sum(batch.num_bytes for batch in plan.batches) == sum(one.num_bytes for one in bind(route, request))


def test_batches_grow_where_there_would_be_very_many() -> None:
    sizes = [stage.fill_bytes(1 << 30, total << 20) >> 20 for total in (1, 128, 256, 512, 4096)]
    assert sizes == [5, 5, 8, 16, 16]
    assert stage.fill_bytes(1 << 20, 4096 << 20) == 1 << 20
