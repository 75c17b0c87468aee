"""Do two engines on two hosts work, and what becomes of requests when the network between them is cut, heals, or is slow?

The hosts are network namespaces (`hosts`), the engines are processes with the real session over NIXL's TCP (`network_engine`):
source `prefill` with two ranks, reader `decode` with one rank and other pages, and a second source, `other`, all with keys. Whatever
this machine does not allow is skipped with its own words.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.hosts import Network, Unsupported
from tests.faults.network_control import RemoteEngineProcess, Setup, Told, Wanted

from kvreshard.session.keys import write_keys
from kvreshard.session.lease import FREE

pytestmark = [pytest.mark.nixl, pytest.mark.slow]
PATIENCE_S = 30.0
LOAD_S, SETTLE_S, HANDSHAKE_S = 4.0, 2.0, 2.0
# From the order of a load until it must have failed, whatever the network does; the rest is for a busy machine.
BOUND_S = LOAD_S + SETTLE_S + 4.0
OPTIONS = {
    "settle_timeout_s": SETTLE_S,
    "handshake_timeout_s": HANDSHAKE_S,
    "heartbeat_s": 0.3,
    "retry_s": 0.0,
}
LEASE_S = 2.5  # shorter than 1,800 tokens take at 4 Mbit/s
NUM_PAGES = 600
KIB_PER_TOKEN = 1
SLOW = ("tbf", "rate", "4mbit", "burst", "32kb", "latency", "2s")


@dataclass
class Hosts:
    """The network and its three engines."""

    network: Network
    prefill: RemoteEngineProcess
    decode: RemoteEngineProcess
    other: RemoteEngineProcess
    num_slots: int = 0

    def offer(self, source: RemoteEngineProcess, num_tokens: int, first_page: int = 1, ttl_s: float = 60.0) -> Wanted:
        """A finished prefill at that source, to be read into the decode engine's pages from `first_page` on."""
        self.num_slots += 1
        wanted = Wanted(f"r{self.num_slots}", num_tokens, self.num_slots, 1, first_page, self.num_slots)
        self.decode.ask("poison", wanted, source.setup)
        source.ask("offer", wanted, self.decode.setup, ttl_s)
        return wanted

    def order(self, source: RemoteEngineProcess, wanted: Wanted) -> None:
        self.decode.ask("load", wanted, source.setup, source.port)

    def loads(self, source: RemoteEngineProcess, num_tokens: int, first_page: int = 1, ttl_s: float = 60.0) -> None:
        """One request from its offer to its end, and exact."""
        wanted = self.offer(source, num_tokens, first_page, ttl_s)
        self.order(source, wanted)
        told = until_told(self.decode, lambda told: wanted.name in told.received or wanted.name in told.failed)
        assert wanted.name in told.received, told.failed
        assert self.decode.ask("differs", wanted, source.setup) == {}
        freed = until_told(source, lambda told: len(told.freed.get(wanted.name, [])) == source.setup.tp)
        assert set(freed.freed[wanted.name]) == {"reported"}

    def is_met(self, source: RemoteEngineProcess, num_tokens: int) -> bool:
        """Whether a load ends well; if not, the handshake took longer than it may, as it can on a machine that is busy."""
        wanted = self.offer(source, num_tokens)
        self.order(source, wanted)
        told = until_told(self.decode, lambda told: wanted.name in told.received or wanted.name in told.failed)
        if wanted.name in told.failed:
            assert told.failed[wanted.name][0][0] == "handshake", told.failed
        return wanted.name in told.received

    def start_slowly(self, num_tokens: int, first_page: int) -> Wanted:
        """A load of which some bytes have arrived, and by far not all."""
        wanted = self.offer(self.prefill, num_tokens, first_page)
        try:
            self.network.limit("decode", *SLOW)
        except Unsupported as error:
            pytest.skip(f"a network cannot be slowed down here: {error}")
        self.order(self.prefill, wanted)
        until(lambda: self.share(wanted) > 0.0, "no byte arrived")
        assert self.share(wanted) < 0.5
        return wanted

    def share(self, wanted: Wanted) -> float:
        return float(self.decode.ask("shares", wanted, self.prefill.setup))


