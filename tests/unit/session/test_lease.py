"""When does a lease end, and is the word cleared before anyone hears of it?"""

import pytest

from kvreshard.model import KvReshardError
from kvreshard.model.wire import MAX_RANKS
from kvreshard.session.lease import FREE, Lease, LeaseBook, LeaseTable
from kvreshard.session.notes import VERSION, Heartbeat, Report

WORD = 0xFEED


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(512)


@pytest.fixture
def book(table: LeaseTable) -> LeaseBook:
    book = LeaseBook(table)
    acquire(book, "r", 3, WORD)
    return book


def acquire(book: LeaseBook, request: str, slot: int, word: int) -> None:
    """As an engine does, on two threads."""
    book.write(slot, word)
    book.acquire(Lease(request, slot, word))


def report(
    reporter: int, reporters: tuple[int, ...], consumer: str = "d/1", word: int = WORD, name: str = "r"
) -> Report:
    return Report(VERSION, consumer, name, word, reporter, reporters)


def test_the_word_stands_from_grant_to_end(table: LeaseTable, book: LeaseBook) -> None:
    assert table[3] == WORD
    book.publish("r", 30.0, now_s=100.0)
    book.report(report(0, (0, 1)))
    assert (table[3], book.take_finished()) == (WORD, {})
    book.report(report(1, (0, 1)))
    assert (table[3], book.take_finished(), book.take_finished()) == (FREE, {"r": "reported"}, {})


def test_reports_may_come_before_the_offer(table: LeaseTable, book: LeaseBook) -> None:
    book.report(report(0, (0,)))
    assert (table[3], book.take_finished()) == (WORD, {})
    book.publish("r", 30.0, now_s=0.0)
    assert (table[3], book.take_finished()) == (FREE, {"r": "reported"})


@pytest.mark.parametrize(
    "noise",
    [
        report(0, (0, 1)),  # a duplicate
        report(2, (0, 1)),  # not one of its own reporters
        report(1, (0, 1), word=WORD + 1),
        report(1, (0, 1), name="other"),
        report(1, (0, 1), consumer="d/2"),  # another engine's set
    ],
)
def test_noise_changes_nothing(table: LeaseTable, book: LeaseBook, noise: Report) -> None:
    book.publish("r", 30.0, now_s=0.0)
    book.report(report(0, (0, 1)))
    book.report(noise)
    assert (table[3], book.take_finished()) == (WORD, {})


def test_a_late_report_changes_nothing(book: LeaseBook) -> None:
    book.publish("r", 1.0, now_s=0.0)
    book.expire(1.0)
    assert book.take_finished() == {"r": "expired"}
    book.report(report(0, (0,)))
    assert book.take_finished() == {}


def test_a_retry_at_another_engine_needs_its_whole_set(book: LeaseBook) -> None:
    book.publish("r", 30.0, now_s=0.0)
    book.report(report(0, (0, 1), "first/1"))
    book.report(report(1, (1, 2), "second/1"))
    assert book.take_finished() == {}
    book.report(report(2, (1, 2), "second/1"))
    assert book.take_finished() == {"r": "reported"}


def test_heartbeats_with_the_right_word_renew(table: LeaseTable, book: LeaseBook) -> None:
    book.publish("r", 10.0, now_s=0.0)
    book.renew(Heartbeat(VERSION, "d", (("r", WORD),)), 8.0)
    book.expire(17.9)
    assert book.take_finished() == {}
    book.renew(Heartbeat(VERSION, "d", (("r", WORD + 1), ("x", WORD))), 17.9)
    book.expire(18.0)
    assert (table[3], book.take_finished()) == (FREE, {"r": "expired"})


def test_a_published_lease_is_revoked_aloud_and_once(table: LeaseTable, book: LeaseBook) -> None:
    book.publish("r", 30.0, now_s=0.0)
    book.revoke("r")
    assert (table[3], book.take_finished(), len(book)) == (FREE, {"r": "revoked"}, 0)
    book.revoke("r")
    book.expire(1e9)
    assert book.take_finished() == {}


def test_what_was_acquired_and_not_published_never_expires_and_is_revoked_in_silence(
    table: LeaseTable, book: LeaseBook
) -> None:
    book.renew(Heartbeat(VERSION, "d", (("r", WORD),)), 5.0)
    book.expire(1e9)
    assert (table[3], book.num_published, len(book)) == (WORD, 0, 1)
    book.revoke("r")
    book.revoke("r")
    assert (table[3], book.take_finished(), len(book)) == (FREE, {}, 0)
    assert not book.publish("r", 1.0, 0.0)


