"""Each way in which a load that follows its prefill could go wrong, by itself."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.faulty_memory import Fault
from tests.unit.session.prefills import TRANSFER, LocalFollower, Prefill, rendezvous
from tests.unit.session.world import KEY, OPTIONS, SLOT, WORD, World, collect, make_world, meet

import kvreshard.session.rendezvous as rendezvous_module
from kvreshard.model.changed import replace
from kvreshard.model.errors import KvReshardError
from kvreshard.model.tables import PageTable
from kvreshard.plan.copies import CopyList
from kvreshard.plan.reads import ReadPlan
from kvreshard.plan.stage import Batch
from kvreshard.session.commands import EndpointOptions, Load, Revoke
from kvreshard.session.early_job import MAX_PAGES, EarlyJob, _Cursors, _Life
from kvreshard.session.handshake_messages import TransferQuestion
from kvreshard.session.lease import Lease, LeaseTable
from kvreshard.session.progress import Progress, ProgressBoard, StepProgress
from kvreshard.session.pull import TransferStats
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.seal import SealError
from kvreshard.session.statement import Answer, PageList, Statement, read_reply


class Followed:
    """A prefill of 40 tokens in a source of two ranks, and a load that follows it."""

    def __init__(self, options: EndpointOptions = OPTIONS, seed: int = 0, stages: tuple[int, ...] = (0, 0)) -> None:
        self.shown = rendezvous()
        self.lost: list[bool] = []
        self.world: World = make_world(
            2, 1, options, follower=lambda: LocalFollower(self.shown, self.lost), stages=stages
        )
        self.prefill = Prefill(self.world, self.shown, 40, Random(seed))
        self.prefill.begin()

    def order(self) -> Load:
        self.load = self.prefill.order()
        self.go(3)
        return self.load

    def go(self, times: int = 8) -> None:
        """Everybody has some turns, and what is posted settles."""
        for _ in range(times):
            meet(self.world)
            self.world.turn(1)
            self.world.fabric.step(4)
            self.world.clock.now_s += 0.03

    def compute(self) -> None:
        """All of the prompt, on all ranks."""
        for rank in self.world.src.endpoints:
            while self.prefill.go_on(rank):
                pass

    def end(self) -> tuple[set[str], dict[str, str]]:
        received, failed, _ = collect(self.world.dst)
        return received, {name: failure.kind for name, failure in failed.items()}

    def is_exact(self) -> bool:
        expected = self.prefill.expected(self.load)
        return all(np.array_equal(self.world.dst.memory[place], held) for place, held in expected.items())


@pytest.fixture
def followed() -> Followed:
    return Followed()


def test_a_load_ends_when_its_prefill_is_published_and_not_before(followed: Followed) -> None:
    """All is final and read before. A step may overwrite pages of a prefill that it preempts a moment before it clears the word."""
    followed.order()
    followed.compute()
    followed.go()
    assert followed.end() == (set(), {})
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert collect(followed.world.src)[2] == {"r"}


def test_a_word_is_cleared_before_the_command_returns(followed: Followed) -> None:
    """Trap 1: the caller overwrites the pages next, and no turn of the session lies between."""
    lease = followed.prefill.lease
    assert lease is not None
    tables = followed.world.src.tables.values()
    assert {table[lease.slot] for table in tables} == {lease.word}
    followed.prefill.tell(Revoke(lease))
    assert {table[lease.slot] for table in tables} == {0}
    assert {int(table.progress[lease.slot]) for table in tables} == {0}


def test_what_was_read_of_a_former_life_is_forgotten(followed: Followed) -> None:
    """Trap 2: reading begins again under the next word, on other pages."""
    followed.order()
    for rank in followed.world.src.endpoints:
        for _ in range(5):
            followed.prefill.go_on(rank)
    followed.go()
    followed.prefill.take_back()
    followed.go()
    assert followed.end() == (set(), {})
    followed.prefill.begin()
    followed.compute()
    followed.go(12)
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert followed.is_exact()


def test_a_life_that_ends_at_the_very_end_is_noticed(followed: Followed) -> None:
    """Everything was read, and the prefill was published; the lease word is gone when it is read."""
    followed.order()
    followed.compute()
    followed.prefill.publish()
    followed.world.faults[-1] = Fault(delay_steps=2)
    (job,) = followed.world.dst.endpoints[0]._jobs
    for _ in range(200):
        if job.state == "reading":  # its words are being read, and nothing else
            break
        followed.world.clock.now_s += 0.03
        followed.world.fabric.step(1)
        followed.world.turn(1)
    assert job.state == "reading"
    followed.prefill.take_back()
    followed.world.faults[-1] = Fault()
    followed.go(6)
    assert followed.end() == (set(), {"d": "stale lease"})


def test_a_hit_is_final_after_the_own_first_step() -> None:
    """Trap 3: nothing is said of tokens before a request's first step, although its blocks are known."""
    table = LeaseTable(64)
    board = ProgressBoard(table)
    table[SLOT] = WORD
    board.begin([StepProgress(SLOT, WORD, 32, 40)])
    assert int(table.progress[SLOT]) == 0
    board.layer(1)
    assert Progress.unpack(int(table.progress[SLOT])) == (32, 40, 1)
    board.end()
    assert Progress.unpack(int(table.progress[SLOT])) == (40, 40, 0)


