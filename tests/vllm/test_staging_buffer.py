"""The device of the staging buffer, and ranks without one."""

import pytest

pytest.importorskip("vllm")

from kvreshard.model import KvReshardError
from kvreshard.vllm.options import read_options
from kvreshard.vllm.worker import WorkerSide

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("devices", "options", "device"),
    [
        ({"cpu"}, {}, "cpu"),
        ({"cpu"}, {"staging_bytes": 0}, None),
        ({"meta"}, {}, "meta"),
        ({"meta"}, {"staging_bytes": 0}, None),
        ({"cpu", "meta"}, {}, None),
        (set(), {}, None),
    ],
)
def test_a_buffer_lies_where_the_caches_do(devices: set[str], options: dict[str, object], device: str | None) -> None:
    """`meta` stands for a device: torch has it everywhere."""
    worker = WorkerSide(None, None, "engine", read_options(options))
    buffer = worker._make_buffer(devices)
    assert (None if buffer is None else (str(buffer.device), buffer.nbytes)) == (device and (device, 64 << 20))


def test_a_buffer_for_which_there_is_no_memory_is_refused() -> None:
    worker = WorkerSide(None, None, "engine", read_options({"staging_bytes": 1 << 48}))
    with pytest.raises(KvReshardError, match="staging_bytes is 281474976710656, and cpu has not so much memory"):
        worker._make_buffer({"cpu"})
