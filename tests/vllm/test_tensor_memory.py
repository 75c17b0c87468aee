"""Are exactly the asked bytes zeroed, through tensors that share a storage?"""

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch

from kvreshard.transport.base import TransportError
from kvreshard.vllm.tensor_memory import TensorMemory

pytestmark = pytest.mark.vllm


def test_ranges_of_views_and_of_whole_storages() -> None:
    whole, other = torch.full((4, 16), 7, dtype=torch.int32), torch.full((9,), 7, dtype=torch.uint8)
    memory = TensorMemory([whole[1:3], whole[3:], other])
    base, last = whole.data_ptr(), other.data_ptr()
    start = np.array([base, base + 100, last + 8])
    memory.zero(start, start + np.array([3, 156, 1]))
    expected = np.full(256, 7, np.uint8).reshape(64, 4)
    expected[:, 1:] = 0
    expected = expected.reshape(-1)
    expected[:3] = expected[100:256] = 0
    assert np.array_equal(whole.view(torch.uint8).reshape(-1).numpy(), expected)
    assert other.tolist() == [7] * 8 + [0]


@pytest.mark.parametrize(("first", "size"), [(-1, 1), (0, 300), (260, 1)])
def test_other_addresses_are_refused(first: int, size: int) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    start = np.array([tensor.data_ptr() + first])
    with pytest.raises(TransportError, match="none of the registered caches"):
        TensorMemory([tensor]).zero(start, start + size)


def test_nothing_is_staged() -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(TransportError, match="not staged"):
        TensorMemory([]).move(0, 0, none, none, 1, [], 0, 0)
