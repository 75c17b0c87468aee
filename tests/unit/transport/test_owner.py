"""Does the owner thread keep its promises when slices settle late, fail, or never settle?

The agent is a fake whose slices settle when the test says so.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.unit.transport.fake_agent import FakeAgent, Stuck
from tests.work import count_bytecodes

from kvreshard.model.logs import FIRST_LINES
from kvreshard.plan.copies import CopyList
from kvreshard.transport import work_queue
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, TransferState, TransportError
from kvreshard.transport.owner import Owner
from kvreshard.transport.posting import Pace, SlicedTransfer
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import FIRST_BUDGET_BYTES, Cursor, make_rows
from kvreshard.transport.watchdog import MAX_GAP_S, Agent, Watchdog

SPACE = RegionTable([MemoryRegion(0, 2**40)])
PACE = Pace(slow_s=0.001, close_s=0.05, max_in_flight=3)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def owner(agent: FakeAgent) -> Iterator[Owner]:
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, PACE, lambda: agent.now_s)
    yield owner
    owner.stop()


def make_sliced(num_slices: int, peer: str = "bob", notify: bytes | None = b"done") -> SlicedTransfer:
    """A transfer of that many slices: each copy's cost is most of a budget."""
    size = FIRST_BUDGET_BYTES // 3
    local = [index * size for index in range(2 * num_slices)]
    copies = CopyList.of(local, local, size)
    transfer = Transfer(peer, Direction.READ, copies, time.monotonic)
    return SlicedTransfer(transfer, peer, Cursor(make_rows(copies, Direction.READ, SPACE, SPACE, "remote")), notify)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"


def is_done(sliced: SlicedTransfer) -> bool:
    return sliced.transfer.state is TransferState.DONE


def turns(owner: Owner, count: int = 3) -> None:
    """Let the loop go around, so that what must not happen has had its chance."""
    for _ in range(count):
        owner.call(lambda _agent: None)


def test_the_notification_follows_the_last_slice(owner: Owner, agent: FakeAgent) -> None:
    sliced = make_sliced(3)
    owner.post(sliced)
    until(lambda: agent.num_posted == 3)
    for number in (2, 0):
        agent.settle(number)
    until(lambda: len(agent.called("release")) == 2)
    turns(owner)
    assert agent.called("send") == []
    assert sliced.transfer.state is TransferState.PENDING
    agent.settle(1)
    sliced.transfer.wait(10.0)
    assert agent.called("send") == [("send", "bob", b"done")]
    assert len(agent.called("release")) == 3
    assert len(agent.threads) == 1


def test_a_failed_slice_waits_for_its_siblings_and_posts_no_more(owner: Owner, agent: FakeAgent) -> None:
    sliced = make_sliced(6)
    owner.post(sliced)
    until(lambda: agent.num_posted == PACE.max_in_flight)
    agent.fail(1)
    until(lambda: len(agent.called("release")) == 1)
    turns(owner)
    assert sliced.transfer.state is TransferState.PENDING
    agent.settle(0)
    agent.fail(2)
    with pytest.raises(TransportError, match="slice 1 broke"):
        sliced.transfer.wait(10.0)
    assert agent.num_posted == PACE.max_in_flight
    assert agent.called("send") == []
    assert len(agent.called("release")) == 3


def test_pieces_of_a_failed_slice_are_over_before_its_transfer_is(owner: Owner, agent: FakeAgent) -> None:
    """NIXL shares a slice's copies over connections, and gives them all up when one has failed: the others may still write."""
    sliced, sibling, other = make_sliced(1), make_sliced(1), make_sliced(1, "carol")
    seen: list[int] = []
    sliced.transfer.add_done_callback(lambda _: seen.append(len(agent.called("remove"))))
    for one in (sliced, sibling, other):
        owner.post(one)
    until(lambda: agent.num_posted == 3)
    slices = {number: peer for _, peer, number in agent.called("start")}
    of_bob = [number for number, peer in slices.items() if peer == "bob"]
    agent.fail(of_bob[0])
    until(lambda: len(agent.called("release")) == 1)
    turns(owner)
    assert (seen, agent.called("remove")) == ([], [])
    for number in (*of_bob[1:], *(number for number, peer in slices.items() if peer == "carol")):
        agent.settle(number)
    for failed in (sliced, sibling):
        with pytest.raises(TransportError, match=r"broke|was disconnected"):
            failed.transfer.wait(10.0)
    other.transfer.wait(10.0)
    assert (seen, agent.called("remove")) == ([1], [("remove", "bob")])
    late = make_sliced(1)
    owner.post(late)
    with pytest.raises(TransportError, match="remove it and add it again"):
        late.transfer.wait(10.0)
    owner.remove_peer("bob", TransportError("removed"))
    turns(owner)
    assert len(agent.called("remove")) == 1
    owner.add_peers({"bob": b""})
    again = make_sliced(1)
    owner.post(again)
    until(lambda: agent.num_posted == 4)
    agent.settle(3)
    again.transfer.wait(10.0)


