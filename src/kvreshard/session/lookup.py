"""Which number does a host name stand for? Asked on a thread of its own: a resolver may take half a minute.

1. A number needs no look-up.
2. A name is looked up on a daemon thread, and the exchange waits for its word on a pair of sockets.
3. At most `MAX_LOOKUPS` threads look up at one time. A further name waits for one of them, a number for none.

Raises OSError for a name that stands for no number, and TimeoutError, which is one, when the time is over.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time

import zmq

from kvreshard.session.handshake_messages import Address
from kvreshard.session.poll import Exchange, Wait

MAX_LOOKUPS = 32
LOOK_AGAIN_S = 0.05
_free = threading.BoundedSemaphore(MAX_LOOKUPS)


def look_up(address: Address, deadline_s: float) -> Exchange[Address]:
    """The address with a number for its host: of IPv4, as ZeroMQ takes it. `deadline_s`: of `time.monotonic`."""
    if is_number(address.host):
        return address
    while not _free.acquire(blocking=False):
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"{MAX_LOOKUPS} other host names are being looked up")
        yield Wait((), min(deadline_s, time.monotonic() + LOOK_AGAIN_S))
    found: list[str | OSError] = []
    mine, theirs = socket.socketpair()

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(address.host, address.port, socket.AF_INET)[0][4][0]))
        except (OSError, UnicodeError) as error:
            found.append(error if isinstance(error, OSError) else OSError(str(error)))
        finally:
            _free.release()
            theirs.close()

    with mine:
        threading.Thread(target=ask, name="kvreshard-lookup", daemon=True).start()
        yield Wait(((mine.fileno(), zmq.POLLIN),), deadline_s)
    if not found:
        raise TimeoutError("the resolver does not answer")
    if isinstance(found[0], OSError):
        raise found[0]
    return Address(found[0], address.port)


def is_number(host: str) -> bool:
    """Whether a host needs no look-up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
