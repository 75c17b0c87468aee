"""One rank of a test or of `kvreshard verify`: a block of memory, a transport, and the engine part that moves requests.

A controller (`ranks`) calls the public methods of `RankWorker`: directly in its own process, or over a socket. A rank in a process of its own
runs this file as a program and serves calls over an inherited connection: messages are msgpack, arguments decoded by the method's type hints. A
refusal is an answer. The worker ends when the connection closes, so none outlives its controller.

Peers are called "rank0", "rank1", ... Jobs are numbers. Arrays travel as the bytes of int64.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any, Literal, get_type_hints

import msgspec
import numpy as np

from kvreshard.model import KvReshardError, LayoutMismatch
from kvreshard.model.tables import Request
from kvreshard.plan.copies import CopyList, Page, PagedCopies
from kvreshard.testing.rank_memory import Block, block_of
from kvreshard.testing.rank_mover import Load, Outcome, RankMover
from kvreshard.transport.base import Direction, Transfer, TransferState, Transport, TransportError
from kvreshard.transport.nixl import NixlTransport


class Report(msgspec.Struct, frozen=True):
    """State of a job: `state` is a `TransferState` value, `seconds` from post to settlement."""

    state: str
    error: str | None
    seconds: float | None
    num_bytes: int
    num_descriptors: int


class Call(msgspec.Struct):
    """A method of `RankWorker` and its arguments, each encoded."""

    method: str
    arguments: list[msgspec.Raw]


class Answer(msgspec.Struct):
    """The result of a method, encoded; or the kind and text of the error that it raised."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    raised: Literal["", "TransportError", "LayoutMismatch", "crash"] = ""
    text: str = ""


@cache
def signature(method: str) -> tuple[dict[str, Any], Any]:
    """Types of a method's arguments in order, and of its result. Raises KeyError unless the method is public."""
    public = {
        name: found for name, found in inspect.getmembers(RankWorker, inspect.isfunction) if not name.startswith("_")
    }
    hints = get_type_hints(public[method])
    return hints, hints.pop("return")


class RankWorker:
    """One rank: its memory, and the transport that `make_transport` makes. Not safe for use from several threads."""

    def __init__(self, block: Block, make_transport: Callable[[], Transport]) -> None:
        self._block = block
        self._make_transport = make_transport
        self._made: Transport | None = None
        self._mover: RankMover | None = None
        self._jobs: dict[int, Transfer] = {}
        self._pages: dict[bytes, Page] = {}
        self._num_jobs = 0
        self._unread: list[tuple[str, bytes]] = []

    def open(self) -> tuple[int, float]:
        """Make the transport, as a restarted engine would, and register the memory: its address, and the seconds that it took."""
        started_s = time.monotonic()
        self._made = self._make_transport()
        self._made.register([self._block.region])
        return self._block.region.address, time.monotonic() - started_s

    def close(self) -> None:
        """Close the transport, if there is one."""
        if self._made is not None:
            self._made.close()

    def upload(self) -> None:
        """Copy the controller's bytes to the memory."""
        self._block.upload()

    def download(self) -> None:
        """Copy the memory's bytes to the controller."""
        self._block.download()

    def metadata(self) -> bytes:
        """The transport's metadata."""
        return self._transport().metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        """Add a peer."""
        self._transport().add_peer(peer, metadata)

    def disconnect(self, peer: str) -> None:
        """Remove a peer."""
        self._transport().remove_peer(peer)

    def attend(self, attentive: bool) -> None:
        """Set the transport attentive or not."""
        self._transport().set_attentive(attentive)

    def post(self, peer: str, direction: Direction, copies: CopyList, notify: bytes | None) -> int:
        """Start a copy list; returns its job at once."""
        self._num_jobs += 1
        self._jobs[self._num_jobs] = self._transport().post(peer, direction, copies, notify)
        return self._num_jobs

    def post_pages(self, peer: str, direction: Direction, copies: PagedCopies, notify: bytes | None) -> int:
        """Start paged copies; returns their job at once."""
        # Equal pages are one object, as in an engine, so that a transport prepares them once.
        page = self._pages.setdefault(encode(copies.page), copies.page)
        self._num_jobs += 1
        self._jobs[self._num_jobs] = self._transport().post(
            peer, direction, msgspec.structs.replace(copies, page=page), notify
        )
        return self._num_jobs

    def cancel(self, job: int) -> None:
        """Post no more of a job."""
        self._transport().cancel(self._jobs[job])

    def wait(self, job: int, timeout_s: float) -> Report:
        """How a job ended, or that it has not within the time."""
        transfer = self._jobs[job]
        with contextlib.suppress(TransportError, TimeoutError):  # the report has it
            transfer.wait(timeout_s)
        error = None if transfer.error is None else str(transfer.error)
        return Report(transfer.state.value, error, transfer.seconds, transfer.num_bytes, transfer.num_descriptors)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message."""
        self._transport().notify(peer, payload)

    def notifications(self, count: int, timeout_s: float) -> list[tuple[str, bytes]]:
        """Sender and payload of the messages so far, once there are `count` of them or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._unread += [(message.peer, message.payload) for message in self._transport().notifications()]
            if len(self._unread) >= count or time.monotonic() >= deadline_s:
                messages, self._unread = self._unread, []
                return messages
            time.sleep(0.0002)  # transports have no blocking receive

    def reset(self) -> None:
        """Drop settled jobs and unread messages."""
        self._jobs = {number: job for number, job in self._jobs.items() if job.state is TransferState.PENDING}
        self._transport().notifications()
        self._unread = []

    def load(self, load: Load) -> float:
        """Take part in a pair of engines; returns the seconds of compiling and proving its routes."""
        self._mover = RankMover(self._transport(), self._block, load)
        return self._mover.compile_s

    def start_request(self, request: Request, report: bytes, push: bool) -> int:
        """See `RankMover.start`."""
        return self._engine().start(request, report, push)

    def wait_request(self, job: int, timeout_s: float) -> Outcome:
        """See `RankMover.wait`."""
        return self._engine().wait(job, timeout_s)

    def _transport(self) -> Transport:
        if self._made is None:
            raise TransportError("this rank has no transport yet; call `open` first")
        return self._made

    def _engine(self) -> RankMover:
        if self._mover is None:
            raise TransportError("this rank has no layouts yet; call `load` first")
        return self._mover


