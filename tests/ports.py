"""Which ports may a test's listener have, so that nobody else takes them before it binds, or while it is away?

Ports that the kernel gives by itself (32768 and above: outgoing connections, and listeners that ask for any) may go to anybody as
soon as an engine that is to come back lets go of its own; NIXL agents alone ask for several each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_PORTS = itertools.cycle(range(12000 + os.getpid() * 37 % 50 * 200, 32000))  # apart for test processes side by side


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that can be bound on the loopback address now; never the same one twice.

    They are bound long after this returns, so what was given away is not given to somebody else in between.
    """
    for _ in range(20000 // count):
        first = next(_PORTS)
        for _ in range(count - 1):
            next(_PORTS)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} consecutive free ports")
