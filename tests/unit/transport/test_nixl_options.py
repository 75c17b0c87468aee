"""With which parameters is NIXL's backend made?"""

import pytest

from kvreshard.transport.nixl_agent import READ_BY_CUDA_IPC, USUAL_THREADS, NixlOptions, usual_threads
from kvreshard.transport.slices import SPLIT_COPIES


def test_ucx_has_threads_that_share_long_slices() -> None:
    pool = {"num_threads": "2", "split_batch_size": str(SPLIT_COPIES)}
    assert NixlOptions(num_threads=2).params == {**pool, "engine_config": READ_BY_CUDA_IPC}
    assert NixlOptions(num_threads=4).params["num_threads"] == "4"


def test_without_threads_the_backend_is_nixls_own() -> None:
    assert NixlOptions().num_threads == USUAL_THREADS
    assert NixlOptions(num_threads=0).params == {"engine_config": READ_BY_CUDA_IPC}
    assert NixlOptions(num_threads=0, backend_params={"a": "b"}).params == {"a": "b", "engine_config": READ_BY_CUDA_IPC}


def test_parameters_that_are_given_win() -> None:
    options = NixlOptions(num_threads=2, backend_params={"split_batch_size": "1024", "engine_config": "TLS=tcp"})
    config = f"{READ_BY_CUDA_IPC},TLS=tcp"  # of two values of one setting, UCX takes the later
    assert options.params == {"num_threads": "2", "split_batch_size": "1024", "engine_config": config}


def test_other_backends_get_what_is_given_and_no_more() -> None:
    """They refuse parameters that they do not know."""
    assert NixlOptions(backend="LIBFABRIC", num_threads=2, backend_params={"a": "b"}).params == {"a": "b"}


@pytest.mark.parametrize(
    ("ucx_tls", "threads"),
    [
        (None, 2),
        ("", 2),
        ("tcp", 0),
        ("tcp,self", 0),
        ("self, tcp", 0),
        ("all", 2),
        ("^tcp", 2),
        ("sm,tcp,self", 2),
        ("rc,tcp", 2),
    ],
)
def test_where_only_tcp_is_allowed_there_are_no_threads(ucx_tls: str | None, threads: int) -> None:
    assert usual_threads(ucx_tls) == threads
