"""Memory of a rank on a device. It runs on the processor: torch does the same on every device."""

import numpy as np
import pytest

pytest.importorskip("torch")

from kvreshard.testing.rank_memory import DeviceBlock, time_plain_copy

pytestmark = pytest.mark.vllm


def test_bytes_go_to_the_device_and_back_when_they_are_told_to() -> None:
    mirror = np.arange(64, dtype=np.uint8)
    block = DeviceBlock(mirror, "cpu")
    assert (block.region.size_bytes, block.region.device) == (64, "cpu")
    assert block.region.address != mirror.ctypes.data
    block.upload()
    mirror[:] = 0
    block.memory.zero(np.array([block.region.address + 3]), np.array([block.region.address + 5]))
    assert not mirror.any()
    block.download()
    assert mirror.tolist() == [0, 1, 2, 0, 0, *range(5, 64)]


def test_a_plain_copy_takes_time_and_none_takes_none() -> None:
    assert time_plain_copy(0) == 0.0
    assert time_plain_copy(1 << 16) > 0.0
