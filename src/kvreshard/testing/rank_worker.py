"""What does one rank of a test do when its controller asks?

A `RankWorker` has one block of memory (`rank_memory`) and one transport, and serves one request at a time:

1. `Hello`: make the transport, register the memory; answers with its address. `Upload` and `Download`: carry bytes between a device and
   what the controller sees.
2. `Metadata`, `Connect`, `Disconnect`: peers are called "rank0", "rank1", ...
3. `Post` starts a copy list and returns a job number at once; `Wait` tells how the job ended.
4. `Notify`, `Notifications`, `Attend`; `Reset` forgets settled jobs and unread messages.
5. `Load`, `Move`, `Await`: the part of an engine's rank, see `rank_mover`.
6. `Close` closes the transport; the next `Hello` makes a new one, as a restarted engine would.

As a program it serves a controller over an inherited socket: frames of a 4-byte length and msgpack. A refusal by the
transport is an answer, not the end of the worker. It ends when the socket closes, so that no worker outlives its
controller.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model import KvReshardError, LayoutMismatch
from kvreshard.plan.copies import Copies, CopyList, Page, PagedCopies
from kvreshard.testing.rank_memory import Block, DeviceBlock, HostBlock
from kvreshard.testing.rank_mover import Await, Load, Move, Outcome, RankMover
from kvreshard.transport.base import (
    Direction,
    Transfer,
    TransferState,
    Transport,
    TransportError,
)


class Hello(msgspec.Struct, tag=True):
    """Make the transport and register the memory."""


class Upload(msgspec.Struct, tag=True):
    """Give the memory the bytes that the controller has written."""


class Download(msgspec.Struct, tag=True):
    """Give the controller the bytes of the memory."""


class Metadata(msgspec.Struct, tag=True):
    """Tell the transport's metadata."""


class Connect(msgspec.Struct, tag=True):
    """Add a peer."""

    peer: str
    metadata: bytes


class Disconnect(msgspec.Struct, tag=True):
    """Remove a peer."""

    peer: str


class Post(msgspec.Struct, tag=True):
    """Start a copy list; the arrays are int64 in this machine's byte order."""

    peer: str
    direction: Direction
    src_address: bytes
    dst_address: bytes
    length: bytes
    notify: bytes | None


class Cancel(msgspec.Struct, tag=True):
    """Post no more of a job."""

    job: int


class PostPaged(msgspec.Struct, tag=True):
    """Start paged copies; the arrays are as in `Post`, strides and counts those of the source and of the destination."""

    peer: str
    direction: Direction
    src_start: bytes
    dst_start: bytes
    length: bytes
    strides: tuple[int, int]
    counts: tuple[int, int]
    src_page: bytes
    dst_page: bytes


class Wait(msgspec.Struct, tag=True):
    """Tell how a job ended, or that it has not within the time."""

    job: int
    timeout_s: float


class Notify(msgspec.Struct, tag=True):
    """Send a message."""

    peer: str
    payload: bytes


class Notifications(msgspec.Struct, tag=True):
    """Tell the messages, once there are `count` of them or the time is over."""

    count: int
    timeout_s: float


class Attend(msgspec.Struct, tag=True):
    """Set the transport attentive or not."""

    attentive: bool


class Reset(msgspec.Struct, tag=True):
    """Forget settled jobs and unread messages."""


class Close(msgspec.Struct, tag=True):
    """Close the transport."""


Request = (
    Hello | Upload | Download | Metadata | Connect | Disconnect | Post | PostPaged | Cancel | Wait | Notify | Notifications
    | Attend | Reset | Close
    | Load | Move | Await
)  # fmt: skip


class Report(msgspec.Struct, frozen=True):
    """How a job stands: `state` is a `TransferState` value, `seconds` from post to settlement."""

    state: str
    error: str | None
    seconds: float | None
    num_bytes: int
    num_descriptors: int


