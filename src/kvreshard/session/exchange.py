"""One question to one listener: connect, send a handshake message, wait for the answer, and say why there is none.

ZeroMQ does not report failed connections; its monitor does. From the events follows why there is no answer (`Miss`). Some reasons do not
change with time and are reported at once; otherwise the question is sent again on a fresh connection until its time is over. That does no
harm: a handshake message changes nothing but a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvreshard.session.connection_limits import bytes_received, close_monitor, open_monitor
from kvreshard.session.handshake_messages import Address, HandshakeError
from kvreshard.session.keys import Keys

# An answer of megabytes from a busy engine mostly takes less; each further wait is twice as long.
ASK_AGAIN_S = 5.0
# ZeroMQ bounds a frame, and not the frames of a message that never ends (docs/design/0010): so often the bytes of an answer are looked at.
LOOK_S = 0.1
# Greetings, and what a frame has beside its content, encrypted or not.
OVERHEAD_BYTES = 1 << 20
# A listener that ends connections is flooded or restarts.
PAUSE_S = 0.1
KEY_REFUSED = 400
NO_CONNECTION = -1
# Resolver threads of this process at one time: a resolver may take half a minute.
MAX_LOOKUPS = 32
LOOK_AGAIN_S = 0.05
GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x00"
_free_lookups = threading.BoundedSemaphore(MAX_LOOKUPS)

Miss = Literal["closed", "absent", "mute", "mixed", "refused", "foreign", "lost", "silent", "hung up", "endless"]
"""Why there is no answer.

