"""Does every model of the catalog travel over real NIXL between engines of different shapes, byte for byte?

Each model moves by READ between two pairs of tensor-parallel sizes and by WRITE between a third, on one pool of rank
processes. Layers are few, heads, widths and page sizes are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvreshard.catalog import MODELS, EngineSpec, describe, load, parse_engine, shrink
from kvreshard.model import EngineLayout
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.testing.scenario import make_requests, pages_needed
from kvreshard.testing.trial import memory_needed, run_trial

NUM_RANKS = 8
MEMORY_BYTES = 512 << 20
NUM_REQUESTS, NUM_TOKENS = 3, 150
PULLS = (
    (("tp=2", "tp=4"), ("tp=4", "tp=1")),
    (("tp=3,page=24", "tp=2,page=16"), ("tp=1", "tp=4,order=HND")),
    (("tp=2,order=HND", "tp=3,order=NHD"), ("tp=2,pp=2", "tp=2")),
    (("tp=4", "tp=2"), ("tp=2", "tp=1,pp=2")),
)
PUSHES = (("tp=2", "tp=4"), ("tp=4", "tp=2"), ("tp=3", "tp=2"), ("tp=1", "tp=4,order=HND"))


def cases() -> list[tuple[str, str, str, bool]]:
    """Every model with its two pulls and its push."""
    found = []
    for number, model in enumerate(sorted(MODELS)):
        found += [(model, src, dst, False) for src, dst in PULLS[number % len(PULLS)]]
        found.append((model, *PUSHES[number % len(PUSHES)], True))
    return found


def pair(model_id: str, src: EngineSpec, dst: EngineSpec) -> tuple[EngineLayout, EngineLayout]:
    """Both engines, with as many pages as the requests need."""
    model = shrink(load(model_id), 2)
    small = describe(model, src, "prefill", 4), describe(model, dst, "decode", 4)
    src_pages, dst_pages = (pages_needed(layout, NUM_REQUESTS, NUM_TOKENS) for layout in small)
    return describe(model, src, "prefill", src_pages), describe(model, dst, "decode", dst_pages)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with ProcessRanks(NUM_RANKS, MEMORY_BYTES) as pool:
        pool.connect_all()
        yield pool


@pytest.mark.nixl
@pytest.mark.parametrize(("model_id", "src", "dst", "push"), cases())
def test_every_byte_arrives(ranks: ProcessRanks, model_id: str, src: str, dst: str, push: bool, run_seed: int) -> None:
    prefill, decode = pair(model_id, parse_engine(src), parse_engine(dst))
    assert memory_needed(prefill, decode) <= MEMORY_BYTES
    ranks.reset(None)
    requests = make_requests(prefill, decode, NUM_REQUESTS, NUM_TOKENS, run_seed)
    result = run_trial(ranks, prefill, decode, requests, push=push, seed=run_seed)
    assert result.errors == ()
    assert result.missing_reports == ()
    assert [(wrong.rank, wrong.region, wrong.ranges[:3]) for wrong in result.wrong] == []
    assert result.num_bytes > 0