class Answer(msgspec.Struct):
    """The reply to every request; which fields are set depends on the request.

    `refused` is the text of a `TransportError`, or of a `LayoutMismatch` if `is_mismatch`; `crashed` the traceback of anything else.
    """

    refused: str | None = None
    is_mismatch: bool = False
    crashed: str | None = None
    address: int = 0
    start_s: float = 0.0
    data: bytes = b""
    job: int = 0
    report: Report | None = None
    messages: list[tuple[str, bytes]] = []
    outcome: Outcome | None = None
    compile_s: float = 0.0


class RankWorker:
    """One rank: its memory, and the transport that `make_transport` makes."""

    def __init__(self, block: Block, make_transport: Callable[[], Transport]) -> None:
        self._block = block
        self._make_transport = make_transport
        self._transport: Transport | None = None
        self._jobs: dict[int, Transfer] = {}
        self._pages: dict[object, Page] = {}
        self._num_jobs = 0
        self._unread: list[tuple[str, bytes]] = []
        self._mover: RankMover | None = None

    def serve(self, request: Request) -> Answer:
        """Do what is asked; never raises."""
        try:
            return self._serve(request)
        except (TransportError, KvReshardError) as error:
            return Answer(refused=str(error), is_mismatch=isinstance(error, LayoutMismatch))
        except Exception:  # noqa: BLE001  the controller reports it, and the rank lives on
            return Answer(crashed=traceback.format_exc())

    def _serve(self, request: Request) -> Answer:
        match request:
            case Hello():
                return self._hello()
            case Upload():
                self._block.upload()
                return Answer()
            case Download():
                self._block.download()
                return Answer()
        transport = self._transport
        if transport is None:
            raise TransportError("this rank has no transport yet; say Hello first")
        match request:
            case Metadata():
                return Answer(data=transport.metadata())
            case Post() | PostPaged():
                return self._post(transport, request)
            case Wait():
                return Answer(report=self._wait(request))
            case Notifications():
                return Answer(messages=self._messages(transport, request))
            case Load():
                self._mover = RankMover(transport, self._block, request)
                return Answer(compile_s=self._mover.compile_s)
            case Move() | Await():
                return self._move(request)
            case _:
                self._change(transport, request)
                return Answer()

    def _move(self, request: Move | Await) -> Answer:
        if self._mover is None:
            raise TransportError("this rank has no layouts yet; say Load first")
        if isinstance(request, Move):
            return Answer(job=self._mover.start(request))
        return Answer(outcome=self._mover.wait(request))

    def _change(self, transport: Transport, request: Request) -> None:
        """The requests without a result."""
        match request:
            case Connect():
                transport.add_peer(request.peer, request.metadata)
            case Disconnect():
                transport.remove_peer(request.peer)
            case Cancel():
                transport.cancel(self._jobs[request.job])
            case Notify():
                transport.notify(request.peer, request.payload)
            case Attend():
                transport.set_attentive(request.attentive)
            case Reset():
                self._jobs = {number: job for number, job in self._jobs.items() if job.state is TransferState.PENDING}
                transport.notifications()
                self._unread = []
            case Close():
                transport.close()

    def _hello(self) -> Answer:
        started_s = time.monotonic()
        self._transport = self._make_transport()
        self._transport.register([self._block.region])
        return Answer(address=self._block.region.address, start_s=time.monotonic() - started_s)

    def _post(self, transport: Transport, request: Post | PostPaged) -> Answer:
        copies: Copies
        notify = None
        if isinstance(request, Post):
            columns = request.src_address, request.dst_address, request.length
            copies = CopyList(0, 0, *(_numbers(column) for column in columns))
            notify = request.notify
        else:
            # Equal pages are one object, as in an engine: what a transport prepares for it is used again.
            entries = request.src_start, request.dst_start, request.length
            key = *entries, request.strides, request.counts
            src, dst, length = (_numbers(column) for column in entries)
            page = self._pages.setdefault(key, Page.of(src, dst, length, request.strides, request.counts))
            copies = PagedCopies(0, 0, page, _numbers(request.src_page), _numbers(request.dst_page))
        self._num_jobs += 1
        self._jobs[self._num_jobs] = transport.post(request.peer, request.direction, copies, notify)
        return Answer(job=self._num_jobs)

    def _wait(self, request: Wait) -> Report:
        transfer = self._jobs[request.job]
        with contextlib.suppress(TransportError, TimeoutError):  # the report tells
            transfer.wait(request.timeout_s)
        error = None if transfer.error is None else str(transfer.error)
        return Report(transfer.state.value, error, transfer.seconds, transfer.num_bytes, transfer.num_descriptors)

    def _messages(self, transport: Transport, request: Notifications) -> list[tuple[str, bytes]]:
        deadline_s = time.monotonic() + request.timeout_s
        while True:
            self._unread += [(message.peer, message.payload) for message in transport.notifications()]
            if len(self._unread) >= request.count or time.monotonic() >= deadline_s:
                messages, self._unread = self._unread, []
                return messages
            time.sleep(0.0002)  # a poll with a deadline: transports have no blocking receive

    def stop(self) -> None:
        """Close the transport, if there is one."""
        if self._transport is not None:
            self._transport.close()