def test_a_peer_that_was_removed_before_its_slice_failed_can_be_added_again(owner: Owner, agent: FakeAgent) -> None:
    sliced, again = make_sliced(1), make_sliced(1)
    owner.post(sliced)
    until(lambda: agent.num_posted == 1)
    owner.remove_peer("bob", TransportError("removed"))
    agent.fail(0)
    with pytest.raises(TransportError, match="removed"):
        sliced.transfer.wait(10.0)
    owner.add_peers({"bob": b""})
    owner.post(again)
    until(lambda: agent.num_posted == 2 or again.transfer.state is not TransferState.PENDING)
    agent.settle(1)
    again.transfer.wait(10.0)
    owner.remove_peer("bob", TransportError("removed again"))
    turns(owner)
    assert len(agent.called("remove")) == 2


def test_a_refused_post_fails_the_transfer(owner: Owner, agent: FakeAgent) -> None:
    agent.refuse_posts = True
    sliced = make_sliced(2)
    owner.post(sliced)
    with pytest.raises(TransportError, match=r"'bob'.*the fake refuses.*remove it"):
        sliced.transfer.wait(10.0)


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("start", "failed: MemoryError full"),
        ("is_done", "failed: MemoryError full"),
        ("send", "failed: MemoryError full"),
        ("release", None),
        ("receive", None),
        ("remove_peer", None),
    ],
)
def test_a_surprise_from_the_agent_fails_what_it_belongs_to_and_nothing_else(
    owner: Owner, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, call: str, end: str | None
) -> None:
    real, surprises = getattr(agent, call), [MemoryError("full")]

    def surprise(*arguments: object) -> object:
        if surprises:
            raise surprises.pop()
        return real(*arguments)

    for number in range(4):
        agent.settle(number)
    monkeypatch.setattr(agent, call, surprise)
    first, second = make_sliced(1), make_sliced(1, "carol")
    owner.post(first)
    if end is None:
        first.transfer.wait(10.0)
    else:
        with pytest.raises(TransportError, match=f"'bob'.*{end}"):
            first.transfer.wait(10.0)
    owner.remove_peer("bob", TransportError("removed"))
    until(lambda: not surprises)
    owner.post(second)
    second.transfer.wait(10.0)