- `closed`: the connection was refused, or the host cannot be reached
- `absent`: nothing answers to the attempt to connect
- `mute`: it takes connections and does not speak ZeroMQ
- `mixed`: keys on one side only
- `refused`: the listener does not trust this engine's key
- `foreign`: the listener has another key than the one that was tried
- `lost`: the connection has ended
- `silent`: connected, and no answer
- `hung up`: it ended the connection before its handshake was over; its greeting tells whether it wants keys
- `endless`: its answer is longer than an answer may be
"""

_BUSY = "the engine at {address} is connected but does not answer {within}; is it stopped or overloaded, and is the port that of a kvreshard engine?"
_REASONS: dict[Miss, str] = {
    "absent": "no kvreshard engine answers at {address} {within}; is it running, does it use ReshardConnector, and can this host reach that port?",
    "closed": "nothing takes connections at {address}: they are refused, or the host cannot be reached; is the engine running, does it use "
    "ReshardConnector, and is the port that of its listener?",
    "mute": "something at {address} takes connections, but does not speak ZeroMQ {within}; is the port that of a kvreshard engine?",
    "mixed": "the engine at {address} wants a key and this one has none: give this engine a curve_secret_key_file whose public key that one trusts",
    "lost": _BUSY,
    "silent": _BUSY,
    "endless": "what listens at {address} answers with more than {max_bytes} bytes, which no kvreshard engine does; is the port that of a kvreshard engine?",
}
_REASONS_WITH_KEYS: dict[Miss, str] = {
    "refused": "the engine at {address} does not trust this engine's key {public}: put its .key file into that engine's curve_public_keys_dir, or "
    "give both engines the same key file",
    "mixed": "the engine at {address} uses no keys and this one does: give both a curve_secret_key_file, or neither",
    "foreign": "the engine at {address} has none of the {count} keys that this one trusts: put its .key file into this engine's "
    "curve_public_keys_dir, or give both engines the same key file",
}

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


@dataclass(slots=True, eq=False)
class Question:
    """A handshake message for a listener, and the future of its answer.

    `timeout_s` ends at `deadline_s` of `time.monotonic`; `max_bytes` bounds the answer. `is_connected`: the other side has shown that it is a
    listener. `task`: asks it at present, since `began_s`. `server_key`: the trusted key that is tried first; in the end the listener's.
    """

    address: Address
    message: bytes
    timeout_s: float
    max_bytes: int
    keys: Keys | None
    deadline_s: float
    is_connected: bool = False
    answer: Future[bytes] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None
    began_s: float = 0.0
    server_key: bytes | None = None

    async def ask(self, context: zmq.asyncio.Context) -> bytes:
        """The answer. Raises HandshakeError naming the address, the reason and the remedy."""
        misses: list[Miss] = []
        server_keys = self.keys.trusted if self.keys else (None,)
        wait_s = ASK_AGAIN_S
        found = await self._look_up()
        first = server_keys.index(self.server_key) if self.server_key in server_keys else 0
        candidates = itertools.cycle(server_keys[first:] + server_keys[:first])
        self.server_key = next(candidates)
        while self._left_s() > 0:
            answer = await self._ask_once(context, found, min(self._left_s(), wait_s))
            if isinstance(answer, bytes):
                return answer
            misses.append(answer)
            # Each key twice: a listener that is flooded hangs up as well, and so does whatever forwards connections to it.
            is_foreign = misses[-2 * len(server_keys) :] == ["foreign"] * 2 * len(server_keys)
            if answer in ("closed", "mixed", "refused", "endless") or is_foreign:
                break
            if answer == "silent":
                wait_s *= 2  # an answer that takes longer must not be begun again and again
            elif answer == "foreign":
                self.server_key = next(candidates)
            elif answer in ("lost", "mute"):
                await asyncio.sleep(min(PAUSE_S, max(0.0, self._left_s())))
        raise HandshakeError(self._explain(misses[-1] if misses else "absent"))

    def _left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    async def _look_up(self) -> Address:
        try:
            async with asyncio.timeout(max(0.0, self._left_s())):
                return await look_up(self.address)
        except OSError as error:
            raise HandshakeError(
                f"the host of {self.address} cannot be looked up: {str(error) or 'the resolver does not answer'}; give the engine a "
                "side_channel_host that this host can resolve, or a number"
            ) from error

    async def _ask_once(self, context: zmq.asyncio.Context, address: Address, timeout_s: float) -> bytes | Miss:
        started_s = time.monotonic()
        try:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.MAXMSGSIZE, self.max_bytes)
                dealer.setsockopt(zmq.IPV6, int(":" in address.host))
                if self.keys is not None and self.server_key is not None:
                    dealer.curve_serverkey, dealer.curve_publickey = self.server_key, self.keys.public
                    dealer.curve_secretkey = self.keys.secret
                monitor = open_monitor(context, dealer, _WATCHED)
                try:
                    dealer.connect(str(address))
                    # A connection that was refused at once is gone by now, and nothing else would ever take the message.
                    with contextlib.suppress(zmq.Again):
                        await dealer.send_multipart([b"", self.message], zmq.NOBLOCK)
                    answer = await self._receive(dealer, monitor, timeout_s)
                finally:
                    close_monitor(dealer, monitor)
        except zmq.ZMQError as error:
            raise HandshakeError(f"the engine at {self.address} cannot be asked: {error}") from error
        if answer != "hung up":
            return answer
        match await probe_mechanism(address, max(0.0, started_s + timeout_s - time.monotonic())):
            case "CURVE":
                return "foreign" if self.keys is not None else "mixed"
            case "NULL":
                return "mixed" if self.keys is not None else "lost"
            case _:
                return "mute"

    async def _receive(self, dealer: Any, monitor: Any, timeout_s: float) -> bytes | Miss:
        """The answer after its empty frame, or why there is none."""
        miss: Miss = "absent"
        fd = NO_CONNECTION
        answer, event = dealer.recv_multipart(), monitor.recv_multipart()
        try:
            async with asyncio.timeout(timeout_s):
                while not answer.done():
                    self.is_connected = miss == "silent"
                    await asyncio.wait((answer, event), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    if answer.done():
                        break
                    if event.done():
                        told = parse_monitor_message(event.result())
                        fd = int(told["value"]) if told["event"] == zmq.EVENT_CONNECTED else fd
                        fd = NO_CONNECTION if told["event"] == zmq.EVENT_DISCONNECTED else fd
                        found = _read_event(told, miss)
                        if found in ("closed", "refused", "mixed", "hung up", "lost"):
                            return found
                        miss, event = found, monitor.recv_multipart()
                    elif fd != NO_CONNECTION and bytes_received(fd) > self.max_bytes + OVERHEAD_BYTES:
                        return "endless"
        except TimeoutError:
            return miss
        finally:
            answer.cancel()
            event.cancel()
        frames: list[bytes] = answer.result()
        return frames[1] if len(frames) > 1 else frames[0]  # NixlConnector's has one more

    def _explain(self, miss: Miss) -> str:
        reasons = _REASONS | (_REASONS_WITH_KEYS if self.keys is not None else {})
        public, count = (self.keys.public.decode(), len(self.keys.trusted)) if self.keys is not None else ("", 0)
        return reasons.get(miss, reasons["absent"]).format(
            address=self.address,
            within=f"within {self.timeout_s:g} s",
            public=public,
            count=count,
            max_bytes=self.max_bytes,
        )


def _read_event(event: Any, miss: Miss) -> Miss:
    """Why there is no answer after an event of the monitor. `miss`: why there was none before it."""
    match event["event"]:
        case zmq.EVENT_CONNECTED:
            return "mute"
        case zmq.EVENT_CONNECT_RETRIED if miss == "absent":
            # The first attempt has failed before there was a connection. ZeroMQ would try again until the time is over.
            return "closed"
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "silent"
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH if event["value"] == KEY_REFUSED:
            return "refused"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "mixed"
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "hung up"
        case zmq.EVENT_DISCONNECTED if miss == "silent":
            # The question is lost with its connection.
            return "lost"
    return miss


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

    try:
        threading.Thread(target=resolve, name="kvreshard-lookup", daemon=True).start()
    except RuntimeError as error:  # this process has as many threads as it may have
        _free_lookups.release()
        raise OSError(str(error)) from error
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