def _numbers(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, dtype=np.int64)


def send_frame(channel: socket.socket, message: Any) -> None:
    """Send one message."""
    data = msgspec.msgpack.encode(message)
    channel.sendall(struct.pack("!I", len(data)))
    channel.sendall(data)


def receive_frame(channel: socket.socket) -> bytearray:
    """Receive one message's bytes; raises `EOFError` when the other side is gone."""
    (size,) = struct.unpack("!I", _receive_exactly(channel, 4))
    return _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise EOFError("the other side of the channel is gone")
        view = view[count:]
    return data


def make_process_transport(kind: str, name: str, enter: Callable[[], None] = lambda: None) -> Transport:
    """The transport of a rank that is a process of its own: only "nixl" reaches other processes."""
    if kind != "nixl":
        raise TransportError(f"transport {kind!r} does not reach other processes; use 'nixl', or ranks in one process")
    from kvreshard.transport.nixl import NixlTransport

    return NixlTransport(name, enter=enter)


def leave_cpu_torch_out() -> None:
    """Make a CPU build of torch one that is not installed, for this process, which has no use for it.

    NIXL 1.5.1 asks torch for its CUDA version, and imports all of a CPU build to hear that it has none: 1.2 s of each rank's start
    (`nixl_meta_utils.detect_cuda_major`). Others it reads from the disk.
    """
    with contextlib.suppress(PackageNotFoundError):
        if "torch" not in sys.modules and version("torch").endswith("+cpu"):
            sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Arguments: socket and memory file descriptors, memory bytes, transport, name, device."""
    kind, name, device = arguments[3:6]
    if device == "cpu":
        leave_cpu_torch_out()
    channel = socket.socket(fileno=int(arguments[0]))
    seen = np.frombuffer(mmap.mmap(int(arguments[1]), int(arguments[2])), dtype=np.uint8)
    try:
        block = HostBlock(int(seen.ctypes.data), seen.nbytes) if device == "cpu" else DeviceBlock(seen, device)
    except TransportError as error:
        with contextlib.suppress(
            EOFError, ConnectionError
        ):  # the first question is answered, the rank does not live on
            receive_frame(channel)
            send_frame(channel, Answer(refused=str(error)))
        return
    worker = RankWorker(block, lambda: make_process_transport(kind, name, block.enter))
    decoder = msgspec.msgpack.Decoder(Request)
    try:
        while True:
            send_frame(channel, worker.serve(decoder.decode(receive_frame(channel))))
    except (EOFError, ConnectionError):
        worker.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
