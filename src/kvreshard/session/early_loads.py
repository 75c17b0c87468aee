"""What the early loads of one rank hear and see: from the listeners of their sources, and from the progress words of the source ranks.

Once per turn of the session (`step`): answers of listeners and words that were read go to the jobs that they are about; both are asked again
when it is time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvreshard.session.commands import EndpointOptions, Failure
from kvreshard.session.early_job import EarlyJob
from kvreshard.session.follower import Follower
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.progress_reader import ProgressReader
from kvreshard.session.results import ResultQueue
from kvreshard.session.scratch import Scratch
from kvreshard.session.statement import Answer

REST_S = 0.050


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

    def __len__(self) -> int:
        return len(self._jobs)

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
                self._jobs[name].hear(answer, now_s)
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
        for name, told in seen.items():
            if name in self._jobs:
                self._results.note_advance()
                self._jobs[name].see(told, now_s)
                self._jobs[name].wake()
        if error is not None:
            for name, job in self._jobs.items():
                if job.peer is reader.peer:
                    reader.unwatch(name)
                    job.stop(Failure("transfer", f"progress could not be read: {error}"), now_s)
                    job.wake()
