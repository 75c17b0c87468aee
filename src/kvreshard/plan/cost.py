"""Direct or staged: which way is a lane cheaper?

A correct plan can be a useless one: a head split of a token-major cache is thousands of runs of a few hundred bytes. So a
lane is read in one of two ways:

- **direct**: post every run; costs a copy's overhead per run.
- **staged**: read what is close together at the source, in few large pieces, into a staging buffer, then permute locally.

Both are estimated for one page in the middle of a sequence, from measured constants, and the cheaper one is taken, unless
it is forced. Copies that are posted by the thousand are shared by NIXL's threads, the few large reads of a staging batch are not:
the bytes of the two are read at different rates. The default constants were measured with NIXL 1.5.1 over UCX between two processes of
one host, by the clock: of two cores, and for caches on a device with one GPU (`usual_cost`). A request is looked at once more when its tables are known (`reads`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

from kvreshard.plan.pattern import Pattern
from kvreshard.plan.slot import find_boxes

Way = Literal["direct", "staged"]
BATCH_RATIO = 4


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per posted copy and per locally moved run; bytes per second of many copies, of local moves, and of staging batches.

    `hidden_share`: of reading batches and moving them on, how much of the shorter is hidden behind the other, where there are many; 0
    where nobody has measured it, which is never too good. `batch_s`: seconds that a batch takes beside its bytes, 0 where the next one hides
    them.
    """

    copy_s: float = 1.2e-6
    read_bytes_per_s: float = 1.4e10
    move_run_s: float = 8e-9
    move_bytes_per_s: float = 1.8e10
    stage_bytes_per_s: float = 9e9
    hidden_share: float = 0.0
    batch_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hidden_share <= 1:
            raise ValueError(f"hidden_share is {self.hidden_share}; a share is from 0 to 1")
        for name, number in asdict(self).items():
            least = 0 if name in ("hidden_share", "batch_s") else math.ulp(0)
            if not (math.isfinite(number) and number >= least):
                raise ValueError(f"{name} is {number}; the constants of a cost model must be positive")

    def direct_s(self, num_copies: int, num_bytes: int) -> float:
        """Seconds to post so many copies of so many bytes together."""
        return num_copies * self.copy_s + num_bytes / self.read_bytes_per_s

    def staged_s(
        self, num_reads: int, num_read_bytes: int, num_runs: int, num_bytes: int, num_batches: float = 0
    ) -> float:
        """Seconds to read so many pieces into staging and move `num_bytes` of it on, in so many runs and batches.

        A batch is moved on while the next one is read: the last one hides behind none. 0 batches: a page, of which many share one.
        """
        read_s = num_reads * self.copy_s + num_read_bytes / self.stage_bytes_per_s
        move_s = num_runs * self.move_run_s + num_bytes / self.move_bytes_per_s
        hidden_s = self.hidden_share * (1 - 1 / max(1, num_batches)) * min(read_s, move_s)
        return read_s + move_s - hidden_s + num_batches * self.batch_s

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
    """How a lane is read, and why. Seconds and counts are for one page with all fields of the lane."""

    way: Way
    forced: bool
    direct_s: float
    staged_s: float
    num_runs: int
    num_reads: int
    run_bytes: int
    max_gap_bytes: int
    model: CostModel = CostModel()

    def __str__(self) -> str:
        """The choice in a sentence."""
        why = "forced" if self.forced else f"{self.direct_s * 1e6:.0f} us direct, {self.staged_s * 1e6:.0f} us staged"
        if self.way == "direct":
            return f"direct: {self.num_runs} runs of {self.run_bytes} B per page ({why})"
        return f"staged: {self.num_reads} reads instead of {self.num_runs} runs of {self.run_bytes} B per page ({why})"


def choose(pattern: Pattern, model: CostModel, forced: Way | None = None) -> Choice:
    """The cheaper way for pages like this pattern's."""
    num_fields, num_runs = len(pattern.bases.src), len(pattern.lengths)
    boxes = find_boxes(pattern, model.max_gap_bytes) if num_runs else None
    num_boxes, slot_bytes = (len(boxes.lengths), boxes.slot_bytes) if boxes else (0, 0)
    moved = pattern.num_bytes
    direct_s = model.direct_s(num_fields * num_runs, moved)
    staged_s = model.staged_s(num_fields * num_boxes, num_fields * slot_bytes, num_fields * num_runs, moved)
    way: Way = forced or ("staged" if staged_s < direct_s else "direct")
    run_bytes = int(pattern.lengths.max()) if num_runs else 0
    return Choice(
        way,
        forced is not None,
        direct_s,
        staged_s,
        num_fields * num_runs,
        num_fields * num_boxes,
        run_bytes,
        model.max_gap_bytes,
        model,
    )
