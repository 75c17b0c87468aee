"""Is nothing left of requests that ended in every way, and would it be seen if something were?"""

from __future__ import annotations

import os

import pytest
from tests.faults import leaks
from tests.faults.leaks import PAIRS, Cycles, count_returns, measure, surroundings

from kvreshard.model.changed import replace
from kvreshard.transport.nixl_agent import NixlOptions

pytestmark = [pytest.mark.nixl, pytest.mark.slow]
CYCLES = int(os.environ.get("KVRESHARD_LEAK_CYCLES", "150"))
KINDS = {
    "aborted: cancelled",
    "loaded: loaded",
    "prefix: loaded",
    "expired: stale lease",
    "stale: stale lease",
    "forged: seal",
}


@pytest.mark.parametrize("pair", PAIRS, ids=" -> ".join)
def test_nothing_is_left(pair: tuple[str, str], run_seed: int) -> None:
    found = measure(CYCLES, run_seed, pair)
    assert found.grown == {}
    assert found.wrong == 0
    assert found.restarts > 3
    assert found.ends.keys() >= {*KINDS, "released", "revoked", "nobody: handshake"}


def test_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch place that is not given back, a file that is not closed."""
    with surroundings():
        both = Cycles(1, PAIRS[1])
        kept = []
        try:
            both.run(5)
            before = both.count()
            for rank in both.reader._ranks.values():
                monkeypatch.setattr(rank.endpoint._scratch, "give", lambda address: None)
            kept.append(open("/dev/null"))  # noqa: SIM115
            after = both.count()
        finally:
            for file in kept:
                file.close()
            both.close()
    found = leaks.Leaks(PAIRS[1], 1, 5, 0, {}, 0, before, after, 0.0).grown
    assert found["decode scratch_places"] == 1
    assert found["decode fds"] == found["prefill fds"] == 1
    grown = replace(after[1], resident_bytes=after[1].resident_bytes + leaks.MAX_GROWTH_BYTES + 1)
    assert "decode resident_bytes" in leaks.Leaks(PAIRS[1], 1, 5, 0, {}, 0, after, (after[0], grown), 0.0).grown


def test_nixl_leaks_a_socket_a_side_and_worker_when_a_living_peer_returns() -> None:
    """Known of NIXL 1.5.1; if this fails it has changed, and `transport.nixl` and docs/reliability.md should say so."""
    with surroundings():
        assert count_returns(12) == 2.0 * (1 + NixlOptions().num_threads)
