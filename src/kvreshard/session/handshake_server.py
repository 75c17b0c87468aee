"""The server side of handshakes: one thread with one ZeroMQ ROUTER socket that answers with the engine's metadata.

Whatever arrives, the server lives and soon answers the next:

1. ZeroMQ drops frames above `MAX_MESSAGE_BYTES`, connections that do not finish its own handshake, and answers that nobody reads: a queue
   holds a few references to the one copy of the metadata.
2. `ConnectionLimits` bounds how many connections there are, how long each lasts and how much it sends; `RateLimit` what all of them
   together may ask.
3. What is not a handshake message gets one line as answer; vLLM's own NixlConnector gets one that it refuses. Nothing is unpickled.

A question for prefills that are under way is held until `rendezvous` has something new.

With `keys`, ZeroMQ's CURVE encrypts and authenticates both ways, and unknown keys are refused before they can send anything.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from kvreshard.model.errors import KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.session import nixl_connector
from kvreshard.session.connection_limits import Bounds, ConnectionLimits, RateLimit, close_monitor, open_monitor
from kvreshard.session.engine_metadata import EngineMetadata, encode_engine_metadata
from kvreshard.session.handshake_messages import (
    MAX_MESSAGE_BYTES,
    Address,
    HandshakeMessage,
    TransferQuestion,
    encode_answer,
    read_message,
)
from kvreshard.session.keys import Keys
from kvreshard.session.rendezvous import Rendezvous

logger = get_logger(__name__)

IDLE_MS = 200
# While there are connections: a connection can exceed its bound of bytes by what it sends in this time.
SWEEP_S = 0.020
# Messages that wait per connection, each way. A peer asks one question per connection.
QUEUE = 4
# ZeroMQ's own handshake takes a few round trips.
ZMTP_HANDSHAKE_MS = 5000
BACKLOG = 512
# A message costs one unit, and its answer by bytes: some 250 MB or 2,000 messages a second.
UNITS_PER_S = 2000.0
BURST = 4000.0
BYTES_PER_UNIT = 128 * 1024
MAX_COMPLAINTS = 1000
# A question for transfers is held so long, below `Bounds.max_visit_s` and `exchange.ASK_AGAIN_S`, and so many at a time: the other connections are
# for handshakes.
HOLD_S = 4.0
MAX_HELD = 384
DOMAIN = "kvreshard"

_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class _Held:
    """A question for transfers of which nothing is new yet."""

    sender: bytes
    transfers: tuple[TransferQuestion, ...]
    until_s: float


class HandshakeServer:
    """Answers at `address` (port 0: any free one) until `close`. `on_outcome` is called on the server's thread.

    `keys`: only engines whose keys they trust are let in; without, everybody who reaches the port. Raises KvReshardError if the
    address cannot be bound.
    """

    def __init__(
        self,
        address: Address,
        engine_metadata: EngineMetadata,
        on_outcome: Callable[[HandshakeMessage], None] = lambda message: None,
        *,
        rendezvous: Rendezvous | None = None,
        keys: Keys | None = None,
        bounds: Bounds = Bounds(),  # noqa: B008 (frozen)
    ) -> None:
        self.hand_out(engine_metadata)
        self.address, self._on_outcome, self._rendezvous = address, on_outcome, rendezvous
        # By who asks, the oldest first.
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._complaints: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._authenticator = _authenticate(self._context, keys, self._complain) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        _set_up(self._socket, address, keys)
        self._monitor = open_monitor(self._context, self._socket, _WATCHED)
        try:
            self._socket.bind(str(address))
        except zmq.ZMQError as error:
            self._destroy()
            raise KvReshardError(
                f"cannot listen for handshakes on {address}: {error}; give each engine a port of its own, and a host that "
                "is an address of this machine"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(address.host, int(endpoint.rsplit(":", 1)[1]))
        self._connection_limits = ConnectionLimits(self.address.port, bounds)
        self._rate_limit = RateLimit(UNITS_PER_S, BURST, time.monotonic())
        if keys is None and not address.is_loopback:
            logger.warning(
                "handshakes are taken at %s from everybody who reaches that port, and are not encrypted; give all engines a "
                "curve_secret_key_file, or keep the port within a network that you trust (SECURITY.md)",
                self.address,
                extra=fields("handshakes_open", address=self.address),
            )
        self._thread = threading.Thread(target=self._run, name="kvreshard-listener", daemon=True)
        self._thread.start()

    def hand_out(self, engine_metadata: EngineMetadata) -> None:
        """Answer with this metadata from now on: one copy outside Python. What waits for a slow peer is a reference."""
        self._engine_metadata = zmq.Frame(encode_engine_metadata(engine_metadata), copy=True)

    def wake(self) -> None:
        """What `rendezvous` answers has changed. On any thread; does not wait."""
        with contextlib.suppress(OSError):  # so many wait to be seen, or it is closed
            self._wakes.send(b"w")

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._stopping.set()
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        swept_s = 0.0
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(int(SWEEP_S * 1000) if len(self._connection_limits) else IDLE_MS))
                now_s = time.monotonic()
                try:
                    if self._monitor in ready:
                        self._read_events(now_s)
                    if now_s - swept_s >= SWEEP_S:
                        self._connection_limits.sweep(now_s)
                        swept_s = now_s
                    if self._socket in ready and not self._stopping.wait(min(SWEEP_S, self._rate_limit.wait_s(now_s))):
                        self._answer_next(time.monotonic())
                    self._answer_held(time.monotonic(), is_woken=self._woken.fileno() in ready)
                except zmq.ZMQError as error:
                    logger.debug("a handshake was dropped: %s", error)
                except Exception:  # a fault here must not end the server: every later handshake would hang
                    logger.exception("a handshake failed", extra=fields("internal_error"))
        finally:
            self._destroy()

    def _answer_next(self, now_s: float) -> None:
        if self._rate_limit.wait_s(now_s):
            return
        num_bytes = self._answer(self._socket.recv_multipart(zmq.NOBLOCK), now_s)
        self._rate_limit.spend(1 + num_bytes / BYTES_PER_UNIT, now_s)

    def _answer(self, frames: Sequence[bytes], now_s: float) -> int:
        """Answer one message, or hold it; bytes of the answer."""
        *envelope, payload = frames
        if not envelope:
            return 0
        message = read_message(payload)
        if not isinstance(message, str) and message.ask == "transfers" and self._rendezvous is not None:
            transfers, asker = message.transfers or (), f"{message.engine} {message.text}"
            self._held.pop(asker, None)
            found = self._rendezvous.answer(transfers, is_last=False)
            if found is None:
                if len(self._held) >= MAX_HELD:
                    self._answer_one(self._held.popitem(last=False)[1], math.inf)
                self._held[asker] = _Held(envelope[0], transfers, now_s + HOLD_S)
                return 0
            return self._send(envelope[0], [zmq.Frame(found, copy=True)])
        return self._send(envelope[0], self._reply(message, payload))

    def _answer_held(self, now_s: float, *, is_woken: bool) -> None:
        """Answer the questions of which something is new, and those that were held long enough."""
        if is_woken:
            with contextlib.suppress(OSError):
                self._woken.recv(4096)
        for asker, held in list(self._held.items()) if is_woken else ():
            if self._answer_one(held, now_s):
                del self._held[asker]
        while self._held and now_s >= next(iter(self._held.values())).until_s:
            self._answer_one(self._held.popitem(last=False)[1], math.inf)

    def _answer_one(self, held: _Held, now_s: float) -> bool:
        found = self._rendezvous and self._rendezvous.answer(held.transfers, is_last=now_s >= held.until_s)
        if not found:
            return False
        num_bytes = self._send(held.sender, [zmq.Frame(found, copy=True)])
        self._rate_limit.spend(1 + num_bytes / BYTES_PER_UNIT, time.monotonic())
        return True

    def _send(self, sender: bytes, reply: Sequence[zmq.Frame]) -> int:
        # Only the sender's name and the empty frame go back: a message of many frames is not worth as many.
        try:
            self._socket.send_multipart([sender, b"", *reply], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # It has disconnected, or has not read the answers before this one.
            logger.debug("an answer was dropped: %s", error)
            return 0
        return sum(map(len, reply))

    def _reply(self, message: HandshakeMessage | str, payload: bytes) -> Sequence[zmq.Frame]:
        if isinstance(message, str):
            if not nixl_connector.is_request(payload):
                return [zmq.Frame(encode_answer(message), copy=True)]
            self._complain(nixl_connector.WHO_ASKED)
            return [zmq.Frame(frame, copy=True) for frame in nixl_connector.refusal()]
        if message.ask == "metadata":
            return [self._engine_metadata]
        if message.ask == "transfers":
            return [zmq.Frame(encode_answer("this engine does not show prefills that are under way"), copy=True)]
        self._on_outcome(message)
        return [zmq.Frame(encode_answer("noted"), copy=True)]

    def _read_events(self, now_s: float) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._connection_limits.accepted(int(event["value"]), now_s)
                case zmq.EVENT_DISCONNECTED:
                    self._connection_limits.gone(int(event["value"]))
                case _ if self._authenticator is not None:
                    self._complain("a peer could not connect: it has no keys, or another key for this engine")

    def _complain(self, what: str) -> None:
        """Log a line the first, second, fourth, ... time."""
        if what not in self._complaints and len(self._complaints) >= MAX_COMPLAINTS:
            what = "more peers with unknown keys were refused"
        self._complaints[what] += 1
        count = self._complaints[what]
        if count & (count - 1) == 0:
            logger.warning(
                "handshakes at %s: %s%s",
                *(self.address, what, f" ({count} times)" if count > 1 else ""),
                extra=fields("handshake_refused", address=self.address, count=count),
            )

    def _destroy(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        close_monitor(self._socket, self._monitor)
        self._woken.close()
        self._wakes.close()
        self._context.destroy(linger=0)


def _authenticate(context: zmq.Context[Any], keys: Keys, complain: Callable[[str], None]) -> ThreadAuthenticator:
    """Let in peers with trusted public keys only. `complain` is called on the authenticator's thread."""

    def is_trusted(domain: str, key: bytes) -> bool:
        if key in keys.trusted:
            return True
        complain(
            f"a peer with the unknown public key {key.decode()} was refused; to let it in, put its .key file into curve_public_keys_dir"
        )
        return False

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, SimpleNamespace(callback=is_trusted))
    return authenticator


def _set_up(router: zmq.Socket[Any], address: Address, keys: Keys | None) -> None:
    """The bounds that ZeroMQ itself enforces."""
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # An answer that cannot be queued is an error, and is not charged to the rate limit.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.RCVHWM, QUEUE)
    router.setsockopt(zmq.SNDHWM, QUEUE)
    router.setsockopt(zmq.HANDSHAKE_IVL, ZMTP_HANDSHAKE_MS)
    router.setsockopt(zmq.BACKLOG, BACKLOG)
    router.setsockopt(zmq.IPV6, int(":" in address.host))
    if keys is not None:
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, keys.public, keys.secret