def test_zeroing_spares_what_was_read_before(followed: Followed) -> None:
    """Trap 4: new pages are zeroed for the whole request, once, where no copy writes."""
    load = followed.order()
    assert len(load.transfer.dst_new_pages)
    followed.compute()
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert followed.is_exact()  # the last page too, of which 4 of 6 tokens were read


def test_the_time_without_news_is_bounded_and_not_the_prefill() -> None:
    """Trap 6: a prefill may take longer than a load may."""
    followed = Followed(replace(OPTIONS, load_timeout_s=10.0))
    followed.order()
    ranks = list(followed.world.src.endpoints)
    for _ in range(4):
        followed.world.clock.now_s += 8.0
        followed.prefill.go_on(ranks[0])  # the other rank says nothing
        followed.go(2)
    assert followed.end() == (set(), {})
    for _ in range(3):
        followed.world.clock.now_s += 8.0
        followed.world.turn(1)
    assert followed.end() == (set(), {"d": "timeout"})


def test_a_prefill_that_ends_without_pages_fails_the_load(followed: Followed) -> None:
    """Trap 7: the listener says so."""
    followed.order()
    followed.prefill.take_back()
    followed.shown.end(TRANSFER, "r", "aborted")
    followed.go()
    assert followed.end() == (set(), {"d": "prefill"})


def test_a_source_that_is_followed_answers_fast(followed: Followed) -> None:
    """Trap 8: its agent would poll slowly while it only computes."""
    endpoint = followed.world.src.endpoints[0]
    followed.world.src.turn(1)
    assert not endpoint._is_attentive
    endpoint.begin_step([StepProgress(0, 1, 0, 8)])
    followed.world.src.turn(1)
    assert endpoint._is_attentive
    endpoint.begin_step([])
    followed.world.src.turn(1)
    assert not endpoint._is_attentive


def test_each_source_rank_counts_for_its_own_part() -> None:
    """Trap 9: one is ready, the other has not begun."""
    followed = Followed()
    followed.order()
    while followed.prefill.go_on(0):
        pass
    followed.go()
    assert followed.end() == (set(), {})
    while followed.prefill.go_on(1):
        pass
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert followed.is_exact()


def test_layers_that_have_ended_are_final_and_no_other(followed: Followed) -> None:
    load = followed.order()
    (job,) = followed.world.dst.endpoints[0]._early._jobs.values()
    assert job.peer is not None
    parts = job.peer.parts.parts
    cursors = _Cursors(parts, load.transfer.intervals, job.peer.layout)
    layers = {part.layer for part in parts}
    assert None not in layers
    for num_layers in range(len(layers) + 1):
        told = dict.fromkeys({part.src_rank for part in parts}, Progress(8, 24, num_layers))
        expected = [24 if part.layer is not None and part.layer < num_layers else 8 for part in parts]
        assert cursors.final(told).tolist() == expected
    assert cursors.final({}).tolist() == [0] * len(parts)  # nothing is known


def test_the_time_of_reading_leaves_out_the_wait_for_the_prefill(followed: Followed) -> None:
    followed.order()
    for rank in followed.world.src.endpoints:
        while followed.prefill.go_on(rank):
            followed.go()
            followed.world.clock.now_s += 3.0
    followed.prefill.publish()
    followed.go()
    (endpoint,) = followed.world.dst.endpoints.values()
    (moved,) = endpoint.collect().received.values()
    assert moved.num_early_bytes > 0
    assert 0 < moved.early_s < 3.0


