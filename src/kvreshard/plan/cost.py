"""Direct or staged: the one estimate that decides how copies are read.

- **direct**: post every copy; costs a descriptor each.
- **staged**: read what is close together at the source, in few large pieces, into a buffer, then permute locally.

`CostModel.prefers_staging` decides, from descriptors, bytes wanted and bytes read (`Work`). It is asked for a page in the middle of a
sequence when a route is compiled (`choose`), and for a request once its tables are known (`reads`), unless staging cannot pay for the
page already. docs/structure.md has the rule as a table.

The constants were measured with NIXL 1.5.1 over UCX between two processes of one host, by the clock, of two cores, and for caches on a
device with one GPU (`usual_cost`). Those of another host differ by more than staging gains, so staging must be predicted twice as fast
(`DEFAULT_SPEEDUP`). With constants that were measured on this host a fifth is enough (`MEASURED_SPEEDUP`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Real
from typing import Literal

import msgspec

from kvreshard.model.errors import UsageError
from kvreshard.model.expect import expect
from kvreshard.plan.byte_ranges import merged
from kvreshard.plan.pattern import Pattern

Way = Literal["direct", "staged"]
BATCH_RATIO = 4
# A damaged file may hold any number: what is counted with these stays a number that JSON and an integer can be.
MAX_CONSTANT = 1e18
DEFAULT_SPEEDUP, MEASURED_SPEEDUP = 2.0, 1.2


class Work(msgspec.Struct, frozen=True):
    """What both ways have to do.

    `num_copies`: descriptors of the direct way, of `num_bytes` that are wanted. `num_reads`: descriptors of the staged way, of
    `num_read_bytes`, gaps included. `num_runs`: of the local moves behind it, in `num_batches`; 0 batches: a page, of which many share one.
    """

    num_copies: int
    num_bytes: int
    num_reads: int
    num_read_bytes: int
    num_runs: int
    num_batches: float = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per posted copy and per locally moved run; bytes per second of many copies, of local moves, and of staging batches.

    `hidden_share`: of reading batches and moving them on, how much of the shorter is hidden behind the other, where there are many; 0
    where nobody has measured it, which is never too good. `batch_s`: seconds that a batch takes beside its bytes, 0 where the next one hides
    them. `min_speedup`: how many times as fast staging must be predicted to be taken.
    """

    copy_s: float = 1.2e-6
    read_bytes_per_s: float = 1.4e10
    move_run_s: float = 8e-9
    move_bytes_per_s: float = 1.8e10
    stage_bytes_per_s: float = 9e9
    hidden_share: float = 0.0
    batch_s: float = 0.0
    min_speedup: float = DEFAULT_SPEEDUP

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            expect(number, Real, name, "seconds, bytes per second, or a ratio")
        if not 0 <= self.hidden_share <= 1:
            raise UsageError(f"hidden_share is {self.hidden_share}; a share is from 0 to 1")
        for name, number in asdict(self).items():
            least = 0 if name in ("hidden_share", "batch_s") else 1 / MAX_CONSTANT
            if not least <= number <= MAX_CONSTANT:
                raise UsageError(
                    f"{name} is {number}; the constants of a cost model must be positive, from 1e-18 to 1e18"
                )

    def direct_s(self, work: Work) -> float:
        """Seconds to post every copy."""
        return work.num_copies * self.copy_s + work.num_bytes / self.read_bytes_per_s

    def staged_s(self, work: Work) -> float:
        """Seconds to read into the buffer and to move what is wanted on.

        A batch is moved on while the next one is read: the last one hides behind none.
        """
        read_s = work.num_reads * self.copy_s + work.num_read_bytes / self.stage_bytes_per_s
        move_s = work.num_runs * self.move_run_s + work.num_bytes / self.move_bytes_per_s
        hidden_s = self.hidden_share * (1 - 1 / max(1, work.num_batches)) * min(read_s, move_s)
        return read_s + move_s - hidden_s + work.num_batches * self.batch_s

    def prefers_staging(self, work: Work) -> bool:
        """Whether staging is predicted to be so much faster that it is taken."""
        return self.min_speedup * self.staged_s(work) < self.direct_s(work)

    def may_prefer_staging(self, num_copies: int, num_bytes: int, least_reads: int = 0) -> bool:
        """`prefers_staging` if so many reads bring the bytes that are wanted and no others: where not even that pays, nothing else is counted."""
        read_s, move_s = (
            least_reads * self.copy_s + num_bytes / self.stage_bytes_per_s,
            num_bytes / self.move_bytes_per_s,
        )
        least_s = read_s + move_s - self.hidden_share * min(read_s, move_s)
        return self.min_speedup * least_s < num_copies * self.copy_s + num_bytes / self.read_bytes_per_s

    @property
    def least_batch_bytes(self) -> int:
        """The smallest batch that takes `BATCH_RATIO` times as long to read as a batch takes beside its bytes."""
        return int(BATCH_RATIO * self.batch_s * self.stage_bytes_per_s)

    @property
    def max_gap_bytes(self) -> int:
        """The longest gap that is cheaper to read than to post the piece behind it as a copy of its own."""
        return int(self.copy_s * self.stage_bytes_per_s)