def test_notifications_that_can_never_be_read_do_not_fill_the_log(
    owner: Owner, agent: FakeAgent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried some hundred times a second."""
    looks = list[int]()

    def receive() -> list[tuple[str, bytes]]:
        looks.append(0)
        raise TransportError("the backend is gone")

    monkeypatch.setattr(agent, "receive", receive)
    until(lambda: len(looks) > 3 * FIRST_LINES)
    lines = [record for record in caplog.records if "could not be read" in record.message]
    assert len([line for line in lines if line.levelname == "WARNING"]) == FIRST_LINES


def test_slices_in_flight_are_bounded(owner: Owner, agent: FakeAgent) -> None:
    sliced = make_sliced(10)
    owner.post(sliced)
    for number in range(10):
        until(lambda number=number: agent.num_posted > number)
        turns(owner)
        assert agent.num_posted <= number + PACE.max_in_flight
        agent.settle(number)
    sliced.transfer.wait(10.0)


def test_a_small_job_does_not_queue_behind_a_large_one(owner: Owner, agent: FakeAgent) -> None:
    large, small = make_sliced(50), make_sliced(1)
    owner.post(large)
    until(lambda: agent.num_posted == PACE.max_in_flight)
    owner.post(small)
    turns(owner)
    agent.settle(0)
    agent.settle(1)
    until(lambda: agent.num_posted == PACE.max_in_flight + 2)
    agent.settle(PACE.max_in_flight)
    agent.settle(PACE.max_in_flight + 1)
    small.transfer.wait(10.0)


def test_a_stopped_peer_does_not_hold_up_the_others(owner: Owner, agent: FakeAgent) -> None:
    stopped, alive = make_sliced(50, "bob"), make_sliced(8, "cat")
    owner.post(stopped)
    until(lambda: agent.num_posted == PACE.max_in_flight)
    owner.post(alive)
    for number in range(PACE.max_in_flight, PACE.max_in_flight + 8):
        until(lambda number=number: agent.num_posted > number)
        agent.settle(number)
    alive.transfer.wait(10.0)
    assert stopped.transfer.state is TransferState.PENDING
    assert agent.num_posted == PACE.max_in_flight + 8


@pytest.mark.parametrize("max_bytes", [1, 10 << 20, 40 << 20])
def test_bytes_in_flight_to_a_peer_are_bounded_and_one_piece_goes_alone(agent: FakeAgent, max_bytes: int) -> None:
    """Pieces of a third of 32 MiB: more than the bound in the first two cases, where they go one by one."""
    pace = Pace(slow_s=0.001, close_s=0.05, max_in_flight=3, max_in_flight_bytes=max_bytes)
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, pace, lambda: agent.now_s)
    slice_ = FIRST_BUDGET_BYTES // 3
    transfers = [make_sliced(4, "bob"), make_sliced(4, "cat"), make_sliced(4, "bob")]
    for sliced in transfers:
        owner.post(sliced)
    for settled in range(sum(sliced.transfer.num_descriptors for sliced in transfers)):
        turns(owner)
        for peer in ("bob", "cat"):
            flying = [size for name, size in agent.posted_bytes[settled:] if name == peer]
            assert sum(flying) <= max(max_bytes, slice_)
        until(lambda number=settled: agent.num_posted > number or all(map(is_done, transfers)))
        if all(map(is_done, transfers)):
            break
        agent.settle(settled)
        until(lambda number=settled: len(agent.called("release")) > number)
    owner.stop()
    assert all(map(is_done, transfers))
    assert sum(size for _, size in agent.posted_bytes) == sum(sliced.transfer.num_bytes for sliced in transfers)


def test_a_removed_peer_stays_connected_until_its_slices_settle(owner: Owner, agent: FakeAgent) -> None:
    sliced = make_sliced(9)
    owner.post(sliced)
    until(lambda: agent.num_posted == PACE.max_in_flight)
    owner.remove_peer("bob", TransportError("removed"))
    turns(owner)
    assert agent.called("remove") == []
    with pytest.raises(TransportError, match="in flight"):
        owner.add_peers({"bob": b""})
    for number in range(PACE.max_in_flight):
        agent.settle(number)
    with pytest.raises(TransportError, match="removed"):
        sliced.transfer.wait(10.0)
    assert agent.called("remove") == [("remove", "bob")]
    owner.add_peers({"bob": b""})
    assert agent.num_posted == PACE.max_in_flight


def test_stop_gives_up_a_stuck_slice_after_the_agent_is_closed(owner: Owner, agent: FakeAgent) -> None:
    sliced = make_sliced(9)
    order: list[str] = []
    sliced.transfer.add_done_callback(lambda _transfer: order.append("closed" if agent.called("close") else "open"))
    owner.post(sliced)
    until(lambda: agent.num_posted == PACE.max_in_flight)
    owner.stop()
    with pytest.raises(TransportError, match="closed"):
        sliced.transfer.wait(0.0)
    assert order == ["closed"]
    assert len(agent.called("release")) == PACE.max_in_flight
    with pytest.raises(TransportError, match="closed"):
        owner.post(make_sliced(1))
    with pytest.raises(TransportError, match="closed"):
        owner.call(lambda _agent: None)
    owner.stop()


def test_a_callback_may_post_and_may_raise(owner: Owner, agent: FakeAgent) -> None:
    first, second = make_sliced(1), make_sliced(1)

    def follow(_transfer: Transfer) -> None:
        owner.post(second)
        raise ValueError("a bad callback")

    first.transfer.add_done_callback(follow)
    owner.post(first)
    until(lambda: agent.num_posted == 1)
    agent.settle(0)
    agent.settle(1)
    second.transfer.wait(10.0)


def test_an_agent_that_cannot_be_made_is_the_callers_error() -> None:
    def broken() -> Agent:
        raise TransportError("no such device")

    with pytest.raises(TransportError, match="no such device"):
        Owner("fake", broken, lambda _peer, _payload: None, PACE)


def test_an_owner_at_rest_looks_up_when_peers_are_expected(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's transfer settles when this side polls: the first poll must not wait for the end of a long rest."""
    polls: list[None] = []
    monkeypatch.setattr(agent, "receive", lambda: polls.append(None) or [])
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, Pace(slow_s=1000.0, linger_s=0.0))
    try:
        until(lambda: len(polls) == 1)
        owner.attend(True)
        until(lambda: len(polls) > 1)
    finally:
        owner.stop()
    owner.attend(True)  # nobody will come, and that is no error