def test_an_ordinary_load_goes_first(followed: Followed) -> None:
    """What nobody waits for yet is read when no other load is under way."""
    followed.order()
    (endpoint,) = followed.world.dst.endpoints.values()
    endpoint._jobs.num_awaited += 1
    for rank in followed.world.src.endpoints:
        for _ in range(3):
            followed.prefill.go_on(rank)
    before = {place: held.copy() for place, held in followed.world.dst.memory.items()}
    followed.go()
    assert all(np.array_equal(held, followed.world.dst.memory[place]) for place, held in before.items())
    endpoint._jobs.num_awaited -= 1
    followed.compute()
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert followed.is_exact()


def test_a_source_without_early_fields_is_read_at_the_end() -> None:
    followed = Followed()
    followed.world.src.is_early = False
    followed.order()
    followed.compute()
    followed.go()
    assert followed.end() == (set(), {})
    followed.prefill.publish()
    followed.go()
    assert followed.end() == ({"d"}, {})
    assert followed.is_exact()


def test_progress_beyond_the_prompt_or_backwards_reads_no_other_pages(followed: Followed) -> None:
    """What a hostile source says of itself brings its own pages at most: those of the statement, up to the load's end."""
    load = followed.order()
    lease = followed.prefill.lease
    assert lease is not None
    for table in followed.world.src.tables.values():
        table.progress[lease.slot] = Progress(2**28 - 1, 2**28 - 1, 255).pack()
    followed.go(4)
    for table in followed.world.src.tables.values():
        table.progress[lease.slot] = Progress(3, 3, 0).pack()
    followed.go(4)
    outside = [held for place, held in followed.world.dst.memory.items()]
    assert outside
    assert load.transfer.dst_tables
    received, failed = followed.end()
    assert not failed
    assert received in (set(), {"d"})


def test_pages_outside_the_pool_fail_the_load(followed: Followed) -> None:
    followed.order()
    lease = followed.prefill.lease
    assert lease is not None
    followed.prefill.pages = [10**6] * 10
    followed.prefill.list_pages(40)
    for endpoint in followed.world.src.endpoints.values():
        endpoint.board.begin([StepProgress(lease.slot, lease.word, 0, 40)])
        endpoint.board.end()
    followed.go()
    assert followed.end() == (set(), {"d": "request"})


def test_a_statement_that_was_not_sealed_fails_the_load(followed: Followed) -> None:
    followed.order()
    followed.shown._key = bytes(32)
    followed.prefill.list_pages(40)
    followed.go()
    assert followed.end() == (set(), {"d": "seal"})


def test_another_prefill_under_the_id_fails_the_load(followed: Followed) -> None:
    followed.order()
    followed.prefill.take_back()
    followed.shown.end(TRANSFER, "r", "aborted")
    assert followed.shown.register(TRANSFER, "other")
    assert followed.shown.begin(TRANSFER, "other", Statement("prefill", "", "other", 1, 2, 40, {}, False, b"{}"))
    followed.go()
    assert set(followed.end()[1].values()) <= {"prefill", "seal"}


def test_two_prefills_of_one_id_are_not_shown() -> None:
    shown = Rendezvous(KEY)
    assert shown.register("x", "a")
    assert shown.register("x", "a")  # a choice, or the same after a preemption
    assert not shown.register("x", "b")
    assert not shown.begin("x", "a", Statement("e", "i", "a", 1, 2, 8, {}, False, b""))
    reply = shown.answer([TransferQuestion("x")], is_last=False)
    assert reply is not None
    assert read_reply(reply)[0].state == "ended"
    shown.end("x", "b", "over")
    assert shown.register("x", "c")


def _ask(shown: Rendezvous, known: TransferQuestion) -> Answer:
    reply = shown.answer([known], is_last=False)
    assert reply is not None
    return read_reply(reply)[0]


