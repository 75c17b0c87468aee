"""Several ranks that copy bytes among each other, driven by one controller that sees all their memory.

1. `LocalRanks` has all ranks in this process (any transport). `ProcessRanks` starts one worker process per rank (NIXL), without fork.
   Both have one interface and serve many test cases: `reset` between them.
2. Each rank has one block of memory, registered as one region. `memory` is the controller's array of it, `address` the rank's own address
   of it, for copy lists. Between processes the array is an anonymous memory file, so nothing stays behind in a file system. Where the block
   is a device's (`devices`), the array is a copy: `memory` reads it anew, and `give` writes it back.
3. `connect_all`, then `post` and `wait`, `notify` and `notifications`.

A rank's refusal is raised here as the same `TransportError` or `LayoutMismatch`. A worker that dies or does not answer in time raises
`RankDiedError` with its exit code and the end of its output.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

import kvreshard
from kvreshard.model import LayoutMismatch
from kvreshard.plan.copies import Copies, CopyList
from kvreshard.testing import rank_worker
from kvreshard.testing.rank_memory import block_of
from kvreshard.testing.rank_worker import Answer, Call, RankWorker, Report
from kvreshard.transport.base import Direction, Transport, TransportError

# Starting NIXL takes 0.5 s alone and some seconds on a busy machine; nothing else takes longer than its own timeout.
ANSWER_TIMEOUT_S = 60.0


class RankDiedError(Exception):
    """A worker process ended, or did not answer in time and was ended."""


class Ranks(abc.ABC):
    """Several ranks with memory and transports. Jobs are numbers that belong to their rank."""

    def __init__(self, num_ranks: int, memory_bytes: int, devices: Sequence[str] | None = None) -> None:
        self.num_ranks = num_ranks
        self.memory_bytes = memory_bytes
        # How long `notifications` waits by default: long for a busy machine, since only a failing test waits for it.
        self.patience_s = 10.0
        self._devices = tuple(devices or ("cpu",) * num_ranks)
        self._address = [0] * num_ranks

    @abc.abstractmethod
    def call(self, rank: int, method: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Call a method of a rank's `RankWorker`. Raises what it refuses; RuntimeError for anything unforeseen."""

    @abc.abstractmethod
    def _array(self, rank: int) -> NDArray[np.uint8]: ...

    def memory(self, rank: int) -> NDArray[np.uint8]:
        """The rank's memory as it is now, shape (memory_bytes,), always the same writable array. `give` after writing to it."""
        if self.device(rank) != "cpu":
            self.call(rank, "download")
        return self._array(rank)

    def give(self, rank: int) -> None:
        """Copy what was written to the rank's `memory` to its device. On the processor it is there already."""
        if self.device(rank) != "cpu":
            self.call(rank, "upload")

    def device(self, rank: int) -> str:
        """Where the rank's memory is: "cpu", "cuda:0", ..."""
        return self._devices[rank]

    @abc.abstractmethod
    def close(self) -> None:
        """Stop all ranks and free their memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def address(self, rank: int) -> int:
        """Where the rank itself sees the first byte of its memory."""
        return self._address[rank]

    def open(self, rank: int) -> float:
        """Make a rank's transport, also after `shut`; returns the seconds it took."""
        self._address[rank], start_s = self.call(rank, "open")
        return float(start_s)

    def shut(self, rank: int) -> None:
        """Close a rank's transport; its memory stays."""
        self.call(rank, "close")

    def metadata(self, rank: int) -> bytes:
        """Metadata of a rank's transport, for its peers."""
        return bytes(self.call(rank, "metadata"))

    def connect(self, rank: int, peer: int) -> None:
        """Make `peer` known to `rank`, as "rank<peer>"."""
        self.call(rank, "connect", f"rank{peer}", self.metadata(peer))

    def connect_all(self) -> None:
        """Make all ranks known to each other."""
        for rank, peer in itertools.permutations(range(self.num_ranks), 2):
            self.connect(rank, peer)

    def disconnect(self, rank: int, peer: int) -> None:
        """Remove `peer` from `rank`."""
        self.call(rank, "disconnect", f"rank{peer}")

    def attend(self, rank: int, attentive: bool) -> None:
        """`Transport.set_attentive` on a rank."""
        self.call(rank, "attend", attentive)

    def post(self, rank: int, peer: int, direction: Direction, copies: Copies, notify: bytes | None = None) -> int:
        """Start a transfer on `rank`; returns its job number without waiting."""
        method = "post" if isinstance(copies, CopyList) else "post_pages"
        return int(self.call(rank, method, f"rank{peer}", direction, copies, notify))

    def cancel(self, rank: int, job: int) -> None:
        """Post no more of a job of `rank`."""
        self.call(rank, "cancel", job)

    def wait(self, rank: int, job: int, timeout_s: float = 30.0) -> Report:
        """How a job of `rank` ended; its state is "pending" if it has not within the time."""
        report: Report = self.call(rank, "wait", job, timeout_s, timeout_s=timeout_s + ANSWER_TIMEOUT_S)
        return report

    def run(self, rank: int, peer: int, direction: Direction, copies: Copies, notify: bytes | None = None) -> Report:
        """`post` and `wait`; raises `TransportError` unless the transfer was done."""
        report = self.wait(rank, self.post(rank, peer, direction, copies, notify))
        if report.state != "done":
            raise TransportError(f"transfer of rank {rank} with rank {peer} is {report.state}: {report.error}")
        return report

    def notify(self, rank: int, peer: int, payload: bytes) -> None:
        """Send a message from `rank` to `peer`."""
        self.call(rank, "notify", f"rank{peer}", payload)

    def notifications(self, rank: int, count: int, timeout_s: float | None = None) -> list[tuple[str, bytes]]:
        """Messages to `rank`: (peer name, payload). Returns once there are `count`, or the time is over."""
        wait_s = self.patience_s if timeout_s is None else timeout_s
        return list(self.call(rank, "notifications", count, wait_s, timeout_s=wait_s + ANSWER_TIMEOUT_S))

    def reset(self, fill_byte: int | None = 0) -> None:
        """Ready for the next case: forget jobs and messages, fill all memory unless `fill_byte` is None."""
        for rank in range(self.num_ranks):
            self.call(rank, "reset")
            if fill_byte is not None:
                self.memory(rank)[:] = fill_byte
                self.give(rank)


