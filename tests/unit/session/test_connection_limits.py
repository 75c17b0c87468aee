"""Are visits counted, ended when they are over their bounds, and is nobody else's socket touched?"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvreshard.session.connection_limits import Bounds, ConnectionLimits, RateLimit

PATIENCE_S = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def visit(stack: ExitStack, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    """(the client's end, the server's end)."""
    client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=PATIENCE_S))
    return client, stack.enter_context(server.accept()[0])


def test_a_late_visitor_is_shut_out(stack: ExitStack, server: socket.socket) -> None:
    connection_limits = ConnectionLimits(server.getsockname()[1], Bounds(max_visit_s=10))
    (first, here), (second, there) = visit(stack, server), visit(stack, server)
    connection_limits.accepted(here.fileno(), 0.0)
    connection_limits.accepted(there.fileno(), 5.0)
    connection_limits.sweep(10.0)
    assert len(connection_limits) == 2
    connection_limits.sweep(10.5)
    assert (len(connection_limits), connection_limits.num_ended) == (1, 1)
    assert first.recv(1) == b""
    there.sendall(b"x")
    assert second.recv(1) == b"x"
    connection_limits.gone(there.fileno())
    assert len(connection_limits) == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel does not tell what was received")
def test_a_visitor_that_sends_too_much_is_shut_out(stack: ExitStack, server: socket.socket) -> None:
    connection_limits = ConnectionLimits(server.getsockname()[1], Bounds(max_visit_bytes=1000))
    client, here = visit(stack, server)
    connection_limits.accepted(here.fileno(), 0.0)
    for content, left in ((b"x" * 1000, 1), (b"x", 0)):
        client.sendall(content)
        assert here.recv(1000, socket.MSG_WAITALL if left else 0)
        connection_limits.sweep(0.0)
        assert len(connection_limits) == left


def test_the_oldest_of_the_busiest_address_makes_room(stack: ExitStack, server: socket.socket) -> None:
    connection_limits = ConnectionLimits(server.getsockname()[1], Bounds(max_connections=2))
    pairs = [visit(stack, server) for _ in range(3)]
    for number, (_, here) in enumerate(pairs):
        connection_limits.accepted(here.fileno(), float(number))
    assert len(connection_limits) == 2
    assert pairs[0][0].recv(1) == b""


def test_a_number_that_is_somebody_elses_by_now_is_left_alone(stack: ExitStack, server: socket.socket) -> None:
    connection_limits = ConnectionLimits(server.getsockname()[1], Bounds(max_visit_s=1))
    left, right = socket.socketpair()
    stack.enter_context(left)
    stack.enter_context(right)
    connection_limits.accepted(left.fileno(), 0.0)
    connection_limits.accepted(999_999, 0.0)
    assert len(connection_limits) == 0
    _, here = visit(stack, server)
    connection_limits.accepted(here.fileno(), 0.0)
    number = here.detach()
    socket.close(number)
    stolen = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    connection_limits.sweep(2.0)
    assert (len(connection_limits), connection_limits.num_ended) == (0, 0)
    assert stolen.getsockname()[1]


def test_a_bucket_delays_when_it_is_empty_and_saves_up_no_more_than_its_burst() -> None:
    limit = RateLimit(per_s=10, burst=2, now_s=0.0)
    assert limit.wait_s(0.0) == 0.0
    limit.spend(4, 0.0)
    assert limit.wait_s(0.0) == pytest.approx(0.2)
    assert limit.wait_s(0.15) == pytest.approx(0.05)
    assert limit.wait_s(100.0) == 0.0
    limit.spend(3, 100.0)
    assert limit.wait_s(100.0) == pytest.approx(0.1)
    assert limit.wait_s(99.0) == pytest.approx(0.1)  # a clock that goes back gives nothing