def test_the_listener_says_what_is_new_and_nothing_else() -> None:
    shown = Rendezvous(KEY)
    assert shown.answer([TransferQuestion("x")], is_last=False) is None
    shown.register("x", "a")
    assert _ask(shown, TransferQuestion("x")) == Answer("heard")
    assert shown.answer([TransferQuestion("x", is_heard=True)], is_last=False) is None
    shown.begin("x", "a", Statement("e", "i", "a", 1, 77, 40, {}, False, b""))
    shown.extend("x", 77, {"g": [5, 6]})
    first = _ask(shown, TransferQuestion("x")).statement
    assert first is not None
    assert first.pages == {"g": PageList.of(PageTable([5, 6], 40))}
    assert shown.answer([TransferQuestion("x", 77, {"g": 2})], is_last=False) is None
    shown.extend("x", 77, {"g": [9]})
    shown.extend("x", 78, {"g": [10]})  # of another life
    more = _ask(shown, TransferQuestion("x", 77, {"g": 2})).statement
    assert more is not None
    assert more.pages == {"g": PageList.of(PageTable([9], 40, 2))}
    assert shown.answer([TransferQuestion("x", 77, only_end=True)], is_last=False) is None
    shown.begin("x", "a", Statement("e", "i", "a", 3, 79, 40, {}, False, b""))
    again = _ask(shown, TransferQuestion("x", 77, {"g": 3})).statement
    assert again is not None
    assert (again.word, again.pages) == (79, {})


def test_an_answer_has_no_more_than_a_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest comes with the next questions: a reader that gets too much would ask for all of it again, and never hear of any."""
    shown, most = Rendezvous(KEY), 100_000
    monkeypatch.setattr(rendezvous_module, "MAX_STATEMENT_BYTES", most)
    wanted = {f"x{number}": TransferQuestion(f"x{number}") for number in range(12)}
    for number, name in enumerate(wanted):
        shown.register(name, name)
        shown.begin(name, name, Statement("e", "i", name, number, 77, 40_000, {}, False, b"{}"))
        shown.extend(name, 77, {"g": range(2500)})
    num_questions = 0
    while wanted:
        asked = list(wanted)
        reply = shown.answer([wanted[name] for name in asked], is_last=False)
        assert reply is not None
        assert len(reply) <= most
        for place in read_reply(reply):
            del wanted[asked[place]]
        num_questions += 1
    assert num_questions == 3
    shown.extend("x0", 77, {"g": range(most)})  # one alone is not cut
    assert _ask(shown, TransferQuestion("x0", 77, {"g": 2500})).statement is not None


def test_the_listener_says_when_the_end_is_near() -> None:
    shown, waits = Rendezvous(KEY), TransferQuestion("x", only_end=True, is_heard=True, lead_s=2.0)
    shown.register("x", "a")
    assert shown.answer([waits], is_last=False) is None  # it may wait in the queue for long
    shown.begin("x", "a", Statement("e", "i", "a", 1, 77, 40, {}, False, b""))
    assert _ask(shown, waits) == Answer("heard")  # nobody knows when
    shown.extend("x", 77, {}, 2.5)
    assert shown.answer([waits], is_last=False) is None
    shown.extend("x", 78, {}, 0.5)  # of another life
    assert shown.answer([waits], is_last=False) is None
    shown.extend("x", 77, {}, 2.0)
    assert _ask(shown, waits) == Answer("heard", left_s=2.0)
    assert shown.answer([replace(waits, lead_s=0.0)], is_last=False) is None


def test_a_statement_is_sealed_as_a_whole() -> None:
    tables = {"g": PageTable([5, 6], 40)}
    pages = {"g": PageList.of(tables["g"])}
    good = Statement("e", "i", "a", 1, 77, 40, pages, False, b"d").sealed(KEY, tables)
    good.check(KEY, ("e", "i"), tables)
    for other in (
        replace(good, is_complete=True), replace(good, num_tokens=41), replace(good, word=78), replace(good, details=b""),
    ):  # fmt: skip
        with pytest.raises(SealError, match="was not sealed by that engine"):
            other.check(KEY, ("e", "i"), other.tables())


def test_a_board_writes_what_a_device_has_done_and_no_word_of_a_lease_that_has_gone() -> None:
    done: list[bool] = []
    table = LeaseTable(64)
    board = ProgressBoard(table, lambda: lambda: bool(done))
    table[1], table[2] = 11, 22
    board.begin([StepProgress(1, 11, 0, 8), StepProgress(2, 22, 0, 8)])
    board.layer(1)
    board.end()
    board.end()
    board.poll()
    assert board.is_pending
    assert not table.progress.any()
    board.take_back(1, 11)
    board.take_back(2, 23)  # another life
    table[1] = 12
    done.append(True)
    board.poll()
    assert not board.is_pending
    assert [int(table.progress[slot]) for slot in (1, 2)] == [0, Progress(8, 8, 0).pack()]


def test_more_tokens_than_a_word_has_room_for_are_refused() -> None:
    with pytest.raises(KvReshardError, match="must ascend, and not be above"):
        Progress(0, 2**28, 0).pack()


def test_what_is_read_early_in_batches_counts_with_its_gaps() -> None:
    """As it counts of any other load: a batch reads more bytes than come out of it."""
    life = _Life(Lease("r", 0, 1), {}, is_complete=False)
    reads = CopyList.of([0, 100], [0, 60], [60, 60], src_rank=0, dst_rank=0)
    moves: tuple[Any, ...] = (SimpleNamespace(num_bytes=80),)
    plan = ReadPlan((reads,), (Batch(reads, moves, 120),))
    life.count(plan)
    life.final_s = 1.0
    life.count(plan)
    assert life.moved == TransferStats(400, 480, 8, 160, num_early_bytes=200)


@pytest.mark.parametrize("is_settled", [True, False], ids=["waits", "reads"])
def test_a_listener_that_answers_keeps_a_load_that_waits_and_none_whose_read_never_settles(is_settled: bool) -> None:
    """A prefill may wait in its engine's queue for long; a read that is under way must end like any other."""
    followed = Followed()
    followed.order()
    if not is_settled:
        words = 16  # of a rank: lease and progress, which can still be read
        transport = followed.world.dst.transports[0]
        transport._faults = lambda number, transfer: Fault(drop=transfer.num_bytes > words)
        followed.compute()
    followed.go(3)
    (job,) = followed.world.dst.endpoints[0]._jobs
    assert isinstance(job, EarlyJob)
    assert job.is_settled == is_settled
    for _ in range(60):  # 300 s; the limits are 100 s for a load and 10 s to settle
        job.on_answer(Answer("heard"), followed.world.clock.now_s)
        followed.world.dst.turn(1)
        followed.world.clock.now_s += 5.0
    received, failed, _ = collect(followed.world.dst)
    assert received == set()
    assert {name: (failure.kind, failure.is_quarantined) for name, failure in failed.items()} == (
        {} if is_settled else {"d": ("timeout", True)}
    )


