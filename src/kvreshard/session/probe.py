"""Host names and ZMTP greetings: what a client finds out about a listener without a ZeroMQ connection."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from concurrent.futures import Future

from kvreshard.session.handshake_messages import Address

# Resolver threads of this process at one time: a resolver may take half a minute.
MAX_LOOKUPS = 32
LOOK_AGAIN_S = 0.05
GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x00"
_free_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)


async def look_up(address: Address) -> Address:
    """The address with an IP address for its host; of IPv4 if the host is a name, as ZeroMQ takes it. Raises OSError.

    A name is looked up on a daemon thread, which asyncio's own resolver does not use: the interpreter waits for that one when it ends.
    """
    if _is_ip_address(address.host):
        return address
    while not _free_lookups.acquire(blocking=False):
        await asyncio.sleep(LOOK_AGAIN_S)
    found: Future[str] = Future()
    found.set_running_or_notify_cancel()

    def resolve() -> None:
        try:
            found.set_result(str(socket.getaddrinfo(address.host, address.port, socket.AF_INET)[0][4][0]))
        except (OSError, UnicodeError) as error:
            found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        finally:
            _free_lookups.release()

    threading.Thread(target=resolve, name="kvreshard-lookup", daemon=True).start()
    return Address(await asyncio.wrap_future(found), address.port)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def read_mechanism(address: Address, timeout_s: float) -> str | None:
    """`probe_mechanism`, for a thread that waits."""
    return asyncio.run(probe_mechanism(address, timeout_s))


async def probe_mechanism(address: Address, timeout_s: float) -> str | None:
    """The security mechanism of a ZeroMQ listener: "NULL" (no keys), "CURVE" (keys) or another; None if it does not speak ZMTP in time.

    When one side of a connection uses keys and the other does not, both notice, and whoever is first hangs up; the other sees only that
    (libzmq 4.3.5: about every second time). But the greeting of each side names its mechanism in bytes 12 to 32 (ZMTP 3.0, RFC 23).
    """
    greeting = b""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        async with asyncio.timeout(timeout_s):
            found = await look_up(address)
            reader, writer = await asyncio.open_connection(found.host, found.port)
            try:
                writer.write(_SIGNATURE + _VERSION)
                greeting = await reader.readexactly(GREETING_BYTES)
            finally:
                writer.close()
    if greeting[:1] != _SIGNATURE[:1] or greeting[9:10] != _SIGNATURE[9:]:
        return None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
