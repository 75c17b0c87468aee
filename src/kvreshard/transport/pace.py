"""How often does the thread that owns an agent look up, and for how long does it post at a time?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the owner spends its time.

    Attributes:
        post_s: aimed duration of one post.
        max_in_flight: slices posted to one peer and not settled. Settling waits for the peer's poll, so one slice in
            flight would idle for the rest of the peer's interval.
        max_in_flight_bytes: what they may have together: each a quarter, which takes some 20 ms on one host. A link of 50 GB/s
            moves 25 MB between two polls.
        spin_s: after the last event, poll without rest for so long while slices are in flight.
        fast_s: rest while slices are in flight, or something happened within `linger_s`.
        attentive_s: rest of an attentive transport (2 ms: 1.0 to 2.4 % of a core; 0.5 ms took 5.6 %).
        slow_s: rest otherwise (10 ms: 0.6 to 1.2 % of a core, 2.2 % on a busy machine; 20 ms half of that). A peer that reads meanwhile waits for this long at most.
        linger_s: how long an event keeps the pace fast.
        close_s: how long `stop` waits for slices in flight. What is in flight then takes milliseconds, or its peer does not poll.
        call_s: after how long a call into the library counts as stuck (`watchdog`).
    """

    post_s: float = 0.020
    max_in_flight: int = 4
    max_in_flight_bytes: int = 512 << 20
    spin_s: float = 0.0005
    fast_s: float = 0.0005
    attentive_s: float = 0.002
    slow_s: float = 0.020
    linger_s: float = 0.050
    close_s: float = 0.2
    call_s: float = 10.0
