"""News for the early loads of one rank: from the listeners of their sources, and from the progress words of the source ranks.

Once per turn of the session (`EarlyLoads.step`): answers of listeners and words that were read go to the jobs that they are about; both are
asked again when it is time. Words are read as often as they change (`ProgressReader`): those of a slow prefill less often, and never less than
every `MAX_INTERVAL_S`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from kvreshard.plan.copies import CopyList
from kvreshard.session.commands import EndpointOptions, Failure
from kvreshard.session.early_job import EarlyJob
from kvreshard.session.follower import Follower
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.mover import Scratch
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.progress import Progress
from kvreshard.session.results import ResultQueue
from kvreshard.session.statement import Answer
from kvreshard.transport.base import Direction, Transfer, TransferState, TransportError

REST_S = 0.050
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.004, 0.050
# Of the time between two changes. A reader comes late by half of it.
INTERVAL_SHARE = 1 / 8
WORDS_PER_LEASE = 2

ProgressByRank = Mapping[int, Progress | None]
"""The progress of each source rank; None where its lease word is another."""


class EarlyLoads:
    """Of one rank. `results`: told when a prefill has gone on. `wake`: called when there is something to take, on any thread."""

    def __init__(
        self,
        scratch: Scratch,
        results: ResultQueue,
        options: EndpointOptions,
        wake: Callable[[], None],
        follower: Follower | None = None,
    ) -> None:
        self._scratch, self._results, self._options, self._wake = scratch, results, options, wake
        self._jobs: dict[str, EarlyJob] = {}
        self._readers: dict[Peer, ProgressReader] = {}
        self._follower = follower

    def add(self, job: EarlyJob, me: LocalRank) -> None:
        """A load begins."""
        if self._follower is None:
            self._follower = Follower(me.engine_metadata.engine, me.rank, self._options.keys, self._wake)
        self._jobs[job.load.request] = job

    def end(self, job: EarlyJob) -> None:
        """A load has ended."""
        name = job.load.request
        if self._jobs.get(name) is job:
            del self._jobs[name]
            if self._follower is not None:
                self._follower.drop(name)
            for reader in self._readers.values():
                reader.unwatch(name)

    def step(self, now_s: float) -> float:
        """Seconds until there is something to do again, unless `wake` is called before."""
        if self._follower is None or not (self._jobs or self._readers):
            return REST_S
        for name, answer in self._follower.take():
            if name in self._jobs:
                if isinstance(answer, Answer) and answer.statement is not None:
                    self._results.note_advance()
                self._jobs[name].on_answer(answer, now_s)
                self._jobs[name].wake()
        for name, job in self._jobs.items():
            if job.follows:
                self._follower.follow(name, job.load.remote.address, job.known)
            else:
                self._follower.drop(name)
            if job.peer is not None and not job.is_stopped and job.peer.parts.parts:
                self._reader(job.peer).watch(name, job.load.lease.slot, job.load.lease.word)
        waits_s = [self._follower.ask(), REST_S]
        for peer, reader in list(self._readers.items()):
            self._read(reader, now_s)
            waits_s.append(reader.wait_s(now_s))
            if not reader.is_busy:
                del self._readers[peer]
        return min(waits_s)

    def close(self) -> None:
        """End all questions."""
        if self._follower is not None:
            self._follower.close()

    def _reader(self, peer: Peer) -> ProgressReader:
        if peer not in self._readers:
            self._readers[peer] = ProgressReader(peer, self._scratch, self._wake)
        return self._readers[peer]

    def _read(self, reader: ProgressReader, now_s: float) -> None:
        seen, error = reader.step(now_s)
        for name, progress in seen.items():
            if name in self._jobs:
                self._results.note_advance()
                self._jobs[name].on_progress(progress, now_s)
                self._jobs[name].wake()
        if error is not None:
            for name, job in self._jobs.items():
                if job.peer is reader.peer:
                    reader.unwatch(name)
                    job.stop(Failure("transfer", f"progress could not be read: {error}"), now_s)
                    job.wake()


class ProgressReader:
    """Reads the lease and progress words of the leases that this rank follows at one peer, all in one read per source rank.

    `wake`: called, on any thread, when a read has settled.
    """

    def __init__(self, peer: Peer, scratch: Scratch, wake: Callable[[], None]) -> None:
        self.peer, self._scratch, self._wake = peer, scratch, wake
        # By whoever follows it: slot and word of each lease.
        self._watched: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, ProgressByRank] = {}
        self._reads: list[Transfer] = []
        self._read_slots: tuple[int, ...] = ()
        self._address: int | None = None
        self._changed_s = self._due_s = -1.0
        self._gap_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether leases are watched, or a read has not settled."""
        return bool(self._watched or self._reads)

    def watch(self, name: str, slot: int, word: int) -> None:
        """Look at a lease from now on."""
        if self._watched.get(name) != (slot, word):
            self._watched[name] = slot, word
            self._seen.pop(name, None)
            self._due_s, self._gap_s = -1.0, 0.0

    def unwatch(self, name: str) -> None:
        """No longer."""
        self._watched.pop(name, None)
        self._seen.pop(name, None)

    def step(self, now_s: float) -> tuple[dict[str, ProgressByRank], TransportError | None]:
        """Take in what was read, and read again if it is time: (what has changed, by name; why a read has failed)."""
        changed: dict[str, ProgressByRank] = {}
        error: TransportError | None = None
        if self._reads and all(read.state is not TransferState.PENDING for read in self._reads):
            error = next((read.error for read in self._reads if read.error is not None), None)
            if error is None and self._address is not None:
                changed = self._take_in(now_s, self._address)
            self._reads = []
            self._give_back()
        if self._watched and not self._reads and error is None and now_s >= self._due_s:
            error = self._read(now_s)
        return changed, error

    def wait_s(self, now_s: float) -> float:
        """Until the next read is due."""
        return MAX_INTERVAL_S if self._reads or not self._watched else max(0.0, self._due_s - now_s)

    def _read(self, now_s: float) -> TransportError | None:
        gap_s = max(self._gap_s, now_s - self._changed_s)
        self._due_s = now_s + min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, gap_s * INTERVAL_SHARE))
        ranks = self.peer.route.src_ranks
        slots = tuple(dict.fromkeys(slot for slot, _ in self._watched.values()))
        each = WORDS_PER_LEASE * len(slots)
        self._address = self._scratch.take(each * len(ranks))
        if self._address is None:
            return None
        self._read_slots = slots
        metadata = self.peer.engine_metadata.rank_by_number
        steps = WORD_BYTES * np.array(slots, dtype=np.int64)
        try:
            for number, rank in enumerate(ranks):
                tables = filter(None, (metadata[rank].lease_address, metadata[rank].progress_address))
                src = np.concatenate([address + steps for address in tables])
                first = self._address + number * each * WORD_BYTES
                copies = CopyList.of(src, first + WORD_BYTES * np.arange(len(src)), WORD_BYTES, src_rank=rank)
                self._reads.append(self.peer.mover.post(Direction.READ, copies))
        except TransportError as error:
            if not self._reads:
                self._give_back()
            return error
        for read in self._reads:
            read.add_done_callback(lambda _: self._wake())
        return None

    def _take_in(self, now_s: float, address: int) -> dict[str, ProgressByRank]:
        ranks, count = self.peer.route.src_ranks, len(self._read_slots)
        num_words = WORDS_PER_LEASE * count * len(ranks)
        words = np.ctypeslib.as_array((ctypes.c_uint64 * num_words).from_address(address))
        table = words.reshape(len(ranks), WORDS_PER_LEASE, count)
        metadata = self.peer.engine_metadata.rank_by_number
        table[[not metadata[rank].progress_address for rank in ranks], 1] = 0  # a rank may have no progress words
        places = {slot: place for place, slot in enumerate(self._read_slots)}
        changed: dict[str, ProgressByRank] = {}
        for name, (slot, word) in self._watched.items():
            place = places.get(slot)
            if place is None:
                continue
            found = table[:, :, place].tolist()
            seen = {
                rank: Progress.unpack(packed) if held == word else None
                for rank, (held, packed) in zip(ranks, found, strict=True)
            }
            if self._seen.get(name) != seen:
                self._seen[name] = changed[name] = seen
        if changed:
            self._gap_s, self._changed_s = now_s - self._changed_s, now_s
            self._due_s = now_s + MIN_INTERVAL_S
        return changed

    def _give_back(self) -> None:
        if self._address is not None:
            self._scratch.give(self._address)
            self._address = None
