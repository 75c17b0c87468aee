"""Bounds on what connects to the handshake server: `ConnectionLimits` per connection, `RateLimit` for all together.

ZeroMQ bounds one frame, one message queue and the time of its own handshake. It bounds neither the number of connections nor the frames of
a message that never ends (4,000 frames without an end kept 240 MB, libzmq 4.3.5). `ConnectionLimits` follows the connections by ZeroMQ's
monitor, and the bytes that each has sent by the kernel (TCP_INFO, Linux only). It resets those that are over their bounds; ZeroMQ sees the
end of a connection and cleans up, and an honest peer asks again.

Monitors must not stop the process (`open_monitor`). ZeroMQ's I/O thread writes a monitor's events to a queue. It waits while that queue is full,
and it holds a lock that whoever ends the monitor needs, with Python's own lock in hand (pyzmq 27, libzmq 4.3.5). A peer that takes and drops
connections as fast as it can would stop the whole process. So the queue has no bound, and the monitor ends before its reading end is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import zmq

# Offset and size of tcpi_bytes_received in Linux's struct tcp_info, since 4.1.
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 256
_monitor_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of one server.

    Attributes:
        max_connections: at one time; the ranks of a large fleet that meet this engine in the same moment.
        max_visit_s: of one connection. It is one question; engine metadata of megabytes over a slow network takes seconds.
        max_visit_bytes: that one connection may send. A handshake message has some hundred bytes, at most 64 KiB.
    """

    max_connections: int = 512
    max_visit_s: float = 60.0
    max_visit_bytes: int = 256 * 1024


@dataclass(frozen=True, slots=True)
class _Connection:
    fd: int
    peer: object
    since_s: float

    @property
    def host(self) -> str:
        return str(self.peer[0]) if isinstance(self.peer, tuple) else ""


class ConnectionLimits:
    """The connections of one listening port, oldest first. Seconds are of the caller's clock."""

    def __init__(self, port: int, bounds: Bounds) -> None:
        self._port, self._bounds = port, bounds
        self._connections: dict[int, _Connection] = {}
        self.num_ended = 0

    def __len__(self) -> int:
        return len(self._connections)

    def accepted(self, fd: int, now_s: float) -> None:
        """A connection was accepted. If there are too many, the oldest of the host with the most is reset."""
        self._connections.pop(fd, None)
        peer = self._peer(fd)
        if peer is None:
            return
        self._connections[fd] = _Connection(fd, peer, now_s)
        if len(self._connections) > self._bounds.max_connections:
            most = Counter(one.host for one in self._connections.values()).most_common(1)[0][0]
            self._reset(next(one for one in self._connections.values() if one.host == most))

    def gone(self, fd: int) -> None:
        """A connection has ended."""
        self._connections.pop(fd, None)

    def sweep(self, now_s: float) -> None:
        """Reset the connections that are over their bounds."""
        for one in list(self._connections.values()):
            is_late = now_s - one.since_s > self._bounds.max_visit_s
            if is_late or bytes_received(one.fd) > self._bounds.max_visit_bytes:
                self._reset(one)

    def _peer(self, fd: int) -> object:
        """The other end of `fd`, if that is a connection of this port; None otherwise."""
        with contextlib.suppress(OSError), _duplicate(fd) as connection:
            return self._peer_of(connection)
        return None

    def _peer_of(self, connection: socket.socket) -> object:
        name = connection.getsockname()
        return connection.getpeername() if isinstance(name, tuple) and name[1] == self._port else None

    def _reset(self, one: _Connection) -> None:
        """The descriptor may belong to something else by now: it must still be a connection of this port with the same peer."""
        self._connections.pop(one.fd, None)
        with contextlib.suppress(OSError), _duplicate(one.fd) as connection:
            if self._peer_of(connection) == one.peer:
                # Reset when ZeroMQ closes it: the kernel would keep what is left of it for another minute.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
                self.num_ended += 1


class RateLimit:
    """Token bucket over all connections together: `per_s` units a second, at most `burst` of them saved up.

    It delays and does not drop. While it is empty nothing is read: ZeroMQ's queues fill and TCP pushes back. A ROUTER takes turns between its
    connections, so one that asks without end does not keep another from its turn. Seconds are of the caller's clock.
    """

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = burst, now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next message may be served."""
        self._refill(now_s)
        return max(0.0, -self._left / self._per_s)

    def spend(self, units: float, now_s: float) -> None:
        """Charge a message that was served. It may cost more units than there are: then the next waits."""
        self._refill(now_s)
        self._left -= units

    def _refill(self, now_s: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s


def _duplicate(fd: int) -> socket.socket:
    """A socket of our own for the connection behind `fd`. Raises OSError if there is none."""
    mine = os.dup(fd)
    try:
        return socket.socket(fileno=mine)
    except OSError:
        os.close(mine)
        raise


def bytes_received(fd: int) -> int:
    """Bytes that the peer has sent; 0 where the kernel does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0
    with contextlib.suppress(OSError):
        # The type is given, so that nothing but this one option is read of a descriptor that may be something else by now.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
        finally:
            connection.detach()
        if len(info) >= _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size:
            return int(_BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0])
    return 0


def open_monitor(context: zmq.Context[Any], watched: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """The reading end of a monitor of `watched`; end it with `close_monitor`. Raises zmq.ZMQError."""
    address = f"inproc://kvreshard-monitor-{next(_monitor_numbers)}"
    monitor: zmq.Socket[Any] = context.socket(zmq.PAIR)
    try:
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        watched.monitor(address, events)
        monitor.connect(address)
    except zmq.ZMQError:
        monitor.close()
        raise
    return monitor


def close_monitor(watched: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
    """End a monitor: first the writing end, then the reading one."""
    with contextlib.suppress(zmq.ZMQError):
        watched.monitor(None, 0)
    monitor.close()
