"""Would a soak see what it is there to see, and does a short one see nothing?"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tests.soak.content import Content, views
from tests.soak.decode import Ended
from tests.soak.pages import Pool
from tests.soak.run import ENVIRONMENT, Soak
from tests.soak.shapes import MAX_TOKENS, SHAPES, Shape
from tests.soak.stalls import LATE_S, Stalls, covered_s
from tests.soak.tables import all_pages, allocate, kept_tokens
from tests.soak.tally import Tally


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.long
def test_some_seconds_of_everything(run_seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)  # taken back afterwards: later tests have surroundings of their own
    tally = Soak(12.0, run_seed, tmp_path / "log", has_seen_everything).run()
    assert tally.defects == []
    assert tally.lost == tally.wrong_requests == 0
    assert tally.num_ended == tally.started
    assert has_seen_everything(tally)


def has_seen_everything(tally: Tally) -> bool:
    """Every pair has loaded something, also early loads of each kind, and something went wrong meanwhile."""
    early = tally.early["served"] > 20 and tally.early["read early"] > 10
    early = early and tally.early["begun again"] > 3 and tally.early["failed"] > 3
    return early and tally.started > 100 and len(tally.per_pair) == 6 and sum(tally.faults.values()) > 2


def made(shape: Shape) -> tuple[Content, dict[int, dict[str, np.ndarray]], Pool]:
    layout = shape.layout()
    memory = {
        rank.rank: {region.name: np.zeros(region.size_bytes, np.uint8) for region in rank.regions}
        for rank in layout.ranks
    }
    return (
        Content(layout, MAX_TOKENS),
        memory,
        Pool(views(layout, memory), shape.num_pages, random.Random(1)),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_byte_of_a_request_is_seen(shape: Shape) -> None:
    layout, (content, memory, pool) = shape.layout(), made(shape)
    tables = allocate(layout, pool, 100)
    assert tables is not None
    pool.clear(all_pages(tables))
    kept = kept_tokens(layout, 100)
    content.write(memory, tables, kept, 7, 100)
    assert content.count_wrong(memory, tables, kept, 7, 100)[0] == 0
    assert content.count_wrong(memory, tables, kept, 8, 100)[0] > 1000
    rng = random.Random(2)
    for _ in range(20):
        slab = rng.choice(views(layout, memory))
        page, byte = rng.choice(all_pages(tables)), rng.randrange(slab.shape[1])
        slab[page, byte] ^= 1
        assert content.count_wrong(memory, tables, kept, 7, 100)[0] == 1
        slab[page, byte] ^= 1


def test_a_write_to_a_free_page_is_seen_now_and_when_it_is_taken() -> None:
    _, memory, pool = made(SHAPES[0])
    page = pool.take(1)[0]
    pool.give([page])
    assert pool.count_changed() == 0
    views(SHAPES[0].layout(), memory)[0][page, 3] = 1
    assert pool.count_changed() == 1
    assert pool.take(1) == [page]
    assert pool.count_changed() == 1


@pytest.mark.parametrize(
    ("kind", "wrong", "own_s", "told"),
    [
        ("loaded", 3, 1.0, "3 of 10 bytes wrong"),
        ("timeout", 0, 9.0, "after 9.0 s; bound 8 s"),
        ("fault", 0, 1.0, "'fault'"),
    ],
)
def test_what_must_not_be_is_told(kind: str, wrong: int, own_s: float, told: str) -> None:
    tally = Tally(1, 1.0)
    tally.note_end("a -> b", Ended("r1", kind, "text", own_s, 5, 0, 10, wrong, False), own_s, 8.0)
    assert len(tally.defects) == 1
    assert told in tally.defects[0]
    assert told in "\n".join(tally.lines())


def test_time_in_which_the_machine_stood_still_counts_once() -> None:
    stops = [(1.0, 4.0), (3.0, 5.0), (3.5, 3.6), (7.0, 8.0), (9.0, 20.0)]
    assert covered_s(stops, 0.0, 10.0) == 4.0 + 1.0 + 1.0
    assert covered_s(stops, 3.0, 4.5) == 1.5
    assert covered_s(stops, 5.0, 7.0) == 0.0


def test_a_machine_that_stands_still_is_seen_before_the_watch_has_its_turn() -> None:
    stalls = Stalls()
    stalls.close()
    seen_s = stalls._seen_s
    assert stalls.until(seen_s + 0.9 * LATE_S) == []
    assert stalls.until(seen_s + 3 * LATE_S) == [(seen_s, seen_s + 3 * LATE_S)]


def test_early_loads_are_counted() -> None:
    tally = Tally(1, 1.0)
    for kind, begun_again, early_bytes in (
        ("loaded", False, 0),
        ("loaded", True, 7),
        ("stale lease", True, 7),
        ("cancelled", False, 0),
    ):
        ended = Ended("r1", kind, "", 1.0, 5, 0, 10, 0, False, True, begun_again, early_bytes)
        tally.note_end("a -> b", ended, 1.0, 8.0)
    assert tally.defects == []
    assert tally.early == {"served": 2, "begun again": 1, "read early": 1, "failed": 1, "cancelled": 1}
    assert "served 2" in "\n".join(tally.lines())
