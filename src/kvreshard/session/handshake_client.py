"""The client side of handshakes: one thread that asks many listeners at once, and is held up by none of them.

1. `ask` returns a future. Cancelling the future ends the question.
2. At most `MAX_AT_ONCE` questions are asked at one time, one per address; a further one for the same address waits for its turn.
3. Where more wait, the newest is next, and the one that has been asked longest gives way to it after `TURN_S`. It is asked anew, in turns
   of `AGAIN_S`, and fails if its time is over by then. So hosts that never answer cost a newcomer one turn, however many they are.
4. `close` ends every question and waits for none.

Each question that is being asked holds some four file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

import zmq
import zmq.asyncio

from kvreshard.model.errors import WireError
from kvreshard.session import nixl_connector
from kvreshard.session.engine_metadata import MAX_ENGINE_METADATA_BYTES, EngineMetadata, decode_engine_metadata
from kvreshard.session.exchange import Question
from kvreshard.session.handshake_messages import (
    MAX_MESSAGE_BYTES,
    Address,
    HandshakeError,
    metadata_request,
    outcome_message,
    read_answer,
)
from kvreshard.session.keys import Keys

MAX_AT_ONCE = 128
# More than the engines that one reads from; whoever sends requests names addresses.
MAX_SERVER_KEYS = 1024
TURN_S, AGAIN_S = 0.25, 2.0
CLOSE_S = 0.1


class HandshakeClient:
    """The questions of one rank. `ask` and `close` may be called from any thread; the rest runs on the client's own."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        # Of each address the questions that wait, oldest first.
        self._waiting: dict[Address, deque[Question]] = {}
        # Addresses of those that are not being asked. The last is the next.
        self._next: OrderedDict[Address, None] = OrderedDict()
        # In the order in which they were begun.
        self._asking: dict[Address, Question] = {}
        # Keys of the listeners that have answered last: each question that tries another one first is a refusal in that engine's log.
        self._server_keys: OrderedDict[Address, bytes] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(
        self, address: Address, message: bytes, timeout_s: float, max_bytes: int, keys: Keys | None = None
    ) -> Future[bytes]:
        """The listener's answer of at most `max_bytes` bytes. The future raises HandshakeError after `timeout_s`; where it
        waits for its turn then, when that comes.
        """
        pending = Question(address, message, timeout_s, max_bytes, keys, time.monotonic() + timeout_s)
        with self._lock:
            if self._is_closed:
                pending.answer.cancel()
                return pending.answer
            if self._loop is None:
                try:
                    self._start()
                except (OSError, RuntimeError) as error:
                    # As many files or threads as this process may have: the next question tries again.
                    pending.answer.set_exception(_cannot_be_asked(address, error))
                    return pending.answer
            self._call(lambda: self._add(pending))
        pending.answer.add_done_callback(lambda _: self._call(lambda: self._drop(pending)))
        return pending.answer

    def close(self) -> None:
        """Cancel all questions. Waits for none of them. A second call does nothing."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if self._loop is not None and self._thread is not None and not was_closed:
            self._call(self._loop.stop)
            self._thread.join(CLOSE_S)

    def _call(self, function: Callable[[], None]) -> None:
        """Call it soon on the client's thread; not at all if that has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _start(self) -> None:
        """Start the client's thread. Raises OSError or RuntimeError."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._run, args=(loop,), name="kvreshard-handshake", daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._thread = loop, thread

    # Below: on the client's thread only.

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * self._max_at_once + 16)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for pending in [*self._asking.values(), *itertools.chain(*self._waiting.values())]:
                pending.answer.cancel()
        finally:
            self._context.destroy(linger=0)
            loop.close()

    def _add(self, pending: Question) -> None:
        address = pending.address
        self._waiting.setdefault(address, deque()).append(pending)
        if address not in self._asking:
            self._next[address] = None
            self._next.move_to_end(address)
        self._begin()

    def _begin(self) -> None:
        """Ask what waits, the newest first, as far as there is room or one that has had its turn gives way."""
        if self._timer is not None:
            self._timer.cancel()
        while not self._is_closed and (pending := self._newest()) is not None:
            now_s = time.monotonic()
            if len(self._asking) >= self._max_at_once:
                # A question that was asked before lets the oldest have a longer turn.
                ends_s = self._oldest().began_s + (TURN_S if pending.began_s == 0.0 else AGAIN_S)
                if now_s < ends_s:
                    self._timer = asyncio.get_running_loop().call_later(ends_s - now_s, self._begin)
                    return
                self._give_way(self._oldest())
            address = pending.address
            del self._next[address]
            self._waiting[address].popleft()
            self._asking[address] = pending
            pending.began_s, pending.server_key = now_s, self._server_keys.get(address)
            pending.task = asyncio.get_running_loop().create_task(self._ask(pending))

    async def _ask(self, pending: Question) -> None:
        outcome: bytes | Exception
        try:
            outcome = await pending.ask(self._context)
            if pending.server_key is not None:
                self._server_keys[pending.address] = pending.server_key
                self._server_keys.move_to_end(pending.address)
                if len(self._server_keys) > MAX_SERVER_KEYS:
                    self._server_keys.popitem(last=False)
        except Exception as error:  # noqa: BLE001  it belongs to whoever asked
            outcome = error if isinstance(error, HandshakeError) else _cannot_be_asked(pending.address, error)
        pending.task = None
        self._leave(pending)
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            if isinstance(outcome, Exception):
                pending.answer.set_exception(outcome)
            else:
                pending.answer.set_result(outcome)
        self._begin()

    def _drop(self, pending: Question) -> None:
        """Stop a question that was cancelled."""
        if self._asking.get(pending.address) is pending:
            self._leave(pending)
            self._begin()

    def _newest(self) -> Question | None:
        """The question that is asked next; those that were cancelled are dropped."""
        while self._next:
            address = next(reversed(self._next))
            waiting = self._waiting[address]
            while waiting and waiting[0].answer.done():
                waiting.popleft()
            if waiting:
                return waiting[0]
            del self._next[address], self._waiting[address]
        return None

    def _oldest(self) -> Question:
        """The question that has been asked longest, of those without a connection if there is one."""
        asking = self._asking.values()
        return next((one for one in asking if not one.is_connected), None) or next(iter(asking))

    def _give_way(self, pending: Question) -> None:
        """End an attempt; its question is asked anew when no newer one waits."""
        address = pending.address
        self._waiting.setdefault(address, deque()).appendleft(pending)
        self._leave(pending)
        self._next.move_to_end(address, last=False)

    def _leave(self, pending: Question) -> None:
        """Its address is not asked any more; the next question for it may be."""
        address = pending.address
        if pending.task is not None:
            pending.task.cancel()
        del self._asking[address]
        if self._waiting.get(address):
            self._next[address] = None
        else:
            self._waiting.pop(address, None)


def _cannot_be_asked(address: Address, error: Exception) -> HandshakeError:
    return HandshakeError(f"the engine at {address} cannot be asked: {type(error).__name__}: {error}")


def read_engine_metadata(address: Address, reply: bytes) -> EngineMetadata:
    """The engine metadata that a listener has answered with. Raises HandshakeError for anything else."""
    try:
        return decode_engine_metadata(reply)
    except WireError as error:
        if nixl_connector.is_answer(reply):
            raise HandshakeError(
                f"the engine at {address} uses vLLM's own NixlConnector, and this side kvreshard's ReshardConnector: start that engine with "
                '"kv_connector_module_path":"kvreshard.vllm" as well, or neither of them'
            ) from None
        raise HandshakeError(f"the engine at {address} answered: {read_answer(reply) or error}") from error


def fetch_engine_metadata(
    address: Address, engine: str, rank: int, timeout_s: float, keys: Keys | None = None
) -> EngineMetadata:
    """The engine metadata of the engine that listens there. Raises HandshakeError naming the address and the remedy."""
    reply = _ask_and_wait(address, metadata_request(engine, rank), timeout_s, MAX_ENGINE_METADATA_BYTES, keys)
    return read_engine_metadata(address, reply)


def send_outcome(
    address: Address, engine: str, rank: int, text: str, is_good: bool, timeout_s: float, keys: Keys | None = None
) -> None:
    """Report to the other side how the comparison went. Raises HandshakeError if that is not possible."""
    _ask_and_wait(address, outcome_message(engine, rank, text, is_good), timeout_s, MAX_MESSAGE_BYTES, keys)


def _ask_and_wait(address: Address, message: bytes, timeout_s: float, max_bytes: int, keys: Keys | None) -> bytes:
    with contextlib.closing(HandshakeClient()) as client:
        return client.ask(address, message, timeout_s, max_bytes, keys).result()
