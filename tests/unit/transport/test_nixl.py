"""What does the contract not show of the NIXL transport: leaks, silence, size, and life without NIXL?"""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.transport.fake_agent import Stuck

from kvreshard.plan.copies import CopyList, Page, PagedCopies
from kvreshard.transport import nixl
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, Transport, TransportError
from kvreshard.transport.memory import Fabric, MemoryTransport
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.nixl_agent import NixlAgent, NixlOptions
from kvreshard.transport.posting import Pace
from kvreshard.transport.regions import RegionTable, encode_metadata


def region(memory: NDArray[np.uint8]) -> MemoryRegion:
    return MemoryRegion(memory.ctypes.data, memory.nbytes)


def strided(local: NDArray[np.uint8], remote: NDArray[np.uint8], num_pieces: int, length: int) -> CopyList:
    """Equal copies, spread over both memories."""
    offset = np.arange(num_pieces, dtype=np.uint64) * np.uint64(local.nbytes // num_pieces)
    return CopyList.of(offset + np.uint64(remote.ctypes.data), offset + np.uint64(local.ctypes.data), length)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(  # a script of this file
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError, match=r"pip install nixl pyzmq"):
        NixlTransport()


def test_importing_the_module_does_not_import_nixl() -> None:
    found = run_script("import sys, kvreshard.transport.nixl; print([m for m in sys.modules if m.startswith('nixl')])")
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr


@pytest.mark.timeout(60)
def test_a_library_that_does_not_come_back_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Stuck()
    monkeypatch.setattr(nixl, "NixlAgent", lambda name, options: agent)
    transport = NixlTransport(options=NixlOptions(pace=Pace(call_s=0.2)))
    memory = np.zeros(4096, np.uint8)
    transport.register([region(memory)])
    near, far = (encode_metadata("nixl", name, RegionTable([region(memory)])) for name in ("near", "far"))
    transport.add_peer("near", near)
    assert transport.stuck() is None
    transport.notify("near", b"word")
    assert agent.is_inside.wait(60.0)

    def add() -> None:
        with contextlib.suppress(TransportError):
            transport.add_peer("far", far)

    adding = threading.Thread(target=add)
    adding.start()
    transfer = transport.post("near", Direction.READ, strided(memory, memory, 1, 16))
    transport.cancel(transfer)
    transport.notifications()
    transport.set_attentive(True)
    transport.remove_peer("near")  # while another waits to add one
    with pytest.raises(TransportError, match="near"):
        transport.post("near", Direction.READ, strided(memory, memory, 1, 16))
    adding.join(60.0)
    assert not adding.is_alive()
    with pytest.raises(TransportError, match=r"has not come back from 'send' within 0.2 s"):
        transport.add_peer("far", far)
    stuck = transport.stuck()
    assert stuck is not None
    assert stuck.call == "send"
    agent.gate.set()
    until(lambda: transport.stuck() is None)
    transport.add_peer("far", far)
    assert [entry for entry in agent.log if entry[0] in ("add", "remove")] == [
        ("add", "near"), ("remove", "near"), ("add", "far")
    ]  # fmt: skip
    transport.close()


def test_a_list_that_is_not_released_does_not_keep_a_peer_connected() -> None:
    """Its transfers settle once it is disconnected, and their pages are quarantined until then."""
    called: list[str] = []

    def release(handle: str) -> None:
        called.append(handle)
        if handle == "first":
            raise RuntimeError("NIXL_ERR_INVALID_PARAM")

    agent = object.__new__(NixlAgent)
    agent._peers = {"far"}
    agent._agent = SimpleNamespace(release_dlist_handle=release, remove_remote_agent=called.append)
    agent._prepared = {"far": {object(): ("first", "second"), object(): ("third", "fourth")}}  # type: ignore[dict-item]
    agent.remove_peer("far")
    assert called == ["first", "third", "fourth", "far"]
    assert not agent._prepared


@pytest.mark.nixl
class TestAgent:
    """With real agents."""

    def test_it_is_a_transport_with_a_unique_name(self) -> None:
        first, second = NixlTransport("same"), NixlTransport("same")
        try:
            assert isinstance(first, Transport)
            assert first.name != second.name
        finally:
            first.close()
            second.close()

    def test_it_is_silent_and_ends_with_the_interpreter(self) -> None:
        """Not closed on purpose: an engine that dies of an exception must not hang or print more than that."""
        result = run_script("from kvreshard.transport.nixl import NixlTransport; t = NixlTransport(); t.metadata()")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_its_thread_enters_a_device_before_it_makes_an_agent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entered: list[str] = []
        made: list[str] = []
        make = nixl.NixlAgent.__init__
        monkeypatch.setattr(
            nixl.NixlAgent, "__init__", lambda *args: (made.append(f"agent after {entered}"), make(*args))[1]
        )
        transport = NixlTransport("rank0", enter=lambda: entered.append(threading.current_thread().name))
        transport.close()
        assert entered == [transport.name]
        assert made == [f"agent after {entered}"]

    def test_a_device_that_cannot_be_entered_is_told(self) -> None:
        def enter() -> None:
            raise RuntimeError("no such device")

        with pytest.raises(RuntimeError, match="no such device"):
            NixlTransport(enter=enter)

    def test_a_wrong_backend_is_named(self) -> None:
        with pytest.raises(TransportError, match=r"no plugin 'NONE'; it has: .*UCX"):
            NixlTransport(options=NixlOptions(backend="NONE"))

    def test_backend_parameters_reach_ucx(self) -> None:
        with pytest.raises(TransportError, match=r"could not start backend UCX with .*NO_SUCH_DEVICE"):
            NixlTransport(options=NixlOptions(backend_params={"engine_config": "NET_DEVICES=NO_SUCH_DEVICE,TLS=tcp"}))

    def test_another_kind_of_transport_is_refused(self) -> None:
        transport = NixlTransport()
        try:
            with pytest.raises(TransportError, match="'memory', this side 'nixl'"):
                transport.add_peer("peer", MemoryTransport(Fabric()).metadata())
        finally:
            transport.close()

    def test_of_peers_that_are_added_together_all_are_known_or_none(self) -> None:
        near, far, other, late = (NixlTransport(name) for name in ("near", "far", "other", "late"))
        try:
            broken = encode_metadata("nixl", "broken", RegionTable(), b"nothing that NIXL reads")
            with pytest.raises(TransportError, match="could not load the metadata of broken"):
                near.add_peers({"far": far.metadata(), "broken": broken})
            with pytest.raises(TransportError, match="peer 'far' is unknown"):
                near.notify("far", b"word")
            near.add_peers({"far": far.metadata(), "other": other.metadata()})
            near.add_peer("late", late.metadata())
            for name, peer in (("far", far), ("other", other), ("late", late)):
                near.notify(name, b"word")
                until(peer.notifications)
        finally:
            for transport in (near, far, other, late):
                transport.close()

    def test_a_peer_answers_while_a_million_pieces_move(self) -> None:
        near, far = NixlTransport("near"), NixlTransport("far")
        here, there = np.zeros(16 << 20, dtype=np.uint8), np.full(16 << 20, 7, dtype=np.uint8)
        try:
            near.register([region(here)])
            far.register([region(there)])
            near.add_peer("far", far.metadata())
            far.add_peer("near", near.metadata())
            transfer = near.post("far", Direction.READ, strided(here, there, 1_000_000, 9), b"all")
            far.notify("near", b"ping")
            until(near.notifications)
            # A second or two of work was posted in slices of 20 ms: the word came in between.
            assert transfer.error is None
            assert transfer.seconds is None
            near.notify("far", b"pong")
            until(far.notifications)
            assert transfer.seconds is None
            transfer.wait(60.0)
            assert int(np.count_nonzero(here)) == 9_000_000
        finally:
            near.close()
            far.close()

    def test_a_page_is_checked_against_the_regions_of_now(self) -> None:
        """What was found of it is of use no longer when a region has gone, or the peer has come back with others."""
        near, far, again = NixlTransport("near"), NixlTransport("far"), NixlTransport("far")
        here, there = np.zeros(8192, dtype=np.uint8), np.full(8192, 7, dtype=np.uint8)
        page = Page.of(
            [there.ctypes.data, there.ctypes.data + 4096],
            [here.ctypes.data, here.ctypes.data + 4096],
            5,
            (8, 8),
            (9, 9),
        )

        def read(page: Page, number: int) -> Transfer:
            pages = np.array([number])
            return near.post("far", Direction.READ, PagedCopies(0, 0, page, pages, pages))

        try:
            near.register([region(here[:4096]), region(here[4096:])])
            far.register([region(there)])
            again.register([region(there[:4096])])
            near.add_peer("far", far.metadata())
            read(page, 0).wait(30.0)
            assert len(near._page_rows) == 1
            near.deregister([region(here[4096:])])
            with pytest.raises(TransportError, match="copy 1 of 2: local"):
                read(page, 0)
            near.register([region(here[4096:])])
            read(page, 1).wait(30.0)
            near.remove_peer("far")
            near.add_peer("far", again.metadata())
            with pytest.raises(TransportError, match="copy 1 of 2: remote"):
                read(page, 0)
            assert (int(np.count_nonzero(here[:4096])), int(np.count_nonzero(here[4096:]))) == (10, 10)
            # What is known of a page goes with it.
            del page
            gc.collect()
            assert len(near._page_rows) == 0
        finally:
            for transport in (near, far, again):
                transport.close()

    def test_a_callback_may_post_and_notify(self) -> None:
        near, far = NixlTransport("near"), NixlTransport("far")
        here, there = np.zeros(4096, dtype=np.uint8), np.full(4096, 7, dtype=np.uint8)
        followers: list[Transfer] = []
        try:
            near.register([region(here)])
            far.register([region(there)])
            near.add_peer("far", far.metadata())
            copies = strided(here, there, 4, 5)

            def follow(_transfer: Transfer) -> None:
                near.notify("far", b"first")
                followers.append(near.post("far", Direction.READ, copies))

            near.post("far", Direction.READ, copies).add_done_callback(follow)
            until(lambda: followers)
            followers[0].wait(30.0)
        finally:
            near.close()
            far.close()

    @pytest.mark.parametrize("num_cycles", [30, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.long])])
    def test_whole_lives_leak_nothing(self, num_cycles: int) -> None:
        """Some 70 ms a cycle. NIXL 1.5.1 leaks one socket per remove_peer and add_peer of a peer that lives on, so
        that both sides' ends are part of a cycle here.
        """
        here, there = np.zeros(1 << 20, dtype=np.uint8), np.full(1 << 20, 7, dtype=np.uint8)
        counts: list[tuple[int, int]] = []

        def count() -> tuple[int, int]:
            """File descriptors and threads."""
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        resident: list[int] = []
        for _cycle in range(num_cycles):
            self._whole_life(here, there)
            counts.append(count())
            with open("/proc/self/statm") as statm:
                resident.append(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        fewest = [min(column) for column in zip(*counts[:6], strict=True)]
        until(
            lambda: all(now <= low for now, low in zip(count(), fewest, strict=True))
        )  # a joined thread lingers in /proc
        # Measured over 200 cycles: within 6 MB up and down, without a trend. One leaked agent has some 0.5 MB.
        assert resident[-1] - resident[5] < 16e6

    @staticmethod
    def _whole_life(here: NDArray[np.uint8], there: NDArray[np.uint8]) -> None:
        near, far = NixlTransport("near"), NixlTransport("far")
        near.register([region(here)])
        far.register([region(there)])
        near.add_peer("far", far.metadata())
        far.add_peer("near", near.metadata())
        near.post("far", Direction.READ, strided(here, there, 100, 50), b"x").wait(30.0)
        until(far.notifications)
        near.remove_peer("far")
        far.remove_peer("near")
        near.deregister([region(here)])
        far.deregister([region(there)])
        near.close()
        far.close()