def test_peers_are_added_together_and_others_are_heard_meanwhile(owner: Owner, agent: FakeAgent) -> None:
    """Each takes 11 ms of the fake's clock: after two of them, more than a slice, the owner looks up."""
    owner.add_peers(dict.fromkeys("abcde", b""))
    adds = [entry for entry in agent.log if entry[0] in ("add", "look")]
    assert adds[:7] == [
        ("add", "a"), ("add", "b"), ("look",), ("add", "c"), ("add", "d"), ("look",), ("add", "e")
    ]  # fmt: skip


def test_a_peer_that_cannot_be_read_leaves_none_of_its_company(owner: Owner, agent: FakeAgent) -> None:
    with pytest.raises(TransportError, match="cannot read bob"):
        owner.add_peers({"ann": b"", "bob": b"unreadable", "carol": b""})
    assert [entry for entry in agent.log if entry[0] in ("add", "remove")] == [("add", "ann"), ("remove", "ann")]


def test_peers_that_come_and_go_do_not_keep_the_pace_fast(owner: Owner, agent: FakeAgent) -> None:
    """Whoever meets an engine has no transfer yet: 100 polls after each meeting were for nothing."""
    agent.now_s += 100.0
    assert owner._rest_s() == PACE.slow_s
    owner.add_peers({"ann": b""})
    owner.remove_peer("ann", TransportError("removed"))
    owner.call(lambda agent: agent.metadata())
    assert owner._rest_s() == PACE.slow_s
    owner.send("bob", b"word")
    until(lambda: bool(agent.called("send")))
    assert owner._rest_s() == PACE.fast_s


FEW, MANY = 10, 1000


def costs_on_its_thread(agent: FakeAgent, count: int) -> list[int]:
    """Bytecodes of a look, of one more transfer, of a cancel and of a slice that settles, while `count` transfers wait with two peers."""
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, PACE, lambda: agent.now_s)
    waiting = [make_sliced(1, peer) for peer in ("bob", "carol") for _ in range(count)]
    for sliced in waiting:
        owner.post(sliced)
    until(lambda: agent.num_posted == 2 * PACE.max_in_flight)
    late = make_sliced(1, "bob")

    def measure(_: Agent) -> list[int]:
        found = [count_bytecodes(owner._look)]
        owner.post(late)
        found.append(count_bytecodes(lambda: owner._work.run(0.0)))
        owner.cancel(waiting[-1].transfer)
        found.append(count_bytecodes(lambda: owner._work.run(0.0)))
        agent.settle(0)
        found.append(count_bytecodes(owner._look))
        return found

    found = owner.call(measure)
    owner.stop()
    return found


def test_nothing_costs_more_where_more_transfers_wait() -> None:
    few, many = (costs_on_its_thread(FakeAgent(), count) for count in (FEW, MANY))
    assert all(there <= 1.2 * here + 20 for here, there in zip(few, many, strict=True)), (few, many)


def test_peers_take_turns_however_much_waits_for_one(owner: Owner, agent: FakeAgent) -> None:
    for _ in range(50):
        owner.post(make_sliced(1, "bob"))
    until(lambda: agent.num_posted == PACE.max_in_flight)
    alone = make_sliced(1, "carol")
    owner.post(alone)
    until(lambda: agent.num_posted == PACE.max_in_flight + 1)
    agent.settle(PACE.max_in_flight)
    alone.transfer.wait(10.0)


