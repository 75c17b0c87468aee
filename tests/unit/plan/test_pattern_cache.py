"""Is what a rank keeps bounded in bytes, whatever its sources and requests look like, and still right?"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.pairs.small import engine, request

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.kinds import Latent
from kvreshard.plan import pairs, stage
from kvreshard.plan.compile import compile_route
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.pattern_cache import ENTRY_BYTES, PatternCache
from kvreshard.plan.stage import Image
from kvreshard.plan.transfer import RankTransfer


def test_what_was_not_asked_for_in_the_longest_time_goes_first() -> None:
    kept, made = PatternCache(max_bytes=3 * (ENTRY_BYTES + 10)), list[str]()

    def get(name: str) -> str | None:
        return kept.get(0, name, lambda: made.append(name), lambda _: 10)

    for name in "abc" + "a" + "d" + "acd" + "b":
        get(name)
    assert made == ["a", "b", "c", "d", "b"]
    assert (len(kept), kept.num_bytes) == (3, 3 * (ENTRY_BYTES + 10))


def test_the_newest_stays_whatever_its_size_and_none_is_a_value() -> None:
    kept, made = PatternCache(max_bytes=5000), list[str]()
    for name in "abbcc":
        assert kept.get(0, name, lambda name=name: made.append(name), lambda _: 10**6) is None
    assert (made, len(kept), kept.num_bytes) == (["a", "b", "c"], 1, 10**6 + ENTRY_BYTES)


def test_what_an_owner_that_is_gone_had_is_dropped_and_nothing_else() -> None:
    kept, made = PatternCache(), list[str]()

    def get(owner: str, name: str) -> None:
        kept.get(owner, name, lambda: made.append(owner + name), lambda _: 10)

    for owner in "pqr":
        get(owner, "a")
        get(owner, "b")
    kept.drop({"p", "r", "never seen"})
    assert (len(kept), kept.num_bytes) == (2, 2 * (ENTRY_BYTES + 10))
    made.clear()
    for owner in "pqr":
        get(owner, "a")
    assert made == ["pa", "ra"]


def ends(transfer: RankTransfer) -> list[tuple[int, int, int]]:
    """Ways in which the requests of a life begin and end in a page."""
    page = transfer.src_span.indices
    return [(start, start, stop - start) for start in range(0, page, 24) for stop in range(start + 7, page, 24)]


def image_of(transfer: RankTransfer, overlap: tuple[int, int, int]) -> Image:
    """What staging makes of an overlap; kept for the next time."""
    return stage._image_of(transfer, (overlap,))


def transfers_of(kept: PatternCache, num_sources: int) -> list[RankTransfer]:
    """Of sources whose pages are large and whose heads are apart here."""
    model = load("llama-3.1-8b")
    dst = describe(model, parse_engine("tp=1,page=192,order=HND"), "decode", num_pages=64)
    found = []
    for number in range(num_sources):
        src = describe(model, parse_engine("tp=2,page=192,order=NHD"), f"prefill-{number}", num_pages=64)
        found += compile_route(src, dst, 0, pattern_cache=kept).transfers
    return found


def test_the_transfers_of_all_sources_share_a_bound() -> None:
    bound = 1 << 20
    kept = PatternCache(bound)
    for transfer in transfers_of(kept, 3):
        for overlap in ends(transfer):
            image_of(transfer, overlap)
        assert bound // 2 < kept.num_bytes <= bound


def test_transfers_do_not_take_one_another_s_patterns() -> None:
    """Congruent transfers of several sources, in one place; a fresh transfer has nothing of theirs."""
    kept = PatternCache()
    for shared, (alone,) in zip(
        transfers_of(kept, 2), [[transfer] for transfer in transfers_of(PatternCache(), 2)], strict=True
    ):
        for overlap in ends(shared)[:5]:
            mine, own = shared.pattern(overlap), alone.pattern(overlap)
            assert shared.pattern(overlap) is mine
            for column in ("src_offsets", "dst_offsets", "lengths", "src_pages", "dst_pages"):
                assert np.array_equal(getattr(mine, column), getattr(own, column))
            for side in ("src", "dst"):
                assert np.array_equal(getattr(mine.bases, side), getattr(own.bases, side))
            assert image_of(shared, overlap).runs == image_of(alone, overlap).runs
            assert image_of(shared, overlap) is image_of(shared, overlap)


def deep_bytes(value: object, seen: set[int]) -> int:
    """What Python says that a value takes, with all that it refers to."""
    if id(value) in seen or value is None:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return sys.getsizeof(value) if value.base is None else deep_bytes(value.base, seen)
    inner = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return sys.getsizeof(value) + sum(deep_bytes(one, seen) for one in (value if isinstance(value, tuple) else inner))


@pytest.mark.parametrize("engines", [("tp=2,page=192,order=NHD", "tp=1,page=192,order=HND"), ("page=64", "page=63")])
def test_sizes_are_about_what_values_take(engines: tuple[str, str]) -> None:
    src, dst = (describe(load("llama-3.1-8b"), parse_engine(text), text, num_pages=64) for text in engines)
    transfer = compile_route(src, dst, 0).transfers[0]
    values: list[Pattern | Image] = [
        transfer.pattern((0, 0, 60)),
        image_of(transfer, (0, 0, 60)),
        image_of(transfer, (1, 1, 13)),
    ]
    for value in values:
        taken = deep_bytes(value, {id(transfer.bases)})
        assert taken / 2 < value.cached_bytes() + ENTRY_BYTES < 2 * taken + 2 * ENTRY_BYTES


def test_pages_of_many_lengths_count_with_all_that_they_take() -> None:
    """Turns without a common divisor leave a page of each length, most of them of one copy: they counted as a tenth."""
    src, dst = (
        engine(name, tp=2, dcp=2, interleave=turn, page=2 * 63 * 64, kind=Latent(1, "bfloat16"))
        for name, turn in (("prefill", 63), ("decode", 64))
    )
    pair = compile_route(src, dst, 0).pairs[0]
    pages = pair.pages(pair.page_ranges(request(src, dst, 2 * 63 * 64))[0], pair.transfers)
    assert len(pages) == len({one.page.run_bytes for one in pages}) > 50
    taken = deep_bytes(pages, set())
    assert taken / 2 < pairs._cached_bytes(pages) < 2 * taken
