"""What an exchange with a listener waits for, so that one thread can carry out many exchanges.

1. An exchange is a generator. It yields a `Wait` and gets the sockets of it that are ready, none if the time has come first.
2. `drive` carries out one exchange on the caller's thread. `handshake_client` carries out many.
3. Closing the generator closes its sockets.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """`sockets`: pairs of a ZeroMQ socket or a file descriptor and the events of `zmq.Poller`. `until_s`: of `time.monotonic`.

    `is_connected`: the other side has shown that it is a listener.
    """

    sockets: tuple[tuple[Any, int], ...]
    until_s: float
    is_connected: bool = False


Ready = Collection[Any]
Exchange = Generator[Wait, Ready, T]


def poll_ms(left_s: float) -> int:
    """A timeout for `zmq.Poller.poll` that does not end before `left_s` seconds have passed."""
    return max(0, int(left_s * 1000) + 1) if left_s > 0 else 0


def drive(exchange: Exchange[T]) -> T:
    """The result of one exchange; waits for it. Raises what the exchange raises."""
    try:
        wait = next(exchange)
        while True:
            poller = zmq.Poller()
            for socket, events in wait.sockets:
                poller.register(socket, events)
            wait = exchange.send([socket for socket, _ in poller.poll(poll_ms(wait.until_s - time.monotonic()))])
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        exchange.close()
