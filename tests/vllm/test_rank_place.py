"""The part of a cache that a rank of vLLM's grid holds, and the ranks that are replicas."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm import models
from tests.vllm.engines import build, refused, reshard
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from kvreshard.kinds.assemble import Grid
from kvreshard.model.changed import replace
from kvreshard.session.commands import Acquire, Publish, Revoke
from kvreshard.session.lease import Lease
from kvreshard.vllm import worker as worker_module
from kvreshard.vllm.describe.place import RankPlace
from kvreshard.vllm.options import read_options
from kvreshard.vllm.step_metadata import ReshardMetadata
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm
TOKENS = 70


def test_places() -> None:
    place = RankPlace(3, 4, 1, 2, 2, 8)
    assert (place.rank, place.labels) == (7, (("pp", 1), ("tp", 3), ("dcp", 1)))
    place = RankPlace(1, 2, 0, 1, 4, 1, 1, 2)
    assert (place.rank, place.labels) == (3, (("pp", 0), ("pcp", 1), ("tp", 1), ("dcp", 3)))
    refused(
        "prefill context parallel size 2|decode context parallel size 3|1, 2 or 4",
        lambda: RankPlace(0, 2, 0, 1, 3, 1, 0, 2),
    )
    assert RankPlace(pcp_rank=1, pcp_size=2).is_replica
    refused("pipeline rank 2 of 2", lambda: RankPlace(pp_rank=2, pp_size=2))
    refused("context parallel size 3", lambda: RankPlace(0, 4, dcp_size=3))


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "pp"), [(1, 2, 2, 1), (2, 2, 2, 1), (2, 2, 4, 1), (2, 4, 4, 2), (1, 8, 8, 1)]
)
def test_prefill_context_parallelism_shares_the_sequence_with_dcp(tp: int, pcp: int, dcp: int, pp: int) -> None:
    layers = {models.name(i): replace(models.mla(32), stage=min(i, pp - 1)) for i in range(2)}
    plain = {name: replace(layer, stage=0) for name, layer in layers.items()}
    shared = build("prefill", layers, tp=tp, pcp=pcp, dcp=dcp, pp=pp, interleave=4, order="LBNHC")
    assert [rank.rank for rank in shared.layout.ranks] == list(range(tp * pcp * pp))
    reshard(shared, build("decode", plain, tp=2), TOKENS)
    reshard(build("prefill", plain), build("decode", layers, tp=tp, pcp=pcp, dcp=dcp, pp=pp), TOKENS)


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "pp"), [(2, 2, 2, 2), (2, 2, 4, 1), (4, 2, 1, 1), (4, 1, 2, 2), (1, 4, 4, 1)]
)
def test_the_ranks_that_share_a_sequence_are_vllms(
    tp: int, pcp: int, dcp: int, pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own groups, as it makes them on one rank after the other, where nobody talks to anybody."""
    found: dict[str, list[list[int]]] = {}

    def record(group_ranks: list[list[int]], *_: Any, group_name: str | None = None, **__: Any) -> Any:
        found[str(group_name)] = group_ranks
        return SimpleNamespace(rank_in_group=0)

    num_ranks = tp * pcp * pp
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", record)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, device_group=None))
    for name, value in (
        ("is_initialized", True),
        ("get_world_size", num_ranks),
        ("get_rank", 0),
        ("get_backend", "gloo"),
    ):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    for name in [name for name, value in vars(parallel_state).items() if name.isupper() and value is None]:
        monkeypatch.setattr(parallel_state, name, None)  # so that it is None again afterwards
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel(tp, pp, pcp, decode_context_model_parallel_size=dcp)
    for rank in range(num_ranks):
        numbers = {name: next(ranks.index(rank) for ranks in groups if rank in ranks) for name, groups in found.items()}
        place = RankPlace(numbers["tp"], tp, numbers["pp"], pp, dcp, 1, numbers["pcp"], pcp)
        assert place.sharing_sequence().dcp_rank == numbers["dcp"]
        assert place.rank == (rank if dcp > 1 else numbers["pp"] * tp + numbers["tp"])
        if not place.is_replica:  # the catalog's engines are the same
            grid = Grid(tp, pp, dcp, 1, pcp)
            assert (grid.place(place.rank), grid.labels(place.rank)) == (place.sharing_sequence(), place.labels)


def test_a_replica_has_nothing_to_say_and_vllm_hears_of_every_rank() -> None:
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_connector="x", kv_role="kv_producer"))
    worker = WorkerSide(config, None, "p", read_options({}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "read_place", lambda _: RankPlace(pcp_rank=1, pcp_size=2))
        worker.register({})
    assert worker.part is None
    worker.submit(ReshardMetadata([Acquire(Lease("r", 0, 1)), Publish("r", 30.0), Revoke(Lease("s", 1, 1))]))
    assert [worker.collect().finished_sending, worker.collect().finished_sending] == [{"r"}, set()]
    worker.close()
