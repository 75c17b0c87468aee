"""What each figure must reach. A bar is judged where its figure is measured, and printed beside it; no test asks a clock.

| figure | bar |
|---|---|
| handshake with a source engine of 8 ranks | below 10 ms of processor time, and at most 1.5 times that of vLLM 0.33 |
| preparation of a request | at most 0.4 ms of processor time above the in-tree connector's where that takes less than 2 ms, at most 1.25 times as much above; and below 1 % of the request's first token |
| transfer of a request | at least 0.95 of the in-tree connector's speed on every block table, by the interval: undecided where it has both sides of 0.95 in it |
| first token of two engines, one request at a time or several | the same |
| requests per second of two engines | the same |
| early reads | exposed time, as a share of the sequential one, within 3 points of the least that it can be; the first token at least 1.6 times as fast as sequential and 1.3 times as fast as in-tree's push where prefill and transfer take as long; never below 0.97 of sequential |
| direct or staged | a staged read takes at most 1.1 times as long as a direct one, a direct read at most 2.2 times as long as a staged one; by the interval too |
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.compare import Comparison

MAX_HANDSHAKE_S = 0.010
MAX_HANDSHAKE_RATIO = 1.5
SHORT_PREPARATION_S = 0.002
MAX_PREPARATION_EXTRA_S = 0.0004
MAX_PREPARATION_RATIO = 1.25
MAX_FIRST_TOKEN_SHARE = 0.01
MIN_SPEED = 0.95
# Direct unless staging is predicted to be twice as fast; a tenth is the measurement's.
MAX_STAGED_RATIO = 1.1
MAX_DIRECT_RATIO = 2.2
MAX_ABOVE_BOUND = 0.03
MAX_FOLLOWED_S = 0.01 * 0.050


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in words, without figures, so that the same bar of many rows has the same words; and whether it holds, None if undecided."""

    text: str
    holds: bool | None


def handshake(found: Comparison, is_newest: bool) -> tuple[Bar, ...]:
    """`found`: beside one release of vLLM; only beside the newest is the ratio judged."""
    absolute = Bar("handshake below 10 ms of processor time", found.ours.cpu_s < MAX_HANDSHAKE_S)
    if not is_newest:
        return (absolute,)
    ratio = found.cpu_ratio[0]
    return absolute, Bar("handshake at most 1.5 times in-tree's of vLLM 0.33", 1 / ratio <= MAX_HANDSHAKE_RATIO)


def preparation(ours_s: float, theirs_s: float, first_token_s: float) -> tuple[Bar, ...]:
    """Processor seconds of both sides, and seconds until the request's first token."""
    if theirs_s < SHORT_PREPARATION_S:
        text, most_s = "preparation at most 0.4 ms above in-tree's below 2 ms", theirs_s + MAX_PREPARATION_EXTRA_S
    else:
        text, most_s = "preparation at most 1.25 times in-tree's above 2 ms", theirs_s * MAX_PREPARATION_RATIO
    share = Bar("preparation below 1 % of the first token", ours_s < MAX_FIRST_TOKEN_SHARE * first_token_s)
    return Bar(text, ours_s <= most_s), share


def transfer(interval: tuple[float, float]) -> tuple[Bar, ...]:
    """`interval`: of theirs / ours by the clock."""
    return (Bar("transfer at least 0.95 of in-tree's speed", _is_above(interval, MIN_SPEED)),)


def first_token(interval: tuple[float, float]) -> tuple[Bar, ...]:
    """`interval`: of theirs / ours by the clock."""
    return (Bar("first token at least 0.95 of in-tree's speed", _is_above(interval, MIN_SPEED)),)


def throughput(interval: tuple[float, float]) -> tuple[Bar, ...]:
    """`interval`: of ours / theirs, in requests per second."""
    return (Bar("requests per second at least 0.95 of in-tree's", _is_above(interval, MIN_SPEED)),)


def staging(is_staged: bool, interval: tuple[float, float]) -> tuple[Bar, ...]:
    """`interval`: the other way's time over that of the way that was taken, by the clock."""
    if is_staged:
        return (Bar("staged at most 1.1 times as long as direct", _is_above(interval, 1 / MAX_STAGED_RATIO)),)
    return (Bar("direct at most 2.2 times as long as staged", _is_above(interval, 1 / MAX_DIRECT_RATIO)),)


def exposed(share: float, bound: float) -> tuple[Bar, ...]:
    """`share`: exposed time over the sequential one; `bound`: the least that it can be."""
    return (Bar("exposed time within 3 points of the bound", share <= bound + MAX_ABOVE_BOUND),)


def followed(step_s: float) -> tuple[Bar, ...]:
    """`step_s`: processor seconds per step for the progress of 64 requests."""
    return (Bar("progress of 64 requests below 1 % of a step of 50 ms", step_s < MAX_FOLLOWED_S),)


def early_first_token(interval: tuple[float, float], least: float, beside: str) -> tuple[Bar, ...]:
    """`interval`: of theirs / ours by the clock."""
    return (
        Bar(f"first token of early reads at least {least:g} times as fast as {beside}", _is_above(interval, least)),
    )


def _is_above(interval: tuple[float, float], least: float) -> bool | None:
    low, high = interval
    return True if low >= least else False if high < least else None
