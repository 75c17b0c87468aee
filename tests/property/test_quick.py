"""Does what is compiled say of every request what the checks in Python say, and cut it alike?

Random engines beside themselves, whose pages are of one size, with random requests, as they are and broken in some way: whatever
the compiled look accepts has been accepted by `check_request` and is cut like `pair_pages` does it; and it accepts every good one.
"""

import random
from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.pairs import kind_pairs
from tests.pairs.requests import make_request
from tests.pairs.small import engine
from tests.pairs.small import request as small_request

from kvreshard.model import BindError, LayoutError
from kvreshard.model.changed import replace
from kvreshard.model.loops import compiled
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import Route, compile_route, plan_reads
from kvreshard.plan.request_check import check_request
from kvreshard.plan.whole import pair_pages

pytestmark = pytest.mark.skipif(compiled is None, reason="nothing was compiled when this was installed")
NUM_PAIRS = 400
Breaking = Callable[[np.random.Generator, Request], Request]


def _table(rng: np.random.Generator, request: Request) -> tuple[str, str, PageTable]:
    side = str(rng.choice(["src_tables", "dst_tables"]))
    name = str(rng.choice(sorted(getattr(request, side))))
    return side, name, getattr(request, side)[name]


def _with(request: Request, side: str, name: str, value: Any) -> Request:
    return replace(request, **{side: {**getattr(request, side), name: value}})


def _page(rng: np.random.Generator, request: Request) -> Request:
    """Another page at some place: outside, none, or one that is somewhere else."""
    side, name, table = _table(rng, request)
    if not len(table.pages):
        return request
    pages = table.pages.copy()
    others = [-1, 0, int(pages.max()) + 1, 10**6, 2**62, *pages.tolist()]
    others += [page for other in getattr(request, side).values() for page in other.pages.tolist()]
    pages[rng.integers(len(pages))] = others[rng.integers(len(others))]
    return _with(request, side, name, PageTable(pages, table.num_tokens, table.first_page))


def _place(rng: np.random.Generator, request: Request) -> Request:
    """A table that begins, or ends, at another page, or holds other tokens."""
    side, name, table = _table(rng, request)
    pages, tokens, first = table.pages, table.num_tokens, table.first_page
    what = rng.integers(4)
    if what == 0:
        first = max(0, first + int(rng.integers(-2, 3)))
    elif what == 1:
        tokens = [max(0, tokens + int(rng.integers(-3, 4))), 2**63][int(rng.random() < 0.1)]
    elif what == 2:
        pages = pages[: rng.integers(len(pages) + 1)]
    else:
        pages = np.concatenate([pages, pages[:1]])
    return _with(request, side, name, PageTable(pages, tokens, first))


def _name(rng: np.random.Generator, request: Request) -> Request:
    """A name too many, or one that is not there."""
    part = str(rng.choice(["src_tables", "dst_tables", "intervals", "dst_new_pages"]))
    given = dict(getattr(request, part))
    if rng.random() < 0.5 or not given:
        values = {"intervals": [], "dst_new_pages": np.array([1])}
        return _with(request, part, "another", values.get(part, PageTable([1], 1)))
    given.pop(str(rng.choice(sorted(given))))
    return replace(request, **{part: given})


def _new(rng: np.random.Generator, request: Request) -> Request:
    """Other pages called new: of this group, of another, or of none."""
    name = str(rng.choice(sorted(request.dst_tables)))
    pages = np.concatenate([table.pages for table in request.dst_tables.values()]).tolist()
    stray = [-1, 0, 10**6, *pages, *request.dst_tables[name].pages.tolist() * 3]
    chosen = np.array([stray[rng.integers(len(stray))] for _ in range(rng.integers(1, 4))], dtype=np.int64)
    return _with(request, "dst_new_pages", name, chosen)


def _intervals(rng: np.random.Generator, request: Request) -> Request:
    """Other tokens of one group."""
    name = str(rng.choice(sorted(request.intervals)))
    most = 60 if rng.random() < 0.3 else max(8, request.dst_tables[name].num_tokens + 1)
    edges = np.sort(rng.choice(most, size=2 * rng.integers(1, 4), replace=False)).tolist()
    touching = list(pairwise(edges))  # of indices of several tokens, two of them may name the same one
    found = touching if rng.random() < 0.5 else touching[::2]
    return _with(request, "intervals", name, found)


BREAKINGS: tuple[Breaking, ...] = (_page, _place, _name, _new, _intervals)


