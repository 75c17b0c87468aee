"""How does a peer put one question to a listener, and what does it know if there is no answer?

1. Look the host up. Connect, ask, wait. An answer that does not come in time is asked for again on a fresh connection: a handshake message changes
   nothing but a log, and it may have been lost with its connection.
2. ZeroMQ says nothing when it cannot connect; its monitor does. From what it saw follows why there is no answer: the connection was
   refused (`closed`), nobody answers there (`absent`), something that is not ZeroMQ (`mute`), keys on one side only (`mixed`), a key that
   the other side does not trust (`refused`), another key over there than those trusted here (`foreign`), or an engine that is busy
   (`silent`). If the other side only hung up, its greeting tells whether it wants keys.
3. `closed`, `mixed` and `refused` will not change by waiting and are told at once. With keys, each trusted key is tried as the listener's.

Raises HandshakeError naming the address, the reason and the remedy.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any, Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvreshard.session.handshake_messages import Address, HandshakeError
from kvreshard.session.keys import Keys
from kvreshard.session.lookup import look_up
from kvreshard.session.monitor import monitored
from kvreshard.session.poll import Exchange, Wait, drive
from kvreshard.session.probe import ask_mechanism

# An answer of megabytes from a busy engine mostly takes less than this; each further wait is twice as long.
ASK_AGAIN_S = 5.0
# A listener that ends connections is being flooded or restarted: come back, but not at once.
PAUSE_S = 0.1
KEY_REFUSED = 400

Miss = Literal["closed", "absent", "mute", "mixed", "refused", "foreign", "lost", "silent"]

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def ask_and_wait(
    address: Address, handshake_message: bytes, timeout_s: float, max_bytes: int, keys: Keys | None = None
) -> bytes:
    """The listener's answer to `handshake_message`, of at most `max_bytes` bytes. Raises HandshakeError after `timeout_s` or before."""
    with zmq.Context() as context:
        return drive(ask(context, address, handshake_message, timeout_s, max_bytes, keys, time.monotonic() + timeout_s))


def ask(
    context: zmq.Context[Any],
    address: Address,
    handshake_message: bytes,
    timeout_s: float,
    max_bytes: int,
    keys: Keys | None,
    deadline_s: float,
) -> Exchange[bytes]:
    """The exchange of `ask_and_wait`, which ends at `deadline_s` of `time.monotonic`. `timeout_s` is what an error says of it."""
    misses: list[Miss] = []
    server_keys = itertools.cycle(keys.trusted if keys else (None,))
    num_keys = len(keys.trusted) if keys else 1
    patience_s = ASK_AGAIN_S
    server_key = next(server_keys)
    number = yield from _look_up(address, deadline_s)
    while (left_s := deadline_s - time.monotonic()) > 0:
        found = yield from _ask_once(
            context, number, handshake_message, min(left_s, patience_s), max_bytes, keys, server_key
        )
        if isinstance(found, bytes):
            return found
        misses.append(found)
        if found in ("closed", "mixed", "refused") or misses[-num_keys:] == ["foreign"] * num_keys:
            break
        if found == "silent":
            patience_s *= 2  # engine metadata may take longer than that: do not begin it again and again
        if found == "foreign":
            server_key = next(server_keys)
        elif found in ("lost", "mute"):
            yield Wait((), min(deadline_s, time.monotonic() + PAUSE_S))
    raise HandshakeError(_why(address, misses, timeout_s, keys))


def _look_up(address: Address, deadline_s: float) -> Exchange[Address]:
    try:
        return (yield from look_up(address, deadline_s))
    except OSError as error:
        raise HandshakeError(
            f"the host of {address} cannot be looked up: {error}; give the engine a side_channel_host that this host can resolve, or a number"
        ) from error


