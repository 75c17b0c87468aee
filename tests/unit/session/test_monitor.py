"""Does watching a socket ever stop the process? Peers that hang up make events all the time, also when nobody reads any more."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvreshard.session.handshake import Address, HandshakeError, fetch_card
from kvreshard.session.monitor import close_monitor, monitored, open_monitor

PATIENCE_S = 60.0
MORE_THAN_A_QUEUE_HOLDS = 1500


class Rude(socketserver.BaseRequestHandler):
    """Takes a connection and drops it."""

    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def rude() -> Iterator[Address]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Rude) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Address("127.0.0.1", server.server_address[1])
        server.shutdown()


@pytest.mark.timeout(120)
def test_asking_somebody_who_hangs_up_always_comes_to_an_end(rude: Address) -> None:
    def ask() -> None:
        for _ in range(20):
            with pytest.raises(HandshakeError):
                fetch_card(rude, "decode", 0, 0.05)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.timeout(120)
def test_events_that_nobody_reads_stop_nothing(rude: Address) -> None:
    """More of them than ZeroMQ's own queues hold, while the monitor is ended."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 1)
        monitor = open_monitor(context, dealer, zmq.EVENT_ALL)
        for _ in range(20):
            dealer.connect(str(rude))
        seen, deadline_s = 0, time.monotonic() + PATIENCE_S
        with context.socket(zmq.DEALER) as other, monitored(context, other, zmq.EVENT_ALL) as watched:
            other.setsockopt(zmq.LINGER, 0)
            other.setsockopt(zmq.RECONNECT_IVL, 1)
            other.connect(str(rude))
            while seen < MORE_THAN_A_QUEUE_HOLDS and time.monotonic() < deadline_s:
                if watched.poll(100):
                    assert parse_monitor_message(watched.recv_multipart())["event"]
                    seen += 1
        close_monitor(dealer, monitor)