# Of caches in a GPU's memory: two processes of one H200 by `cuda_ipc`, NIXL 1.5.1 (bench/gpu/results). No network has been measured.
DEVICE_COST = CostModel(4.3e-6, 2.8e11, 1e-9, 4.3e11, 2.8e11, batch_s=3e-4)


def usual_cost(device: str) -> CostModel:
    """The default constants for caches on a device ("cpu", "cuda:0", ...)."""
    return CostModel() if device == "cpu" else DEVICE_COST


class Choice(msgspec.Struct, frozen=True):
    """How a transfer is read, and why. Seconds and counts are for one page with all fields of the transfer.

    `is_open`: a request decides anew, since neighbouring pages or batches may make the other way pay. `model`: by which it was chosen.
    """

    way: Way = "direct"
    forced: bool = False
    direct_s: float = 0.0
    staged_s: float = 0.0
    num_runs: int = 0
    num_reads: int = 0
    run_bytes: int = 0
    model: CostModel = CostModel()
    is_open: bool = False

    def __str__(self) -> str:
        """The choice in a sentence."""
        why = "forced" if self.forced else f"{self.direct_s * 1e6:.0f} us direct, {self.staged_s * 1e6:.0f} us staged"
        if self.way == "direct":
            return f"direct: {self.num_runs} runs of {self.run_bytes} B per page ({why})"
        return f"staged: {self.num_reads} reads instead of {self.num_runs} runs of {self.run_bytes} B per page ({why})"


def choose(pattern: Pattern, model: CostModel, forced: Way | None = None, *, is_state: bool = False) -> Choice:
    """The way for pages like this pattern's. A state is one page in every request: no neighbours make staging pay where its page does not."""
    num_fields, num_runs = len(pattern.bases.src), len(pattern.lengths)
    boxes = merged(pattern.src_offsets, pattern.src_offsets + pattern.lengths, max_gap_bytes=model.max_gap_bytes)
    box_bytes = int((boxes.stop - boxes.start).sum())
    work = Work(
        num_fields * num_runs,
        pattern.num_bytes,
        num_fields * len(boxes.start),
        num_fields * box_bytes,
        num_fields * num_runs,
    )
    way: Way = forced or ("staged" if model.prefers_staging(work) else "direct")
    return Choice(
        way,
        forced is not None,
        model.direct_s(work),
        model.staged_s(work),
        work.num_copies,
        work.num_reads,
        int(pattern.lengths.max()) if num_runs else 0,
        model,
        forced is None
        and (way == "staged" or not is_state)
        and model.may_prefer_staging(work.num_copies, work.num_bytes),
    )