def encode(value: Any) -> bytes:
    """A value of a call as msgpack."""
    return _encoder.encode(value)


def decode(message: bytes | msgspec.Raw, hint: Any) -> Any:
    """A value of a call, of the type `hint`."""
    return msgspec.msgpack.decode(
        message, type=hint, dec_hook=lambda _, content: np.frombuffer(content, dtype=np.int64)
    )


def _encode_array(array: Any) -> bytes:
    if not isinstance(array, np.ndarray):
        raise NotImplementedError(f"a call takes no {type(array).__name__}")
    return array.astype(np.int64).tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def serve(worker: RankWorker, message: bytes) -> Answer:
    """Carry out one call; never raises."""
    try:
        call = msgspec.msgpack.decode(message, type=Call)
        hints, _ = signature(call.method)
        types = zip(call.arguments, hints.values(), strict=True)
        result = getattr(worker, call.method)(*(decode(raw, hint) for raw, hint in types))
        return Answer(msgspec.Raw(encode(result)))
    except (TransportError, KvReshardError) as error:
        return Answer(
            raised="LayoutMismatch" if isinstance(error, LayoutMismatch) else "TransportError", text=str(error)
        )
    except Exception:  # noqa: BLE001  the controller reports it, and the rank lives on
        return Answer(raised="crash", text=traceback.format_exc())


def leave_cpu_torch_out() -> None:
    """Hide a CPU build of torch from this process, which does not use it.

    NIXL 1.5.1 imports all of a CPU build to read that it has no CUDA version (`nixl_meta_utils.detect_cuda_major`): 1.2 s of each rank's
    start. For other builds it reads a file.
    """
    with contextlib.suppress(PackageNotFoundError):
        if "torch" not in sys.modules and version("torch").endswith("+cpu"):
            sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails


def main(arguments: list[str]) -> None:
    """Serve until the connection closes. Arguments: connection and memory file descriptors, memory bytes, name, device."""
    name, device = arguments[3:5]
    if device == "cpu":
        leave_cpu_torch_out()
    channel: Connection[Any, Any] = Connection(int(arguments[0]))
    array = np.frombuffer(mmap.mmap(int(arguments[1]), int(arguments[2])), dtype=np.uint8)
    try:
        block = block_of(array, device)
    except TransportError as error:
        with contextlib.suppress(EOFError, ConnectionError):  # answers the first call, and ends
            channel.recv_bytes()
            channel.send_bytes(encode(Answer(raised="TransportError", text=str(error))))
        return
    worker = RankWorker(block, lambda: NixlTransport(name, enter=block.enter))
    try:
        while True:
            channel.send_bytes(encode(serve(worker, channel.recv_bytes())))
    except (EOFError, ConnectionError):
        worker.close()


if __name__ == "__main__":
    main(sys.argv[1:])
