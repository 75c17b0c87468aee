"""Place of a rank in vLLM's grid of ranks, and the part of a cache that it holds.

vLLM orders ranks DP x PP x PCP x TP (`parallel_state.py`, `initialize_model_parallel`). Each data-parallel rank is an engine of its own.

| parallelism | effect on caches |
|---|---|
| decode context (DCP) | `dcp_size` neighbours share the sequence of caches that are `dcp_sharded`; they are counted over PCP first, then over TP (the same) |
| prefill context (PCP) with DCP | `dcp_size` is the size of PCP, or of PCP x TP; every rank describes what it holds |
| prefill context (PCP) without DCP | every rank gathers what the others have computed and holds the same (`gpu/pcp_manager.py`): those of `pcp_rank` 0 describe themselves, the others are replicas that nobody reads |

An engine with replicas cannot load: see `start_check`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvreshard.kinds import Place
from kvreshard.model import LayoutError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of one rank. `interleave`: consecutive tokens that DCP gives to each rank in turn."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.pp_rank < self.pp_size or not 0 <= self.pcp_rank < self.pcp_size:
            raise LayoutError(
                f"pipeline rank {self.pp_rank} of {self.pp_size}, prefill context rank {self.pcp_rank} of {self.pcp_size}: "
                "a rank must be below its size"
            )
        if self.pcp_size > 1 and self.dcp_size not in (1, self.pcp_size, self.pcp_size * self.tp_size):
            raise LayoutError(
                f"prefill context parallel size {self.pcp_size} with decode context parallel size {self.dcp_size} is not "
                f"described; the latter must be 1, {self.pcp_size} or {self.pcp_size * self.tp_size}, as in vLLM"
            )
        self.sharing_sequence()

    @property
    def is_replica(self) -> bool:
        """Whether the rank of `pcp_rank` 0 holds the same."""
        return self.pcp_rank > 0 and self.dcp_size == 1

    @property
    def rank(self) -> int:
        """Index among the ranks that describe themselves."""
        if self.dcp_size == 1:
            return self.pp_rank * self.tp_size + self.tp_rank
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def labels(self) -> tuple[tuple[str, int], ...]:
        """The place, for people."""
        pcp = (("pcp", self.pcp_rank),) if self.pcp_size > 1 else ()
        dcp = (("dcp", self.sharing_sequence().dcp_rank),) if self.dcp_size > 1 else ()
        return (("pp", self.pp_rank), *pcp, ("tp", self.tp_rank), *dcp)

    def sharing_sequence(self) -> Place:
        """The place of caches that DCP shards: PCP x TP is then one group of ranks, whose neighbours share the sequence."""
        if self.dcp_size == 1:
            return self.whole_sequence()
        number, size = self.tp_rank * self.pcp_size + self.pcp_rank, self.tp_size * self.pcp_size
        return Place(number, size, self.dcp_size, self.interleave)

    def whole_sequence(self) -> Place:
        """The place of caches that keep the whole sequence on each rank."""
        return Place(self.tp_rank, self.tp_size)


def read_place(vllm_config: Any) -> RankPlace:
    """The place of the calling worker process."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    pcp_size = int(parallel.prefill_context_parallel_size)
    return RankPlace(
        tp_rank=get_tp_group().rank_in_group,
        tp_size=int(parallel.tensor_parallel_size),
        pp_rank=get_pp_group().rank_in_group,
        pp_size=int(parallel.pipeline_parallel_size),
        dcp_size=int(parallel.decode_context_parallel_size),
        interleave=int(parallel.cp_kv_cache_interleave_size),
        pcp_rank=get_pcp_group().rank_in_group if pcp_size > 1 else 0,
        pcp_size=pcp_size,
    )