def _ask_once(
    context: zmq.Context[Any],
    address: Address,
    handshake_message: bytes,
    timeout_s: float,
    max_bytes: int,
    keys: Keys | None,
    server_key: bytes | None,
) -> Exchange[bytes | Miss]:
    deadline_s = time.monotonic() + timeout_s
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            dealer.setsockopt(zmq.IPV6, int(":" in address.host))
            if keys is not None and server_key is not None:
                dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
                    server_key,
                    keys.public,
                    keys.secret,
                )
            with monitored(context, dealer, _WATCHED) as monitor:
                dealer.connect(str(address))
                # A connection that was refused at once is gone by now, and nothing else would ever take the message.
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart([b"", handshake_message], zmq.NOBLOCK)
                miss = yield from _await(dealer, monitor, deadline_s)
            if miss == "hung up":
                return (yield from _who_hung_up(address, deadline_s, has_keys=keys is not None))
            return miss or _last_frame(dealer)
    except zmq.ZMQError as error:
        raise HandshakeError(f"the engine at {address} cannot be asked: {error}") from error


def _await(
    dealer: zmq.Socket[Any], monitor: zmq.Socket[Any], deadline_s: float
) -> Exchange[Miss | Literal["hung up"] | None]:
    """Wait for an answer: None if it is there, else why it is not."""
    miss: Miss = "absent"
    while time.monotonic() < deadline_s:
        ready = yield Wait(((dealer, zmq.POLLIN), (monitor, zmq.POLLIN)), deadline_s, miss == "silent")
        if dealer in ready:
            return None
        if monitor not in ready:
            continue
        event = parse_monitor_message(monitor.recv_multipart())
        match event["event"]:
            case zmq.EVENT_CONNECTED:
                miss = "mute"
            case zmq.EVENT_CONNECT_RETRIED if miss == "absent":
                # The first attempt has failed before there was a connection. ZeroMQ would try again until the time is over.
                return "closed"
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                miss = "silent"
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH if event["value"] == KEY_REFUSED:
                return "refused"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return "mixed"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return "hung up"
            case zmq.EVENT_DISCONNECTED if miss == "silent":
                # What it was asked is lost with the connection.
                return "lost"
    return miss


def _who_hung_up(address: Address, deadline_s: float, *, has_keys: bool) -> Exchange[Miss]:
    """What it means that a connection was closed before its handshake was over."""
    match (yield from ask_mechanism(address, max(0.0, deadline_s - time.monotonic()))):
        case "CURVE":
            return "foreign" if has_keys else "mixed"
        case "NULL":
            return "mixed" if has_keys else "lost"
        case _:
            return "mute"


def _last_frame(dealer: zmq.Socket[Any]) -> bytes:
    frames: list[bytes] = dealer.recv_multipart(zmq.NOBLOCK)
    return frames[-1]


def _why(address: Address, misses: list[Miss], timeout_s: float, keys: Keys | None) -> str:
    within = f"within {timeout_s:g} s"
    match misses[-1] if misses else "absent":
        case "refused" if keys is not None:
            return (
                f"the engine at {address} does not trust this engine's key {keys.public.decode()}: put its .key file into that "
                "engine's curve_public_keys_dir, or give both engines the same key file"
            )
        case "mixed" if keys is not None:
            return (
                f"the engine at {address} uses no keys and this one does: give both a curve_secret_key_file, or neither"
            )
        case "mixed":
            return (
                f"the engine at {address} wants a key and this one has none: give this engine a curve_secret_key_file whose "
                "public key that one trusts"
            )
        case "foreign" if keys is not None:
            return (
                f"the engine at {address} has none of the {len(keys.trusted)} keys that this one trusts: put its .key file "
                "into this engine's curve_public_keys_dir, or give both engines the same key file"
            )
        case "closed":
            return (
                f"nothing takes connections at {address}: they are refused, or the host cannot be reached; is the engine running, "
                "does it use ReshardConnector, and is the port that of its listener?"
            )
        case "mute":
            return (
                f"something at {address} takes connections, but does not speak ZeroMQ {within}; is the port that of a "
                "kvreshard engine?"
            )
        case "silent" | "lost":
            return (
                f"the engine at {address} is connected but does not answer {within}; is it stopped or overloaded, and is the "
                "port that of a kvreshard engine?"
            )
        case _:
            return (
                f"no kvreshard engine answers at {address} {within}; is it running, does it use ReshardConnector, and can "
                "this host reach that port?"
            )