class LocalRanks(Ranks):
    """All ranks in this process. `make_transport(rank)` makes the transport of a rank, again after `shut`."""

    def __init__(self, num_ranks: int, memory_bytes: int, make_transport: Callable[[int], Transport]) -> None:
        super().__init__(num_ranks, memory_bytes)
        self._memory = [np.zeros(memory_bytes, dtype=np.uint8) for _ in range(num_ranks)]
        self._workers = [
            RankWorker(block_of(memory, "cpu"), partial(make_transport, rank))
            for rank, memory in enumerate(self._memory)
        ]
        for rank in range(num_ranks):
            self.open(rank)

    def call(self, rank: int, method: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """See `Ranks.call`. `timeout_s` is ignored, and an unforeseen error is raised as it is."""
        return getattr(self._workers[rank], method)(*arguments)

    def _array(self, rank: int) -> NDArray[np.uint8]:
        return self._memory[rank]

    def close(self) -> None:
        """See `Ranks.close`."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """The controller's side of a worker process: its channel and its memory file."""

    def __init__(self, rank: int, memory_bytes: int, environment: Mapping[str, str], device: str) -> None:
        self._rank = rank
        memory_fd = os.memfd_create(f"kvreshard-rank{rank}")
        try:
            os.ftruncate(memory_fd, memory_bytes)
            self._map = mmap.mmap(memory_fd, memory_bytes)
            self.channel, theirs = multiprocessing.Pipe()
            self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
            numbers = map(str, (theirs.fileno(), memory_fd, memory_bytes))
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", rank_worker.__name__, *numbers, f"rank{rank}", device],
                    pass_fds=(theirs.fileno(), memory_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, "PYTHONPATH": _python_path()},
                )
        finally:
            os.close(memory_fd)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)

    def call(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        """One call and its answer. Raises what the worker refuses, and `RankDiedError` when there is no answer."""
        call = Call(method, [msgspec.Raw(rank_worker.encode(argument)) for argument in arguments])
        try:
            self.channel.send_bytes(rank_worker.encode(call))
            has_answered = self.channel.poll(timeout_s)
            message = self.channel.recv_bytes() if has_answered else b""
        except (EOFError, OSError) as error:
            self.end(5.0)
            raise self._died(method, f"ended with exit code {self.process.returncode}") from error
        if not has_answered:
            self.end(0.0)
            raise self._died(method, f"did not answer within {timeout_s} s and was ended")
        answer = msgspec.msgpack.decode(message, type=Answer)
        if answer.raised == "crash":
            raise RuntimeError(f"rank {self._rank} could not serve {method}:\n{answer.text}")
        if answer.raised:
            raise (LayoutMismatch if answer.raised == "LayoutMismatch" else TransportError)(answer.text)
        return rank_worker.decode(answer.value, rank_worker.signature(method)[1])

    def end(self, grace_s: float) -> None:
        """Close the channel, which ends the worker; end it by force after `grace_s` seconds."""
        self.channel.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def free(self) -> None:
        """Release the memory, once no view of the array is left."""
        self._output.close()
        self.memory = np.zeros(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a test still has a view: released with it
            self._map.close()

    def words(self) -> str:
        """Output of the process so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _died(self, method: str, fact: str) -> RankDiedError:
        words = self.words()[-2000:]
        return RankDiedError(
            f"rank {self._rank} (pid {self.process.pid}) {fact} during {method}; the end of its output: {words}"
        )


class ProcessRanks(Ranks):
    """One worker process per rank.

    Args:
        num_ranks: how many.
        memory_bytes: of each rank; a page takes memory once it is touched.
        environment: added to the workers' environment, for example {"UCX_NET_DEVICES": "lo"}.
        devices: where each rank's memory is, "cpu" or "cuda:N"; all on the processor if not given.

    Raises:
        RankDiedError: a worker could not start.
        TransportError: its transport could not, or its device is not there.
    """

    def __init__(
        self,
        num_ranks: int,
        memory_bytes: int,
        environment: Mapping[str, str] | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        super().__init__(num_ranks, memory_bytes, devices)
        self._environment = dict(environment or {})
        self._workers: list[_Worker] = []
        try:
            for rank in range(num_ranks):
                self._workers.append(self._start(rank))
            for rank in range(num_ranks):
                self.open(rank)
        except BaseException:
            self.close()
            raise

    def call(self, rank: int, method: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """See `Ranks.call`. Raises `RankDiedError`."""
        return self._workers[rank].call(method, arguments, timeout_s)

    def _array(self, rank: int) -> NDArray[np.uint8]:
        return self._workers[rank].memory

    def words(self, rank: int) -> str:
        """Output of a rank's process so far: logs of NIXL and UCX."""
        return self._workers[rank].words()

    def process_id(self, rank: int) -> int:
        """For tests that stop or end a worker."""
        return self._workers[rank].process.pid

    def restart(self, rank: int) -> None:
        """Replace a rank's process and memory by new ones; its peers keep the old one's metadata."""
        self._workers[rank].end(5.0)
        self._workers[rank].free()
        self._workers[rank] = self._start(rank)
        self.open(rank)

    def _start(self, rank: int) -> _Worker:
        return _Worker(rank, self.memory_bytes, self._environment, self._devices[rank])

    def close(self) -> None:
        """See `Ranks.close`. A worker that does not end by itself is killed."""
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            worker.end(10.0)
            worker.free()


def _python_path() -> str:
    """A path with this package first, so that workers import it, installed or not."""
    here = str(Path(kvreshard.__path__[0]).parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
