"""The progress words of one source rank: how much of each request that is still computed is final, for readers that do not wait for its end.

Beside each lease word stands a progress word, in memory that peers may read. Who reads is not known here, and costs nothing.

1. A step begins (`begin`): the requests that it computes, each with its slot, its lease word, and its tokens before and after the step.
2. A layer has been computed (`layer`), the step has been computed (`end`): the words say so.
3. What a device computes is final later than the call that starts it. So with `record`, each of these leaves an event behind the device's
   work; `poll`, on another thread, writes the words of the events that have happened, in order.
4. A request loses its pages (`take_back`): its progress goes, then its lease word, before the caller goes on to overwrite them. A lease
   whose word is another by then gets no progress any more.

A word is packed: final tokens of all layers, tokens at the end of the step, and how many layers of the step are done. Those layers are
final up to the second number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import KvReshardError
from kvreshard.session.lease import FREE, LeaseTable

TOKEN_BITS, LAYER_BITS = 28, 8
MAX_TOKENS, MAX_LAYERS = (1 << TOKEN_BITS) - 1, (1 << LAYER_BITS) - 1

Event = Callable[[], bool]
"""Whether what was ordered before it has been done."""
Words = NDArray[np.uint64]


class Progress(NamedTuple):
    """What is final of a request on one rank: `num_tokens` in all layers, and `step_tokens` in the first `num_layers`.

    >>> Progress(100, 164, 3).pack() == 100 << 36 | 164 << 8 | 3, Progress.unpack(Progress(100, 164, 3).pack())
    (True, Progress(num_tokens=100, step_tokens=164, num_layers=3))
    """

    num_tokens: int
    step_tokens: int
    num_layers: int

    def pack(self) -> int:
        """One word. Raises KvReshardError for more tokens than it has room for."""
        if not 0 <= self.num_tokens <= self.step_tokens <= MAX_TOKENS:
            raise KvReshardError(
                f"progress from token {self.num_tokens} to {self.step_tokens}: must ascend, and not be above {MAX_TOKENS}"
            )
        return (self.num_tokens << TOKEN_BITS | self.step_tokens) << LAYER_BITS | min(self.num_layers, MAX_LAYERS)

    @classmethod
    def unpack(cls, word: int) -> Progress:
        """Of any 64 bits."""
        tokens = word >> LAYER_BITS
        return cls(tokens >> TOKEN_BITS, tokens & MAX_TOKENS, word & MAX_LAYERS)


class StepProgress(NamedTuple):
    """A request in a step: slot and word of its lease, tokens before and after the step."""

    slot: int
    word: int
    num_tokens: int
    step_tokens: int


class ProgressBoard:
    """See the module. `begin`, `layer`, `end` and `take_back` are for the engine's thread.

    `record`: leaves an event behind what a device was told to do; None where what was called has been done.
    """

    def __init__(self, table: LeaseTable, record: Callable[[], Event] | None = None) -> None:
        self._table, self._record = table, record
        self._lock = threading.Lock()
        self._slots = np.zeros(0, dtype=np.int64)
        self._leases = self._bases = self._ends = np.zeros(0, dtype=np.uint64)
        self._num_layers, self._is_computing = 0, False
        self._recorded: deque[tuple[Event, NDArray[np.int64], Words, Words]] = deque()

    @property
    def is_computing(self) -> bool:
        """Whether the last step that began computes anything that readers may follow."""
        return self._is_computing

    @property
    def is_pending(self) -> bool:
        """Whether events have been recorded that have not happened, as far as `poll` knows."""
        return bool(self._recorded)

    def begin(self, computed: Sequence[StepProgress]) -> None:
        """A step begins that computes these requests. What it follows has been ordered before, and counts with its first layer."""
        self._is_computing = bool(computed)
        if not computed:
            self._slots = self._slots[:0]
            return
        self._slots = np.array([one.slot for one in computed], dtype=np.int64)
        self._leases = np.array([one.word for one in computed], dtype=np.uint64)
        self._bases = np.array(
            [Progress(one.num_tokens, one.step_tokens, 0).pack() for one in computed], dtype=np.uint64
        )
        self._ends = np.array(
            [Progress(one.step_tokens, one.step_tokens, 0).pack() for one in computed], dtype=np.uint64
        )
        self._num_layers = 0

    def layer(self, num_layers: int) -> None:
        """So many layers of the step are done, counted from the first."""
        if num_layers > self._num_layers and len(self._slots):
            self._num_layers = num_layers
            self._note(self._bases | np.uint64(min(num_layers, MAX_LAYERS)))

    def end(self) -> None:
        """All of the step is done. A second call does nothing."""
        if len(self._slots):
            self._note(self._ends)
            self._slots = self._slots[:0]

    def take_back(self, slot: int, word: int) -> None:
        """End a lease at once, unless its slot has another by now. Then nothing may be read that its pages hold later."""
        with self._lock:
            if 0 <= slot < len(self._table) and self._table[slot] == word:
                self._table.progress[slot] = FREE
                self._table[slot] = FREE

    def poll(self) -> None:
        """Write what has been done meanwhile. For the session's thread. Raises what a broken device raises, of each event once."""
        while self._recorded:
            try:
                has_happened = self._recorded[0][0]()
            except Exception:
                self._recorded.popleft()  # never told; whoever asks for ever does nothing else any more
                raise
            if not has_happened:
                return
            _, slots, leases, words = self._recorded.popleft()
            self._write(slots, leases, words)

    def _note(self, words: Words) -> None:
        if self._record is None:
            self._write(self._slots, self._leases, words)
        else:
            self._recorded.append((self._record(), self._slots, self._leases, words))

    def _write(self, slots: NDArray[np.int64], leases: Words, words: Words) -> None:
        """Of the leases that still have their words, all at once."""
        with self._lock:
            is_held = self._table.leases[slots] == leases
            if is_held.all():
                self._table.progress[slots] = words
            else:
                self._table.progress[slots[is_held]] = words[is_held]