def _plain_pair(seed: int) -> tuple[Route, Request] | None:
    rng = np.random.default_rng([7, seed])
    model = kind_pairs.draw_model(rng)
    num_tokens = int(rng.integers(1, int(rng.choice([10, 40, 100]))))
    try:
        src = kind_pairs.draw_engine(rng, "prefill", model, 0, num_tokens, set())
        dst = replace(src, engine="decode")
        routes = [compile_route(src, dst, rank.rank) for rank in dst.ranks]
    except LayoutError:
        return None
    route = routes[rng.integers(len(routes))]
    return None if route.quick is None else (route, make_request(rng, src, dst, num_tokens, set()))


def _compare(route: Route, request: Request) -> bool:
    """Whether the request is good; the compiled look must say the same."""
    assert route.quick is not None
    found = route.quick.cut(request)
    try:
        check_request(route, request)
    except BindError:
        assert found is None, "accepted what the checks refuse"
        return False
    if found is None:
        tables = [*request.src_tables.values(), *request.dst_tables.values()]
        assert max(table.num_tokens for table in tables) > 2**48, "a good request was not accepted"
        return True
    for stream, cut in zip(route.streams, found, strict=True):
        if not request.intervals[stream.dst_group.name]:
            assert cut is None
            continue
        assert cut is not None
        size = stream.page_indices
        assert size is not None
        wanted = pair_pages(stream, size, request)
        for mine, theirs in zip(cut[:2], (wanted.src, wanted.dst), strict=True):
            assert [one.tolist() for one in mine] == [one.tolist() for one in theirs]
        assert cut[2] == wanted.parts
    return True


def test_the_compiled_look_says_what_the_checks_say() -> None:
    first, num_good, num_bad = random.getrandbits(32), 0, dict.fromkeys(BREAKINGS, 0)
    for seed in range(first, first + NUM_PAIRS):
        pair = _plain_pair(seed)
        if pair is None:
            continue
        route, request = pair
        rng = np.random.default_rng([8, seed])
        try:
            num_good += _compare(route, request)
            for breaking in BREAKINGS:
                for _ in range(6):
                    num_bad[breaking] += not _compare(route, breaking(rng, request))
        except (AssertionError, BindError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert num_good > NUM_PAIRS // 10
    assert min(num_bad.values()) > NUM_PAIRS // 10, num_bad


def test_what_is_of_another_kind_is_left_to_the_checks() -> None:
    """Mappings that are no dictionaries, numbers that are none, arrays of other numbers: nothing is accepted, and nothing breaks."""
    src, dst = engine("prefill"), engine("decode")
    route, good = compile_route(src, dst, 0), small_request(src, dst, 10, new_pages=[3])
    assert route.quick is not None
    assert route.quick.cut(good) is not None
    (name,) = good.intervals
    for changes in (
        {"src_tables": MappingProxyType(dict(good.src_tables))},
        {"dst_tables": MappingProxyType(dict(good.dst_tables))},
        {"intervals": MappingProxyType(dict(good.intervals))},
        {"dst_new_pages": None},
        {"dst_new_pages": {name: np.array([3], dtype=np.int32)}},
        {"dst_new_pages": {name: [3]}},
        {"intervals": {name: [(0, 2**70)]}},
        {"intervals": {name: [(0.0, 10.0)]}},
        {"intervals": {name: [(0, 2**63 - 1)]}},
        {"src_tables": {name: PageTable([1, 2, 3], 10.5)}},
        {"dst_tables": {name: PageTable([2, 3, 4], 10, 0.5)}},
        {"src_tables": {name: None}},
        {"dst_tables": {name: 1}},
    ):
        assert route.quick.cut(replace(good, **changes)) is None, changes


def test_read_only_tables_are_tables() -> None:
    src, dst = engine("prefill"), engine("decode")
    route, good = compile_route(src, dst, 0), small_request(src, dst, 10, new_pages=[3])
    assert route.quick is not None
    for table in (*good.src_tables.values(), *good.dst_tables.values()):
        table.pages.flags.writeable = False
    for pages in good.dst_new_pages.values():
        pages.flags.writeable = False
    assert route.quick.cut(good) is not None


def test_pools_of_more_pages_than_can_be_told_apart_are_left_to_the_checks() -> None:
    src, dst = (engine(name, num_pages=1 << 41) for name in ("prefill", "decode"))
    route = compile_route(src, dst, 0)
    assert route.quick is None
    assert (
        sum(copies.num_bytes for copies in plan_reads(route, small_request(src, dst, 10)).direct) == 10 * 2 * 2 * 2 * 2
    )
