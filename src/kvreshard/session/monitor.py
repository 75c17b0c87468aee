"""Monitors of ZeroMQ sockets that cannot stop the process.

ZeroMQ's I/O thread writes a monitor's events to a queue. It waits while that queue is full, and it holds a lock that whoever ends the
monitor needs, with Python's own lock in hand (pyzmq 27, libzmq 4.3.5). A peer that takes and drops connections as fast as it can would
stop the whole process. So the queue has no bound, and the monitor ends before its reading end is closed.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import zmq

_numbers = itertools.count()


def open_monitor(context: zmq.Context[Any], watched: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """The reading end of a monitor of `watched`; end it with `close_monitor`. Raises zmq.ZMQError."""
    address = f"inproc://kvreshard-monitor-{next(_numbers)}"
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
