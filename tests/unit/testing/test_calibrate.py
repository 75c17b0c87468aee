"""What is hidden of two works at once, as a clock that the test owns has it."""

from typing import Any

import pytest

from kvreshard.testing import calibrate


class SlowRanks:
    """Reads take 8 s of a clock, while others work."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.ends_s = clock, 0.0

    def address(self, rank: int) -> int:
        return rank << 40

    def device(self, rank: int) -> str:
        return "cpu"

    def post(self, *_: object) -> int:
        self.ends_s = self.clock[0] + 8.0
        return 1

    def wait(self, rank: int, job: int) -> None:
        assert (rank, job) == (0, 1)
        self.clock[0] = max(self.clock[0], self.ends_s)


@pytest.mark.parametrize(("slowed", "hidden"), [(1.0, 1.0), (2.0, 1.0), (2.5, 0.5), (3.0, 0.0), (9.0, 0.0)])
def test_what_is_hidden_is_what_both_save(monkeypatch: pytest.MonkeyPatch, slowed: float, hidden: float) -> None:
    """Moving takes 4 s by itself, and so many times as long beside a read: of 12 s that both take apart 8, 10, 12 or more are left."""
    clock = [0.0]
    ranks: Any = SlowRanks(clock)

    class Buffers:
        def __init__(self, device: str) -> None:
            assert device == "cpu"

        def move(self, run: int, page: int) -> Any:
            def once() -> float:
                spent_s = 4.0 * (slowed if ranks.ends_s > clock[0] else 1.0)
                clock[0] += spent_s
                return spent_s

            return once

    monkeypatch.setattr(calibrate, "_Buffers", Buffers)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    assert calibrate._hidden(ranks) == pytest.approx(calibrate.COUNTED * hidden)