def test_a_call_that_does_not_come_back_is_told_to_whoever_waits(caplog: pytest.LogCaptureFixture) -> None:
    agent, now_s = Stuck(), [0.0]

    def clock() -> float:
        now_s[0] += 0.001
        return now_s[0]

    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, PACE, clock)
    assert owner.watchdog.stuck() is None
    owner.send("bob", b"word")
    assert agent.is_inside.wait(60.0)
    assert owner.watchdog.stuck() is None
    for _ in range(int(PACE.call_s / MAX_GAP_S) + 1):
        now_s[0] += 100.0  # a process that was stopped has not waited
        owner.watchdog.stuck()
    stuck = owner.watchdog.stuck()
    assert stuck is not None
    assert (stuck.call, "'send' within 10 s" in stuck.text) == ("send", True)
    with pytest.raises(TransportError, match=r"'send' within 10 s.*restart this engine"):
        owner.call(lambda agent: agent.metadata())
    owner.remove_peer("bob", TransportError("removed"))  # these wait for nothing
    transfer = make_sliced(1)
    owner.post(transfer)
    owner.cancel(transfer.transfer)
    lines = [record.getMessage() for record in caplog.records if "has not come back" in record.getMessage()]
    assert len(lines) == 1
    agent.gate.set()
    until(lambda: owner.watchdog.stuck() is None and bool(agent.called("remove")))
    assert owner.call(lambda agent: agent.metadata()) == b"fake"
    assert "'send' has come back after all" in caplog.text
    owner.stop()


def test_a_peer_that_nobody_waits_for_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was being loaded when whoever wanted it gave up: it could not be added again."""
    monkeypatch.setattr(work_queue, "LOOK_S", 0.01)
    agent, now_s = Stuck(), [0.0]

    def clock() -> float:
        now_s[0] += 0.6
        return now_s[0]

    def add_peer(name: str, native: bytes) -> None:
        agent.send(name, b"")
        FakeAgent.add_peer(agent, name, native)

    agent.add_peer = add_peer  # type: ignore[method-assign]
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, PACE, clock)
    with pytest.raises(TransportError, match="'add_peer' within 10 s"):
        owner.add_peers({"ann": b""})
    agent.gate.set()
    until(lambda: bool(agent.called("remove")))
    owner.add_peers({"ann": b""})
    owner.stop()
    assert [entry for entry in agent.log if entry[0] in ("add", "remove")] == [
        ("add", "ann"), ("remove", "ann"), ("add", "ann")
    ]  # fmt: skip


def test_an_agent_that_is_never_made_is_an_error() -> None:
    gate = threading.Event()

    def make() -> Agent:
        assert gate.wait(60.0)
        raise TransportError("late")

    with pytest.raises(TransportError, match=r"no agent was made within 0.06 s"):
        Owner("fake", make, lambda _peer, _payload: None, Pace(call_s=0.001))
    gate.set()


def test_an_owner_that_is_stuck_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    agent = Stuck()
    owner = Owner("fake", lambda: agent, lambda _peer, _payload: None, PACE, lambda: agent.now_s)
    owner.send("bob", b"word")
    assert agent.is_inside.wait(60.0)
    owner.stop()
    assert "its thread is left behind" in caplog.text
    agent.gate.set()
    owner._thread.join(60.0)


def test_a_process_that_was_stopped_is_not_stuck() -> None:
    now_s = [0.0]
    watchdog = Watchdog("fake", 10.0, lambda: now_s[0])
    watchdog.begin("start")
    assert watchdog.stuck() is None
    now_s[0] += 3600.0
    assert watchdog.stuck() is None
    watchdog.end()
    watchdog.begin("start")
    for _ in range(9):
        now_s[0] += 1.0
        assert watchdog.stuck() is None
    watchdog.end()
    for call, seconds in (("start", 10), ("register", 600)):
        watchdog.begin(call)
        waited = [watchdog.stuck() for _ in range(2 * seconds) if (now_s.append(now_s.pop() + 1.0)) is None]
        assert waited.index(next(filter(None, waited))) == seconds
        watchdog.end()


def test_a_torn_transfer_whose_peer_stays_connected_does_not_settle(
    owner: Owner, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pieces of its slice may still land."""

    def refuse(name: str) -> None:
        raise TransportError("the peer was not disconnected")

    monkeypatch.setattr(agent, "remove_peer", refuse)
    sliced = make_sliced(1)
    owner.post(sliced)
    until(lambda: agent.num_posted == 1)
    agent.fail(0)
    turns(owner, 10)
    assert sliced.transfer.state is TransferState.PENDING