def test_a_source_that_has_forgotten_the_prefill_ends_the_load(followed: Followed) -> None:
    followed.order()
    (job,) = followed.world.dst.endpoints[0]._jobs
    assert isinstance(job, EarlyJob)
    job.on_answer(Answer("unheard"), followed.world.clock.now_s)
    followed.go(3)
    assert followed.end() == (set(), {"d": "prefill"})


@pytest.mark.parametrize(
    ("name", "num_pages", "told"), [("elsewhere", 1, "group 'elsewhere'"), ("full", MAX_PAGES + 1, "pages of it")]
)
def test_a_source_cannot_make_a_reader_keep_pages_without_end(
    name: str, num_pages: int, told: str, followed: Followed
) -> None:
    """Sealed as they are, and each list follows on the one before."""
    followed.order()
    (job,) = followed.world.dst.endpoints[0]._jobs
    assert isinstance(job, EarlyJob)
    lease, first = job.load.lease, 0
    known = job._life.tables.get(name)
    for count in (num_pages // 2, num_pages - num_pages // 2):
        first = first or (len(known.pages) if known is not None else 0)
        tables = {name: PageTable(np.ones(count, dtype=np.int64), 40, first)}
        first += count
        pages = {group: PageList.of(table) for group, table in tables.items()}
        stated = Statement(*job.load.remote.name, lease.request, lease.slot, lease.word, 40, pages, False, b"")
        job.on_answer(Answer("found", statement=stated.sealed(KEY, tables)), followed.world.clock.now_s)
    followed.go(3)
    _, failed, _ = collect(followed.world.dst)
    assert failed["d"].kind == "prefill"
    assert told in failed["d"].text


def test_a_request_of_the_same_name_under_the_same_id_is_not_taken_for_the_former() -> None:
    """It may have another prompt, and a reader that has not heard of the end would go on with it."""
    followed = Followed()
    followed.order()
    followed.compute()
    followed.go(6)
    first = followed.prefill
    first.take_back()
    followed.shown.end(TRANSFER, "r", "it was aborted")
    assert not followed.shown.register(TRANSFER, "r")
    followed.go(30)
    assert followed.end() == (set(), {"d": "prefill"})
