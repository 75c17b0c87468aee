"""Are the holes of a request those of all its copies, without listing them?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.pairs.random_pairs import LAYERS, PairLayer, make_pair
from tests.pairs.small import engine, request

from kvreshard.kinds import Attention
from kvreshard.plan import bind, compile_route, fill, find_holes, find_unwritten
from kvreshard.plan.copies import CopyList

NUM_PAIRS = 40


@pytest.mark.parametrize("layer", LAYERS)
def test_holes_are_what_no_copy_writes(layer: PairLayer, run_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any pair of engines, and at least one that has pages that are not looked at."""
    taken: list[int] = []
    within = fill._within
    monkeypatch.setattr(fill, "_within", lambda *asked: (taken.append(1), within(*asked))[1])
    for number in range(10 * NUM_PAIRS):
        if number >= NUM_PAIRS and taken:
            break
        pair = make_pair(layer, run_seed + number)
        for rank in pair.dst.ranks:
            route = compile_route(pair.src, pair.dst, rank.rank)
            listed = find_unwritten(pair.dst, rank.rank, pair.request, bind(route, pair.request))
            found = find_holes(pair.dst, route, pair.request)
            assert (found.start.tolist(), found.stop.tolist()) == (listed.start.tolist(), listed.stop.tolist()), pair
    assert taken


@pytest.mark.parametrize("padded_page_bytes", [0, 400])
def test_one_page_of_many_is_looked_at(padded_page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pages of four tokens, the last of which is not full: what is listed is two pages' copies."""
    kind, num_tokens = Attention(2, 8, "bfloat16"), 3998
    src = engine("prefill", tp=2, page=4, num_pages=1002, kind=kind)
    dst = engine("decode", page=4, num_pages=1002, kind=kind, order="HND", padded_page_bytes=padded_page_bytes)
    pages = np.random.default_rng(1).permutation(np.arange(1, 1001))
    wanted = request(src, dst, num_tokens, dst_pages=pages.tolist(), new_pages=pages.tolist())
    route = compile_route(src, dst, 0)
    listed: list[CopyList] = []

    def copies_to(*asked: object) -> Iterator[CopyList]:
        for copies in taken_from(*asked):
            listed.append(copies)
            yield copies

    taken_from = fill._copies_to
    monkeypatch.setattr(fill, "_copies_to", copies_to)
    found = find_holes(dst, route, wanted)
    every = list(bind(route, wanted))
    expected = find_unwritten(dst, 0, wanted, every)
    assert (found.start.tolist(), found.stop.tolist()) == (expected.start.tolist(), expected.stop.tolist())
    assert len(found.start) >= (1000 if padded_page_bytes else 1)
    assert listed
    assert sum(copies.num_copies for copies in listed) <= sum(copies.num_copies for copies in every) / 300