def until(condition: Callable[[], bool], complaint: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, complaint


def until_told(engine: RemoteEngineProcess, condition: Callable[[Told], bool]) -> Told:
    """What the engine says, once it is that."""
    told = Told()

    def holds() -> bool:
        nonlocal told
        told = engine.ask("listen")
        return condition(told)

    until(holds, f"{engine.setup.name} says {told}")
    return told


@pytest.fixture
def load_s() -> float:
    """How long a load may take; a test of what is slow gives it more."""
    return LOAD_S


@pytest.fixture
def hosts(tmp_path: Path, load_s: float) -> Iterator[Hosts]:
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no hosts can be made here: {', '.join(missing)} not found (iproute2, util-linux)")
    _, key_file = write_keys(tmp_path, "fleet")
    options = {**OPTIONS, "load_timeout_s": load_s}
    with ExitStack() as stack:
        names = ("prefill", "decode", "other")
        try:
            network = stack.enter_context(Network(names))
        except Unsupported as error:
            pytest.skip(f"no hosts can be made here: {error}")
        engines = [
            stack.enter_context(
                RemoteEngineProcess(
                    network, name, Setup(name, tp, page, NUM_PAGES, network.address(name), key_file, options)
                )
            )
            for name, tp, page in zip(names, (2, 1, 1), (4, 6, 4), strict=True)
        ]
        yield Hosts(network, *engines)


def test_a_request_crosses_the_network_and_is_exact(hosts: Hosts) -> None:
    before = hosts.network.received_bytes("decode")
    hosts.loads(hosts.prefill, 500)
    hosts.loads(hosts.prefill, 37)
    assert hosts.network.received_bytes("decode") - before > 500 * KIB_PER_TOKEN << 10


def test_the_network_is_cut_in_the_middle_of_a_load_and_heals(hosts: Hosts) -> None:
    hosts.loads(hosts.prefill, 40)
    wanted = hosts.start_slowly(1800, first_page=100)
    started_s = time.monotonic()
    hosts.network.cut("prefill")

    # The survivors serve on, while the load still hopes and after it has failed.
    hosts.loads(hosts.other, 30, first_page=20)
    told = until_told(hosts.decode, lambda told: wanted.name in told.failed)
    assert time.monotonic() - started_s < BOUND_S
    ((kind, text, is_quarantined),) = told.failed[wanted.name]
    assert kind in ("timeout", "transfer"), text
    assert wanted.name not in told.received
    assert told.num_quarantined == int(is_quarantined), text
    hosts.loads(hosts.other, 30, first_page=30)
    if not is_quarantined:  # then nothing may write there any more
        hosts.decode.ask("poison", wanted, hosts.prefill.setup)

    # Healed: no restart of anything.
    hosts.network.heal("prefill")
    until(lambda: serves_again(hosts), "the source is not read again after the network has healed")
    if is_quarantined:
        until_told(hosts.decode, lambda told: told.settled.get(wanted.name) == 1 and not told.num_quarantined)
    else:
        assert hosts.share(wanted) == 0.0


def serves_again(hosts: Hosts) -> bool:
    """Whether a new request is loaded; one that fails says so."""
    wanted = hosts.offer(hosts.prefill, 50, first_page=50)
    hosts.order(hosts.prefill, wanted)
    told = until_told(hosts.decode, lambda told: wanted.name in told.received or wanted.name in told.failed)
    if wanted.name in told.failed:
        return False
    assert hosts.decode.ask("differs", wanted, hosts.prefill.setup) == {}
    return True


def test_a_source_that_cannot_be_reached_fails_the_handshake_and_is_met_once_it_can(hosts: Hosts) -> None:
    hosts.network.cut("prefill")
    wanted = hosts.offer(hosts.prefill, 20)
    started_s = time.monotonic()
    hosts.order(hosts.prefill, wanted)
    told = until_told(hosts.decode, lambda told: wanted.name in told.failed)
    assert time.monotonic() - started_s < BOUND_S
    ((kind, text, is_quarantined),) = told.failed[wanted.name]
    assert (kind, is_quarantined) == ("handshake", False), text
    hosts.network.heal("prefill")
    until(lambda: hosts.is_met(hosts.prefill, 20), "the source is not met again")
    hosts.loads(hosts.prefill, 20)


def test_a_reader_that_is_cut_off_loses_its_lease(hosts: Hosts) -> None:
    """It reads at the time, and its heartbeats no longer arrive; those of a reader that is not cut off keep a lease alive."""
    hosts.loads(hosts.prefill, 20)
    wanted = hosts.offer(hosts.prefill, 20, ttl_s=1.5)
    hosts.network.cut("decode")
    told = until_told(hosts.prefill, lambda told: len(told.freed.get(wanted.name, [])) == hosts.prefill.setup.tp)
    assert set(told.freed[wanted.name]) == {"expired"}
    assert set(hosts.prefill.ask("words", wanted.slot)) == {FREE}
    hosts.network.heal("decode")
    hosts.order(hosts.prefill, wanted)
    told = until_told(hosts.decode, lambda told: wanted.name in told.failed or wanted.name in told.received)
    assert told.failed[wanted.name][0][0] == "stale lease"
    hosts.loads(hosts.prefill, 20)


@pytest.mark.parametrize("load_s", [60.0])
@pytest.mark.parametrize(
    "discipline",
    [SLOW, ("netem", "delay", "50ms"), ("netem", "loss", "1%")],
    ids=["4 Mbit/s", "a delay of 50 ms", "a loss of 1 %"],
)
def test_a_slow_link_takes_its_time_and_is_exact(hosts: Hosts, discipline: tuple[str, ...]) -> None:
    """Longer than the lease, which only heartbeats keep alive."""
    try:
        hosts.network.limit("prefill", *discipline)
    except Unsupported as error:
        pytest.skip(f"this link cannot be had here: {error}")
    started_s = time.monotonic()
    hosts.loads(hosts.prefill, 1800, ttl_s=LEASE_S)
    if discipline is SLOW:
        assert time.monotonic() - started_s > LEASE_S
    hosts.loads(hosts.prefill, 37)