def test_a_lease_that_is_acquired_twice_keeps_its_word(table: LeaseTable, book: LeaseBook) -> None:
    acquire(book, "r", 3, WORD)
    assert (table[3], book.holds("r", WORD)) == (WORD, True)


def test_a_consumer_that_invents_names_does_not_fill_memory(book: LeaseBook) -> None:
    book.publish("r", 30.0, now_s=0.0)
    for number in range(1000):
        book.report(report(0, (0, 1), f"made-up/{number}"))
    assert len(book._leases["r"].reported) <= 64


@pytest.mark.parametrize(("slot", "word"), [(-1, 1), (512, 1), (0, 0), (0, 1 << 64)])
def test_slots_and_words_out_of_range_are_refused(table: LeaseTable, slot: int, word: int) -> None:
    with pytest.raises(KvReshardError, match=r"lease slot -?\d+ of 512 with word"):
        LeaseBook(table).acquire(Lease("r", slot, word))


def test_the_table_lies_in_memory_that_can_be_registered(table: LeaseTable) -> None:
    assert (table.region.size_bytes, table.region.address % 4096) == (8192, 0)
    assert table.progress_address == table.region.address + 4096


def test_a_request_that_acquires_again_leaves_no_word_behind(table: LeaseTable, book: LeaseBook) -> None:
    """A reader of its first life would find it, and take the pages for its own, whoever has them now."""
    acquire(book, "r", 4, WORD + 1)
    assert (table[3], table[4]) == (FREE, WORD + 1)
    acquire(book, "r", 4, WORD + 2)
    assert table[4] == WORD + 2


def test_the_word_of_another_that_has_the_slot_by_now_stays(table: LeaseTable, book: LeaseBook) -> None:
    acquire(book, "s", 3, WORD + 1)
    acquire(book, "r", 4, WORD + 2)
    assert (table[3], table[4]) == (WORD + 1, WORD + 2)


def test_reporters_without_end_are_not_remembered(book: LeaseBook) -> None:
    for reporter in range(2 * MAX_RANKS):
        book.report(report(reporter, (reporter, 10**6)))
    assert len(book._leases["r"].reported["d/1"]) == MAX_RANKS


class CountedLeases(dict):  # type: ignore[type-arg]
    """The leases of a book, which count how often one of them is looked at."""

    num_looks = 0

    def get(self, key: object, default: object = None) -> object:
        self.num_looks += 1
        return super().get(key, default)

    def items(self) -> object:
        self.num_looks += len(self)
        return super().items()

    def values(self) -> object:
        self.num_looks += len(self)
        return super().values()


@pytest.mark.parametrize("count", [10, 500])
def test_a_turn_looks_at_no_lease_whose_time_has_not_come(table: LeaseTable, count: int) -> None:
    book = LeaseBook(table)
    book._leases = counted = CountedLeases()
    for number in range(count):
        acquire(book, f"r{number}", number, WORD + number)
        book.publish(f"r{number}", 30.0, now_s=float(number) / 100)
    counted.num_looks = 0
    for turn in range(100):
        book.expire(20.0 + turn / 100)
        assert book.num_published == count
    assert counted.num_looks == 0
    book.renew(Heartbeat(VERSION, "d", (("r0", WORD),)), 25.0)
    assert counted.num_looks == 1
    book.expire(30.025)
    assert set(book.take_finished()) == {"r1", "r2"}
    assert counted.num_looks <= 5
    book.expire(1000.0)
    assert (len(book), book.num_published, len(book.take_finished())) == (0, 0, count - 2)


def test_what_has_ended_is_not_kept_for_its_time(table: LeaseTable) -> None:
    book = LeaseBook(table)
    for number in range(1000):
        acquire(book, f"r{number}", 0, WORD)
        book.publish(f"r{number}", 86_400.0, now_s=0.0)
        book.report(report(0, (0,), name=f"r{number}"))
    assert not book._deadlines_s
    acquire(book, "last", 0, WORD)
    book.publish("last", 10.0, 0.0)
    book.expire(10.0)
    assert book.num_published == 0
