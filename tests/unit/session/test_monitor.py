"""Does watching a socket ever stop the process? Peers that hang up make events all the time, also when nobody reads any more."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvreshard.session.handshake_client import fetch_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeError

PATIENCE_S = 60.0


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
                fetch_engine_metadata(rude, "decode", 0, 0.05)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


UNREAD = """
import socketserver, threading, time, zmq
from kvreshard.session.connection_limits import close_monitor, open_monitor

count = 0

class Rude(socketserver.BaseRequestHandler):
    def handle(self):
        global count
        count += 1

with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Rude) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 1)
        monitor = open_monitor(context, dealer, zmq.EVENT_ALL)
        for _ in range(10):
            dealer.connect("tcp://127.0.0.1:%d" % server.server_address[1])
        while count < 1500:
            time.sleep(0.01)
        close_monitor(dealer, monitor)
    server.shutdown()
print("over")
"""


def test_events_that_nobody_reads_stop_nothing() -> None:
    """Some thousands, more than ZeroMQ's own queues hold. In a process of its own: one that is stopped could not even say so."""
    done = subprocess.run(
        [sys.executable, "-c", UNREAD], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout == "over\n", done.stderr
