"""Does whoever listens at an address want keys?

When one side of a ZeroMQ connection uses keys and the other does not, both notice, and whoever is first hangs up; the other sees
only that (libzmq 4.3.5: about every second time). But each says in the first 64 bytes which mechanism it wants, so it is asked:

1. Send the signature and the version of ZMTP 3.0, and no more.
2. Read the listener's greeting. Bytes 12 to 32 name its mechanism (ZMTP 3.0, RFC 23).

Nothing raises: whoever does not answer so, or not in time, has no mechanism.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time

import zmq

from kvreshard.session.handshake_messages import Address
from kvreshard.session.lookup import look_up
from kvreshard.session.poll import Exchange, Wait, drive

GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x00"


def read_mechanism(address: Address, timeout_s: float) -> str | None:
    """'NULL' (no keys), 'CURVE' (keys) or another; None if ZMTP is not what is spoken there."""
    return drive(ask_mechanism(address, timeout_s))


def ask_mechanism(address: Address, timeout_s: float) -> Exchange[str | None]:
    """The exchange of `read_mechanism`."""
    probe, deadline_s = b"", time.monotonic() + timeout_s
    with contextlib.suppress(OSError):
        found = yield from look_up(address, deadline_s)
        family = socket.AF_INET6 if ":" in found.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as plain:
            plain.setblocking(False)
            if plain.connect_ex((found.host, found.port)) not in (0, errno.EINPROGRESS):
                return None
            ready = yield Wait(((plain.fileno(), zmq.POLLOUT),), deadline_s)
            if ready:
                plain.sendall(_SIGNATURE + _VERSION)
            while ready and len(probe) < GREETING_BYTES:
                ready = yield Wait(((plain.fileno(), zmq.POLLIN),), deadline_s)
                more = plain.recv(GREETING_BYTES - len(probe)) if ready else b""
                probe += more
                if not more:
                    break
    if len(probe) < GREETING_BYTES or probe[:1] != _SIGNATURE[:1] or probe[9:10] != _SIGNATURE[9:]:
        return None
    return probe[12:32].rstrip(b"\0").decode("ascii", "replace")
