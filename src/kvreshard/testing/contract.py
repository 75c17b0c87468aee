"""The suite of tests that every transport must pass.

`TransportContract` is a suite of tests. A transport passes it by a subclass with a `ranks` fixture, which may live
as long as the module:

    @pytest.fixture(scope="module")
    def my_ranks():
        with LocalRanks(NUM_RANKS, MEMORY_BYTES, make_mine) as ranks:
            ranks.connect_all()
            yield ranks

    class TestMine(TransportContract):
        @pytest.fixture
        def ranks(self, my_ranks):
            return my_ranks

Each test leaves all ranks open and connected. Every test of bytes compares the **whole** memory of all ranks with
what a byte-by-byte oracle leaves, so bytes outside the copies need no separate test.
Random cases have fixed seeds, which stand in the test's name.

Not required: an order of copies or transfers, and any result of destination copies that overlap.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvreshard.plan.copies import CopyList, Page, PagedCopies
from kvreshard.testing.pieces import MEMORY_BYTES, Expectation, Pieces, copies_of, posted, random_pieces
from kvreshard.testing.rank_worker import Report
from kvreshard.testing.ranks import Ranks
from kvreshard.transport.base import MAX_NOTIFICATION_BYTES, Direction, TransportError

NUM_RANKS = 3

_READ_WRITE = pytest.mark.parametrize("direction", list(Direction), ids=lambda direction: direction.value)


def _check_paged(ranks: Ranks, direction: Direction, copies: PagedCopies) -> None:
    """Rank 0 moves paged copies with rank 1, and exactly those arrive."""
    flat, expected = copies.flat(), Expectation(ranks)
    is_read = direction is Direction.READ
    local, remote = (flat.dst_address, flat.src_address) if is_read else (flat.src_address, flat.dst_address)
    expected.copied(0, 1, direction, (local - ranks.address(0), remote - ranks.address(1), flat.length))
    report = ranks.run(0, 1, direction, copies)
    assert (report.num_bytes, report.num_descriptors) == (flat.num_bytes, flat.num_copies)
    expected.check()


def _check_pieces(ranks: Ranks, rank: int, peer: int, direction: Direction, pieces: Pieces) -> Report:
    """`rank` moves copies with `peer`, and exactly those arrive."""
    expected = Expectation(ranks)
    expected.copied(rank, peer, direction, pieces)
    report = ranks.run(rank, peer, direction, copies_of(ranks, rank, peer, direction, pieces))
    expected.check()
    return report


class TransportContract:
    """The suite. Subclasses have a `ranks` fixture: `NUM_RANKS` ranks of `MEMORY_BYTES`, all connected."""

    @pytest.fixture(autouse=True)
    def _fresh(self, ranks: Ranks) -> None:
        random = np.random.default_rng(20)
        block = random.integers(0, 256, size=1 << 20, dtype=np.uint8)
        ranks.reset(fill_byte=None)
        for rank in range(ranks.num_ranks):
            # Each rank and each MiB differs, from one random MiB.
            tiled = ranks.memory(rank).reshape(-1, block.size)
            tiled[:] = block + np.arange(len(tiled), dtype=np.uint8)[:, None] * np.uint8(3) + np.uint8(rank * 85)
            ranks.give(rank)

    # Bytes

    @_READ_WRITE
    @pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed={seed}")
    def test_random_pieces_arrive_exactly(self, ranks: Ranks, direction: Direction, seed: int) -> None:
        pieces = random_pieces(np.random.default_rng(seed), 400)
        report = _check_pieces(ranks, 0, 1, direction, pieces)
        assert report.num_bytes == int(pieces[2].sum())
        assert report.num_descriptors == len(pieces[2])
        assert report.seconds is not None
        assert report.seconds >= 0.0

    @_READ_WRITE
    @pytest.mark.parametrize(
        ("src_stride", "dst_stride"), [(4096, 4096), (8192, 4096), (4096, 12_288)], ids=lambda step: f"{step}"
    )
    def test_pages_arrive_exactly(self, ranks: Ranks, direction: Direction, src_stride: int, dst_stride: int) -> None:
        """Pages in random order, ascending and descending, twice of one page: what is prepared for it is used again."""
        random, count = np.random.default_rng(4), 100
        starts = np.array([0, 1000, 2_000_000, 4_000_003])
        src_rank, dst_rank = (1, 0) if direction is Direction.READ else (0, 1)
        page = Page.of(
            starts[::-1] + ranks.address(src_rank), starts + ranks.address(dst_rank) + 64, 999,
            (src_stride, dst_stride), (count, count),
        )  # fmt: skip
        orders = (random.permutation(count)[:60], np.arange(40), np.arange(60)[::-1])
        for src, dst in (orders[:1] * 2, (orders[0], random.permutation(count)[:60]), orders[1:2] * 2, orders[2:] * 2):
            _check_paged(ranks, direction, PagedCopies(0, 0, page, src, dst))

    @_READ_WRITE
    def test_pages_with_a_piece_that_a_transport_may_have_to_cut(self, ranks: Ranks, direction: Direction) -> None:
        src_rank, dst_rank = (1, 0) if direction is Direction.READ else (0, 1)
        page = Page.of([ranks.address(src_rank)], [ranks.address(dst_rank) + 5], 17 << 20, (18 << 20, 19 << 20), (2, 2))
        _check_paged(ranks, direction, PagedCopies(0, 0, page, np.array([0, 1]), np.array([1, 0])))

    def test_pages_outside_the_regions_are_refused(self, ranks: Ranks) -> None:
        """Also where only pages outside the transfer lie outside: a page is checked once, with all that it may copy."""
        first = np.array([0])
        ends = (MEMORY_BYTES // 4096, MEMORY_BYTES // 4096 + 1)
        for counts in (ends, ends[::-1]):
            page = Page.of([ranks.address(1)], [ranks.address(0)], 4096, (4096, 4096), counts)
            with pytest.raises(TransportError, match="not inside one registered region"):
                ranks.run(0, 1, Direction.READ, PagedCopies(0, 0, page, first, first))

    def test_page_ids_that_there_are_not_are_refused(self, ranks: Ranks) -> None:
        page = Page.of([ranks.address(1)], [ranks.address(0)], 4096, (4096, 4096), (10, 20))
        before = Expectation(ranks)
        for src, dst in ((10, 0), (-1, 0), (0, 20), (0, -1)):
            with pytest.raises(TransportError, match=r"pages from -?\d+ to -?\d+, but there are"):
                ranks.run(0, 1, Direction.READ, PagedCopies(0, 0, page, np.array([src]), np.array([dst])))
        before.check()

    @_READ_WRITE
    @pytest.mark.parametrize(("local_stride", "remote_stride", "length"), [(64, 192, 64), (129, 7, 7), (5000, 4096, 1)])
    def test_strided_pieces_arrive_exactly(
        self, ranks: Ranks, direction: Direction, local_stride: int, remote_stride: int, length: int
    ) -> None:
        index = np.arange(5000, dtype=np.uint64)
        lengths = np.full(5000, length, dtype=np.uint64)
        pieces = (index * np.uint64(local_stride) + np.uint64(1), index * np.uint64(remote_stride), lengths)
        _check_pieces(ranks, 2, 0, direction, pieces)

    @_READ_WRITE
    def test_one_piece_of_all_memory_arrives_exactly(self, ranks: Ranks, direction: Direction) -> None:
        zero = np.zeros(1, dtype=np.uint64)
        pieces = (zero, zero, np.array([MEMORY_BYTES], dtype=np.uint64))
        _check_pieces(ranks, 1, 2, direction, pieces)

    @_READ_WRITE
    def test_a_hundred_thousand_pieces_arrive_exactly(self, ranks: Ranks, direction: Direction) -> None:
        random = np.random.default_rng(5)
        index = np.arange(100_000, dtype=np.uint64) * np.uint64(400)
        pieces = (random.permutation(index), random.permutation(index), np.full(100_000, 333, dtype=np.uint64))
        _check_pieces(ranks, 0, 1, direction, pieces)

    @_READ_WRITE
    def test_an_empty_list_is_done_and_notifies(self, ranks: Ranks, direction: Direction) -> None:
        expected = Expectation(ranks)
        report = ranks.run(0, 1, direction, CopyList.of([], [], []), b"nothing to do")
        assert (report.num_bytes, report.num_descriptors) == (0, 0)
        assert ranks.notifications(1, 1) == [("rank0", b"nothing to do")]
        expected.check()

    @pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed={seed}")
    def test_concurrent_transfers_with_several_peers(self, ranks: Ranks, seed: int) -> None:
        random = np.random.default_rng(100 + seed)
        # A share of all memories for each of six transfers, so that they touch different bytes.
        share = MEMORY_BYTES // 6
        routes = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
        expected = Expectation(ranks)
        jobs = []
        for number, (rank, peer) in enumerate(routes):
            pieces = random_pieces(random, 300, number * share, (number + 1) * share)
            direction = Direction.READ if number % 2 else Direction.WRITE
            expected.copied(rank, peer, direction, pieces)
            jobs.append((rank, ranks.post(rank, peer, direction, copies_of(ranks, rank, peer, direction, pieces))))
        for rank, job in jobs:
            report = ranks.wait(rank, job)
            assert report.state == "done", report.error
        expected.check()

    def test_many_small_transfers_at_once(self, ranks: Ranks) -> None:
        expected = Expectation(ranks)
        jobs = []
        for number in range(200):
            pieces = random_pieces(np.random.default_rng(number), 3, number * 200_000, (number + 1) * 200_000)
            expected.copied(0, 1, Direction.READ, pieces)
            jobs.append(
                ranks.post(0, 1, Direction.READ, copies_of(ranks, 0, 1, Direction.READ, pieces), b"%d" % number)
            )
        assert [ranks.wait(0, job).state for job in jobs] == ["done"] * 200
        expected.check()
        messages = ranks.notifications(1, 200)
        assert sorted(messages) == sorted(("rank0", b"%d" % number) for number in range(200))
        assert ranks.notifications(1, 1, timeout_s=0.05) == []

    # Notifications

    @pytest.mark.parametrize("round_number", range(5))
    def test_a_notification_comes_after_the_last_byte(self, ranks: Ranks, round_number: int) -> None:
        pieces = random_pieces(np.random.default_rng(round_number), 500)
        expected = Expectation(ranks)
        expected.copied(0, 1, Direction.WRITE, pieces)
        job = ranks.post(0, 1, Direction.WRITE, copies_of(ranks, 0, 1, Direction.WRITE, pieces), b"written")
        # The notification is all that the receiver gets of the transfer: every byte must be there by then.
        assert ranks.notifications(1, 1) == [("rank0", b"written")]
        expected.check()
        assert ranks.wait(0, job).state == "done"
        assert ranks.notifications(1, 1, timeout_s=0.02) == []

    @pytest.mark.parametrize(
        "payload",
        [b"x", b"", bytes(range(256)), b"\0" * 9, b"y" * MAX_NOTIFICATION_BYTES],
        ids=["one", "empty", "all values", "zeros", "largest"],
    )
    def test_payloads_arrive_as_they_are(self, ranks: Ranks, payload: bytes) -> None:
        ranks.notify(0, 2, payload)
        ranks.run(1, 2, Direction.READ, copies_of(ranks, 1, 2, Direction.READ, ([0], [0], [1])), payload)
        assert sorted(ranks.notifications(2, 2)) == [("rank0", payload), ("rank1", payload)]
        assert ranks.notifications(2, 1, timeout_s=0.02) == []
        assert ranks.notifications(0, 1, timeout_s=0.0) == []

    def test_a_payload_above_the_limit_is_refused(self, ranks: Ranks) -> None:
        payload = b"y" * (MAX_NOTIFICATION_BYTES + 1)
        with pytest.raises(TransportError, match=str(MAX_NOTIFICATION_BYTES)):
            ranks.notify(0, 1, payload)
        with pytest.raises(TransportError, match=str(MAX_NOTIFICATION_BYTES)):
            ranks.post(0, 1, Direction.READ, copies_of(ranks, 0, 1, Direction.READ, ([0], [0], [1])), payload)
        assert ranks.notifications(1, 1, timeout_s=0.02) == []

    # Refusals

    @_READ_WRITE
    @pytest.mark.parametrize("side", ["local", "remote"])
    @pytest.mark.parametrize("offset", [-1, -(2**20), MEMORY_BYTES - 4, MEMORY_BYTES, 2**40], ids=hex)
    def test_a_piece_out_of_bounds_moves_no_byte(
        self, ranks: Ranks, direction: Direction, side: str, offset: int
    ) -> None:
        local = np.array([0, 100], dtype=np.uint64) + np.uint64(ranks.address(0))
        remote = np.array([0, 100], dtype=np.uint64) + np.uint64(ranks.address(1))
        outside, rank = (local, 0) if side == "local" else (remote, 1)
        outside[1] = ranks.address(rank) + offset
        expected = Expectation(ranks)
        with pytest.raises(TransportError, match=rf"copy 1 of 2: {side}.*registered"):
            ranks.post(0, 1, direction, posted(direction, local, remote, 8), b"never")
        expected.check()
        assert ranks.notifications(1, 1, timeout_s=0.0) == []

    def test_an_unknown_peer_is_refused(self, ranks: Ranks) -> None:
        with pytest.raises(TransportError, match="'rank7' is unknown"):
            ranks.post(0, 7, Direction.READ, CopyList.of([], [], []))
        with pytest.raises(TransportError, match="'rank7' is unknown"):
            ranks.notify(0, 7, b"hello")
        with pytest.raises(TransportError, match="'rank7' is unknown"):
            ranks.disconnect(0, 7)

    def test_a_known_peer_is_not_added_twice(self, ranks: Ranks) -> None:
        with pytest.raises(TransportError, match="remove_peer"):
            ranks.connect(0, 1)

    # Ends

    def test_a_removed_peer_can_come_back(self, ranks: Ranks) -> None:
        copies = copies_of(ranks, 0, 1, Direction.READ, ([0], [0], [64]))
        for _ in range(3):
            ranks.disconnect(0, 1)
            with pytest.raises(TransportError, match="'rank1' is unknown"):
                ranks.post(0, 1, Direction.READ, copies)
            ranks.run(0, 2, Direction.READ, copies_of(ranks, 0, 2, Direction.READ, ([0], [0], [64])))
            ranks.connect(0, 1)
            ranks.run(0, 1, Direction.READ, copies, b"back")
            assert ranks.notifications(1, 1) == [("rank0", b"back")]

    def test_removing_a_peer_settles_its_transfers_and_no_others(self, ranks: Ranks) -> None:
        random = np.random.default_rng(9)
        half = MEMORY_BYTES // 2
        gone = [copies_of(ranks, 0, 1, Direction.READ, random_pieces(random, 5000, 0, half)) for _ in range(3)]
        stays = random_pieces(random, 5000, half, MEMORY_BYTES)
        gone_jobs = [ranks.post(0, 1, Direction.READ, copies) for copies in gone]
        stays_job = ranks.post(0, 2, Direction.READ, copies_of(ranks, 0, 2, Direction.READ, stays))
        ranks.disconnect(0, 1)
        reports = [ranks.wait(0, job) for job in gone_jobs]
        assert all(report.state in ("done", "failed") for report in reports)
        assert all("removed" in (report.error or "removed") for report in reports)
        assert ranks.wait(0, stays_job).state == "done"
        before = Expectation(ranks)
        ranks.connect(0, 1)
        ranks.run(0, 1, Direction.READ, CopyList.of([], [], []))
        before.check()

    @pytest.mark.parametrize("direction", list(Direction))
    def test_a_cancelled_transfer_settles_and_no_byte_moves_afterwards(
        self, ranks: Ranks, direction: Direction
    ) -> None:
        random = np.random.default_rng(10)
        half = MEMORY_BYTES // 2
        pieces = [random_pieces(random, 50_000, 0, half) for _ in range(3)]
        stays = random_pieces(random, 5000, half, MEMORY_BYTES)
        other = Expectation(ranks)
        other.copied(0, 2, Direction.READ, stays)
        jobs = [
            ranks.post(0, 1, direction, copies_of(ranks, 0, 1, direction, part), b"never if it failed")
            for part in pieces
        ]
        stays_job = ranks.post(0, 2, Direction.READ, copies_of(ranks, 0, 2, Direction.READ, stays))
        for job in jobs:
            ranks.cancel(0, job)
        reports = [ranks.wait(0, job) for job in jobs]
        assert all(report.state in ("done", "failed") for report in reports)
        assert all("cancelled" in (report.error or "cancelled") for report in reports)
        settled = Expectation(ranks)
        assert ranks.wait(0, stays_job).state == "done"
        other.check(half)
        num_done = sum(report.state == "done" for report in reports)
        assert len(ranks.notifications(1, num_done + 1, timeout_s=0.2)) == num_done
        ranks.cancel(0, jobs[0])
        ranks.run(0, 1, direction, CopyList.of([], [], []))
        settled.check(stop=half)

    def test_closing_settles_what_is_pending(self, ranks: Ranks) -> None:
        pieces = random_pieces(np.random.default_rng(11), 5000)
        jobs = [ranks.post(0, 1, Direction.READ, copies_of(ranks, 0, 1, Direction.READ, pieces)) for _ in range(3)]
        ranks.shut(0)
        after = Expectation(ranks)
        reports = [ranks.wait(0, job, timeout_s=0.0) for job in jobs]
        assert all(report.state in ("done", "failed") for report in reports)
        assert all("closed" in (report.error or "closed") for report in reports)
        ranks.shut(0)
        with pytest.raises(TransportError, match="closed"):
            ranks.notify(0, 1, b"")
        with pytest.raises(TransportError, match="closed"):
            ranks.connect(0, 1)
        with pytest.raises(TransportError, match="closed"):
            ranks.disconnect(0, 1)
        with pytest.raises(TransportError, match="closed"):
            ranks.post(0, 1, Direction.READ, CopyList.of([], [], []))
        after.check()
        self._reopen(ranks, 0)
        ranks.run(0, 1, Direction.READ, copies_of(ranks, 0, 1, Direction.READ, pieces))
        ranks.run(1, 0, Direction.READ, copies_of(ranks, 1, 0, Direction.READ, pieces))

    def test_a_peer_that_closed_does_not_disturb_the_others(self, ranks: Ranks) -> None:
        ranks.shut(1)
        ranks.run(0, 2, Direction.READ, copies_of(ranks, 0, 2, Direction.READ, ([0], [0], [4096])), b"still here")
        assert ranks.notifications(2, 1) == [("rank0", b"still here")]
        self._reopen(ranks, 1)
        ranks.run(0, 1, Direction.WRITE, copies_of(ranks, 0, 1, Direction.WRITE, ([0], [0], [4096])))

    @staticmethod
    def _reopen(ranks: Ranks, rank: int) -> None:
        """A new transport for a rank, known to all others under the old name."""
        ranks.open(rank)
        for peer in range(ranks.num_ranks):
            if peer != rank:
                ranks.disconnect(peer, rank)
                ranks.connect(peer, rank)
                ranks.connect(rank, peer)
