"""Does what is compiled do what the NumPy beside it does, and is it there where a compiler is?"""

import os
import random
import shutil
from types import ModuleType

import numpy as np
import pytest

from kvreshard.model import plain_loops
from kvreshard.model.loops import compiled
from kvreshard.model.tables import PageTable

FORMS = [plain_loops] + ([] if compiled is None else [compiled])
needs_compiled = pytest.mark.skipif(compiled is None, reason="nothing was compiled when this was installed")


@pytest.mark.skipif(not os.environ.get("KVRESHARD_REQUIRE_NIXL"), reason="only where all that can be here must be here")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler on this machine")
def test_where_a_compiler_is_the_loops_are_compiled() -> None:
    assert compiled is not None, "install the package again: `pip install -e .` compiles its loops"


def same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return one == other


def pages(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of pages with stretches of neighbours on one side or both, some of them backwards."""
    steps = rng.choice([1, 1, 1, 1, 2, 7], size=(2, rng.integers(1, 60)))
    found = 5 + np.cumsum(steps, axis=1)
    return (found[0], found[1]) if rng.random() < 0.7 else (found[0][::-1], found[1])


@needs_compiled
def test_pairs_of_pages_are_compared_and_joined_alike() -> None:
    assert compiled is not None
    seed = random.getrandbits(32)
    rng = np.random.default_rng(seed)
    for _ in range(300):
        src, dst = pages(rng)
        assert same(compiled.bounds(src), plain_loops.bounds(src)), seed
        assert same(compiled.ordered([src], [dst]), plain_loops.ordered([src], [dst])), seed
        wide = rng.permutation(src) * int(rng.choice([1, 300, 70_000, 2**40]))
        assert same(compiled.ordered([wide], [dst]), plain_loops.ordered([wide], [dst])), seed
        cuts = np.sort(rng.integers(0, len(src) + 1, size=2))
        parts = np.split(wide, cuts), np.split(dst, cuts)
        assert same(compiled.ordered(*parts), plain_loops.ordered([wide], [dst])), seed
        assert same(plain_loops.ordered(*parts), plain_loops.ordered([wide], [dst])), seed
        counts = rng.integers(1, 9, size=len(src))
        assert same(compiled.run_bounds(dst, counts), plain_loops.run_bounds(dst, counts)), seed
        most = int(rng.integers(1, 12))
        assert same(compiled.runs(src, dst, most), plain_loops.runs(src, dst, most)), seed


@needs_compiled
def test_the_rows_of_a_frame_are_alike() -> None:
    assert compiled is not None
    rng = np.random.default_rng(random.getrandbits(32))
    for _ in range(100):
        num_entries, num_runs = rng.integers(1, 9, size=2)
        entries = tuple(rng.integers(1, 2**32, size=(3, num_entries), dtype=np.uint64))
        of_runs = tuple(rng.integers(1, 100, size=(3, num_runs)))
        strides = int(rng.integers(9000)), 4096
        given = entries, strides, (0, 3), of_runs, 500
        assert same(compiled.frame_rows(*given), plain_loops.frame_rows(*given))
        signed = tuple(column.astype(np.int64) for column in entries)
        assert same(compiled.frame_copies(signed, strides, of_runs), plain_loops.frame_copies(signed, strides, of_runs))


@needs_compiled
def test_pieces_are_numbered_and_listed_alike() -> None:
    assert compiled is not None
    seed = random.getrandbits(32)
    rng = np.random.default_rng(seed)
    for _ in range(200):
        num_pages, num_entries = (int(number) for number in rng.integers(1, 20, size=2))
        local, remote = rng.integers(0, 900, size=(2, num_pages))
        first, stop = sorted(rng.integers(0, num_pages * num_entries + 1, size=2).tolist())
        given = local, remote[::-1], (900, 1000), first, stop
        assert same(compiled.frame_indices(*given), plain_loops.frame_indices(*given)), seed
        pieces = tuple(rng.integers(1, 2**40, size=(3, num_pages), dtype=np.uint64))
        devices = int(rng.integers(4)), int(rng.integers(4))
        assert same(compiled.piece_rows(pieces, devices, 77), plain_loops.piece_rows(pieces, devices, 77)), seed
        assert same(compiled.reach(pieces[0], pieces[2]), plain_loops.reach(pieces[0], pieces[2])), seed
        cost = np.cumsum(rng.integers(1, 9, size=num_pages + 1)).astype(np.uint64)
        begin, end = sorted(rng.choice(num_pages + 1, size=2, replace=False).tolist())
        for budget in (0, int(rng.integers(40)), 2**63):
            found = compiled.affordable(cost, begin, end, budget)
            assert found == plain_loops.affordable(cost, begin, end, budget), seed
        counts = rng.multinomial(num_pages, [0.25] * 4).tolist()
        by = rng.integers(-5, 2**50, size=4).tolist()
        assert same(compiled.shifted(local, counts, by), plain_loops.shifted(local, counts, by)), seed
        columns = [rng.integers(1, 9, size=num_pages) for _ in range(3)]
        if rng.random() < 0.7:
            columns[rng.integers(3)][rng.integers(num_pages)] = rng.integers(-1, 2)
        assert compiled.are_pieces(*columns) == plain_loops.are_pieces(*columns), seed


@needs_compiled
def test_regions_are_looked_at_alike() -> None:
    assert compiled is not None
    seed = random.getrandbits(32)
    rng = random.Random(seed)
    for _ in range(500):
        count = rng.randint(1, 5)
        most = rng.choice([4, 1 << 40, 1 << 62, (1 << 63) - 1])
        addresses = sorted(rng.randint(-1 if rng.random() < 0.2 else 0, most) for _ in range(count))
        if rng.random() < 0.5:
            rng.shuffle(addresses)
        sizes = [rng.choice([0, 1, -1 if rng.random() < 0.2 else 2, most]) for _ in range(count)]
        given = np.array(addresses, dtype=np.int64), np.array(sizes, dtype=np.int64)
        assert compiled.extent_of(*given) == plain_loops.extent_of(*given), (seed, given)
        for numbers in (addresses, tuple(addresses), [True, 2], (), range(3)):
            if max(numbers, default=0) < 1 << 63:
                assert same(compiled.int64s(numbers), plain_loops.int64s(numbers)), seed


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_regions_follow_one_another_or_do_not(form: ModuleType) -> None:
    for addresses, sizes, found in (
        ((8, 16, 40), (8, 24, 1), (8, 1, 41, True)),
        ((8, 16, 40), (9, 24, 1), (8, 1, 41, False)),
        ((8, 16, 40), (8, 25, 0), (8, 0, 41, False)),
        ((40, 0), (2**63 - 1, 3), (0, 3, 2**63 + 39, False)),
        ((-1,), (-2,), (-1, -2, 0, False)),
        ((5, -1), (7, 2), (-1, 2, 0, False)),
    ):
        assert form.extent_of(np.array(addresses), np.array(sizes)) == found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_rows_are_numbered_by_what_they_are(form: ModuleType) -> None:
    one, other = np.array([7, 7, 5, 7, 5, -1]), np.array([0, 1, 0, 0, 0, 0])
    which, firsts = form.row_kinds((one, other))
    assert (which.tolist(), firsts) == ([0, 1, 2, 0, 2, 3], [0, 1, 2, 5])
    assert form.row_kinds((one,))[1] == [0, 2, 5]
    assert form.row_kinds((one[::2], other[:3]))[0].tolist() == [0, 1, 2]
    which, firsts = form.row_kinds((one[:0],))
    assert (which.dtype, which.tolist(), firsts) == (np.int64, [], [])
    with pytest.raises(ValueError):  # noqa: PT011 (of either form, in its own words)
        form.row_kinds((one, other[:2]))


@needs_compiled
def test_rows_are_numbered_alike_however_many_kinds_there_are(run_seed: int) -> None:
    assert compiled is not None
    rng = np.random.default_rng(run_seed)
    for _ in range(300):
        most = int(rng.choice([1, 2, 5, 40, 1000]))
        num_rows, num_columns = int(rng.choice([0, 1, 2, 33, 200])), int(rng.integers(1, 6))
        columns = tuple(rng.integers(0, most, num_rows) for _ in range(num_columns))
        (which, firsts), (plainly, plain_firsts) = compiled.row_kinds(columns), plain_loops.row_kinds(columns)
        assert (which.tolist(), firsts) == (plainly.tolist(), plain_firsts)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_numbers_have_64_bits(form: ModuleType) -> None:
    with pytest.raises(OverflowError):
        form.int64s((1, 2**63))
    assert form.int64s((-(2**63), 2**63 - 1)).tolist() == [-(2**63), 2**63 - 1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_pieces_are_told_from_what_is_none(form: ModuleType) -> None:
    good = [np.array([0, 5]), np.array([7, 0]), np.array([1, 2])]
    assert form.are_pieces(*good)
    assert form.are_pieces(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    for column, row, bad in ((0, 0, -1), (1, 1, -9), (2, 0, 0), (2, 1, -1)):
        changed = [one.copy() for one in good]
        changed[column][row] = bad
        assert not form.are_pieces(*changed)
    for column in range(3):
        assert not form.are_pieces(*(one[: 1 if number == column else 2] for number, one in enumerate(good)))
    assert form.shifted(np.array([1, 2, 3, 4]), [1, 0, 3], [10, 20, 30]).tolist() == [11, 32, 33, 34]
    for counts in ([1, 2], [5], [3, 2], []):
        with pytest.raises(ValueError):  # noqa: PT011 (of either form, in its own words)
            form.shifted(np.array([1, 2, 3, 4]), counts, [0] * len(counts))


@needs_compiled
def test_what_fills_a_buffer_is_alike() -> None:
    """Slots whose boxes lie in one page and in a page each, that continue and that do not."""
    assert compiled is not None
    seed = random.getrandbits(32)
    rng = np.random.default_rng(seed)
    for _ in range(300):
        num_boxes, num_slots, num_fields = (int(number) for number in rng.integers(1, 6, size=3))
        lengths = rng.choice([64, 128], size=num_boxes)
        gaps = rng.choice([0, 0, 64], size=num_boxes)
        slot_at = np.cumsum(lengths) - lengths
        in_one_page = rng.random() < 0.5
        page_at = slot_at + np.cumsum(gaps) if in_one_page else rng.choice([0, 64], size=num_boxes)
        page = rng.integers(0, 9) + np.cumsum(rng.choice([1, 1, 3], size=(num_slots, 1 if in_one_page else num_boxes)))
        page = page.reshape(num_slots, -1)
        sizes = int(rng.choice([int(lengths.sum()), 64, 2048])), int(lengths.sum())
        given = (
            page,
            (page_at, slot_at, lengths),
            sizes,
            rng.integers(0, 2**40, size=num_fields),
            int(rng.integers(1, 4)),
        )
        assert same(compiled.slot_reads(*given), plain_loops.slot_reads(*given)), seed


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_what_fills_a_buffer_by_hand(form: ModuleType) -> None:
    """Pages of 100 bytes of which 60 are read in two boxes; two of three slots are neighbours in memory but leave a gap."""
    pages, bases = np.array([[4], [5], [9]]), np.array([1000, 7000, 9000])
    boxes = np.array([0, 20]), np.array([0, 20]), np.array([20, 40])
    source, place, length, count = form.slot_reads(pages, boxes, (100, 60), bases, 2)
    assert count == 3
    assert source.tolist() == [base + at for base in (1000, 7000, 9000) for at in (400, 500, 900)]
    assert place.tolist() == [0, 60, 120, 180, 240, 300, 0, 60, 120]
    assert length.tolist() == [60] * 9
    source, place, length, count = form.slot_reads(pages, boxes, (60, 60), bases[:1], 1)
    assert (source.tolist(), place.tolist(), length.tolist()) == ([1240, 1540], [0, 120], [120, 60])
    apart = boxes[0], np.array([0, 30]), boxes[2]
    source, place, length, count = form.slot_reads(pages[:1], apart, (60, 70), bases[:1], 1)
    assert (source.tolist(), place.tolist(), length.tolist()) == ([1240, 1260], [0, 30], [20, 40])
    each = np.array([[4, 7], [5, 8]])
    source, place, length, count = form.slot_reads(each, boxes, (100, 60), bases[:1], 1)
    assert (source.tolist(), place.tolist()) == ([1400, 1720, 1500, 1820], [0, 20, 60, 80])
    assert length.tolist() == [20, 40, 20, 40]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_pieces_by_hand(form: ModuleType) -> None:
    numbers = form.frame_indices(np.array([3, 5, 4]), np.array([1, 0, 2]), (10, 20), 2, 7)
    assert [index.tolist() for index in numbers] == [[4, 13, 15, 14, 23], [2, 21, 20, 22, 41]]
    assert {index.dtype for index in numbers} == {np.dtype(np.int32)}
    pieces = tuple(np.array(column, np.uint64) for column in ((500, 30), (2**63, 9), (10, 2**63)))
    local, remote, cost, longest = form.piece_rows(pieces, (0, 5), 100)
    assert local.tolist() == [[500, 10, 0], [30, 2**63, 0]]
    assert remote.tolist() == [[2**63, 10, 5], [9, 2**63, 5]]
    assert (cost.tolist(), longest) == ([0, 110, 210 + 2**63], 2**63)
    costs = np.array([0, 5, 6, 9, 20], np.uint64)
    assert [form.affordable(costs, 1, 4, budget) for budget in (0, 1, 3, 4, 14, 15, 99)] == [
        2, 2, 2, 3, 3, 4, 4
    ]  # fmt: skip
    top = np.array([2**64 - 8, 7], np.uint64), np.array([8, 1], np.uint64)
    assert form.reach(*top) == (7, 2**64 - 1)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    "given",
    [[], [3], [5, 1, 2**62], (4, 5), [True, 2], [1.5], [2**63], [2**70], ["a"], [[1], [2]], [None], np.arange(4)[::-1]],
)
def test_a_block_table_is_read_as_numpy_reads_it(form: ModuleType, given: object) -> None:
    found, wanted = form.page_ids(given), np.array(given)
    assert same(found, wanted)
    assert found is not given


def test_a_block_table_is_a_copy_and_of_whole_numbers() -> None:
    given = np.array([1, 2, 3], dtype=np.int32)
    table = PageTable(given, 3)
    given[0] = 9
    assert table.pages.tolist() == [1, 2, 3]
    assert table.pages.dtype == np.int64


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_rows_of_two_entries_and_two_runs(form: ModuleType) -> None:
    """Pages of 64 and of 32 bytes, runs of three pages and of one: every address, length and cost by hand."""
    entries = np.array([1000, 5000], np.uint64), np.array([70000, 90000], np.uint64), np.array([64, 32], np.uint64)
    of_runs = np.array([2, 9]), np.array([4, 1]), np.array([3, 1])
    local, remote, cost = form.frame_rows(entries, (64, 128), (0, 5), of_runs, 100)
    assert local.tolist() == [[1128, 192, 0], [1576, 64, 0], [5128, 96, 0], [5576, 32, 0]]
    assert remote.tolist() == [[70512, 192, 5], [70128, 64, 5], [90512, 96, 5], [90128, 32, 5]]
    assert cost.tolist() == [0, 292, 456, 652, 784]
    src, dst, length = form.frame_copies(tuple(column.astype(np.int64) for column in entries), (64, 128), of_runs)
    assert [src.tolist(), dst.tolist(), length.tolist()] == [
        [row[0] for row in local.tolist()], [row[0] for row in remote.tolist()], [row[1] for row in local.tolist()]
    ]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_runs_go_on_where_both_sides_do(form: ModuleType) -> None:
    src, dst = np.array([3, 4, 5, 6, 9, 10, 11]), np.array([8, 9, 10, 20, 21, 22, 23])
    assert [column.tolist() for column in form.runs(src, dst, 99)] == [[3, 6, 9], [8, 20, 21], [3, 1, 3]]
    assert [column.tolist() for column in form.runs(src, dst, 2)] == [
        [3, 5, 6, 9, 11],
        [8, 10, 20, 21, 23],
        [2, 1, 1, 2, 1],
    ]
    assert form.ordered([src], [dst]) == (src, dst, 4, 5)
    back = form.ordered([src[::-1]], [dst])
    assert [back[0].tolist(), back[1].tolist(), *back[2:]] == [src.tolist(), dst[::-1].tolist(), 0, 5]
    twice = form.ordered([np.array([700, 2, 700, 2**40, 2])], [np.array([1, 2, 3, 4, 5])])
    assert [twice[0].tolist(), twice[1].tolist()] == [[2, 2, 700, 700, 2**40], [2, 5, 1, 3, 4]]
    top = form.ordered([np.array([2**63 - 1, 2**62, 0])], [np.array([1, 2, 3])])
    assert [top[0].tolist(), top[1].tolist()] == [[0, 2**62, 2**63 - 1], [3, 2, 1]]
    assert form.run_bounds(np.array([5, 3, 4]), np.array([1, 2, 9])) == (3, 12)
    assert form.bounds(dst) == (8, 23)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_what_a_frame_is_made_of_by_hand(form: ModuleType) -> None:
    fields, runs = np.array([100, 700]), np.array([0, 8, 30])
    src, dst, length = form.lane_entries(
        [
            (fields, fields[::-1], runs, runs + 1, np.array([8, 4, 2])),
            (fields[:1], fields[1:], runs[:1], runs[1:2], runs[2:]),
        ]
    )
    assert src.tolist() == [100, 108, 130, 700, 708, 730, 100]
    assert dst.tolist() == [701, 709, 731, 101, 109, 131, 708]
    assert length.tolist() == [8, 4, 2, 8, 4, 2, 30]
    rows = form.strided_rows(np.array([5, 2**64 - 8], np.uint64), np.array([8, 3], np.uint64), 2, 4096, 9)
    assert rows.tolist() == [[5, 8, 2, 4096, 9], [2**64 - 8, 3, 2, 4096, 9]]
    pieces = [np.array(column, np.uint64) for column in ((500, 2**64 - 30), (2**63, 9), (10, 2**63))]
    assert form.pieces_extent(*pieces) == (2**64 - 30, 2**63, 2**63, 2**63 + 10, False)
    assert form.pieces_extent(*pieces[:2], np.array([7, 7], np.uint64)) == (2**64 - 30, 2**63, 7, 14, True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_slabs_and_shards_by_hand(form: ModuleType) -> None:
    """Two regions of 100 and 60 bytes; slabs of 2 pages, and one of 3 of another pool."""
    sizes, num_pages = np.array([100, 60]), np.array([2, 3])
    good = [np.array(column) for column in ([0, 1, 0], [0, 0, 50], [20, 20, 25], [20, 10, 25], [0, 1, 0])]
    begin, start, last, stop = form.slab_places(sizes, tuple(good), num_pages)
    assert (begin.tolist(), start.tolist()) == ([0, 100], [0, 100, 50])
    assert (last.tolist(), stop.tolist()) == ([40, 150, 100], [20, 110, 75])
    for column, row, bad in (
        (1, 0, -1), (1, 2, 51), (1, 1, 2**62), (2, 0, 0), (2, 0, 19), (2, 2, 26), (2, 1, 2**62), (3, 1, 0), (3, 0, -1),
        (3, 0, 21), (4, 2, 1),
    ):  # fmt: skip
        changed = [one.copy() for one in good]
        changed[column][row] = bad
        assert form.slab_places(sizes, tuple(changed), num_pages) is None, (column, row, bad)
    for bad_sizes in ([0, 60], [100, -1], [2**62, 60], [2**62 - 60, 60]):
        assert form.slab_places(np.array(bad_sizes), tuple(good), num_pages) is None
    assert form.slab_places(np.array([2**62 - 61, 60]), tuple(good), num_pages) is not None
    order = np.argsort(start)
    slabs = start[order], stop[order], good[2][order], good[4][order]
    kinds = np.array([0, 1, 0]), np.array([20, 10]), np.array([20, 20]), np.array([0, 1])
    assert form.shard_places(np.array([0, 100, 0]), slabs, kinds).tolist() == [20, 110, 20]
    for places in ([1, 100, 0], [-1, 100, 0], [0, 101, 0], [0, 100, 50], [100, 100, 0], [0, 0, 0]):
        assert form.shard_places(np.array(places), slabs, kinds) is None, places
    for number, bad in ((1, 21), (2, 25), (3, 1)):
        changed = [one.copy() for one in kinds]
        changed[number][0] = bad
        assert form.shard_places(np.array([0, 100, 0]), slabs, tuple(changed)) is None
    assert form.are_apart(np.array([0, 5, 9]), np.array([5, 9, 1]))
    assert not form.are_apart(np.array([0, 5, 8]), np.array([5, 9, 9]))
    assert form.are_apart(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert form.are_within(np.array([0, 59]), np.array([0, 1]), sizes)
    for places in ([0, 60], [-1, 0]):
        assert not form.are_within(np.array(places), np.array([0, 1]), sizes)


@needs_compiled
def test_slabs_and_shards_are_seen_alike(run_seed: int) -> None:
    assert compiled is not None
    rng = np.random.default_rng(run_seed)
    num_found = 0
    for _ in range(1000):
        num_regions, num_slabs, num_pools, num_shards = (int(number) for number in rng.integers(1, 5, size=4))
        sizes, num_pages = rng.integers(1, 200, num_regions), rng.integers(1, 4, num_pools)
        if rng.random() < 0.1:
            sizes[0] = rng.choice([0, -1, 2**62 - 1, 2**62])
        stride = rng.integers(1, 30, num_slabs)
        columns = [
            rng.integers(0, num_regions, num_slabs),
            rng.integers(-1, 40, num_slabs),
            stride,
            np.maximum(stride - rng.integers(-1, 3, num_slabs), 0),
            rng.integers(0, num_pools, num_slabs),
        ]
        found = compiled.slab_places(sizes, tuple(columns), num_pages)
        plainly = plain_loops.slab_places(sizes, tuple(columns), num_pages)
        assert (found is None) == (plainly is None)
        if found is None or plainly is None:
            continue
        num_found += 1
        assert same(found, plainly)
        _, start, last, stop = found
        assert compiled.are_apart(start, last) == plain_loops.are_apart(start, last)
        order = np.argsort(start, kind="stable")
        slabs = start[order], stop[order], columns[2][order], columns[4][order]
        chosen = rng.integers(0, num_slabs, num_shards)
        places = start[chosen] + rng.choice([0, 0, 0, 1, -1], num_shards)
        given = places, slabs, (np.arange(num_shards), columns[3][chosen], columns[2][chosen], columns[4][chosen])
        assert same(compiled.shard_places(*given), plain_loops.shard_places(*given))
        within = places, rng.integers(0, num_regions, num_shards), sizes
        assert compiled.are_within(*within) == plain_loops.are_within(*within)
    assert num_found > 50
