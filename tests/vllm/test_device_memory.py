"""Zeroing, permuting and reading exactly the requested bytes, through tensors that share a storage.

On the processor: torch does the same on every device, but for the order of things in a stream, which nothing here can show.
"""

import pytest

pytest.importorskip("vllm")

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from msgspec.structs import replace
from tests.pairs.apply import poison_new_pages, random_memory
from tests.pairs.carry import carry
from tests.pairs.random_pairs import LAYERS, PairLayer, make_pair
from tests.unit.transport.moves import slots_move

from kvreshard.kinds.assemble import relocate
from kvreshard.plan import compile_route
from kvreshard.testing.oracle import Bytes, differing_bytes, oracle_transfer, write_values
from kvreshard.tools.digest import digest_transfers
from kvreshard.transport.base import TransportError
from kvreshard.transport.device import TensorMemory
from kvreshard.transport.local import HostMemory, LocalMemory

pytestmark = pytest.mark.vllm
NUM_PAIRS = 120
# Triton's interpreter takes a millisecond per page.
NUM_KERNEL_PAIRS = 15


@pytest.fixture(params=[False, True], ids=["torch", "kernel"])
def has_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether permutes are the kernel, by Triton's interpreter, which the environment asks for where a kernel is defined."""
    if request.param:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        importlib.import_module("kvreshard.transport.device_kernel")
    return bool(request.param)


def test_a_kernel_that_cannot_be_used_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvreshard.transport.device_kernel", None)
    with caplog.at_level(logging.WARNING, logger="kvreshard"):
        memory = TensorMemory([torch.zeros(4)], has_kernel=True)
    assert "Triton's kernel cannot be used" in caplog.text
    tensor = torch.zeros(64, dtype=torch.uint8)
    memory = TensorMemory([tensor], has_kernel=True)
    memory.move(tensor.data_ptr(), slots_move(8, [tensor.data_ptr() + 8], [0], 8))


def test_the_kernel_is_for_one_cuda_device() -> None:
    assert TensorMemory([torch.zeros(4)])._permute is None


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
def test_other_addresses_are_refused(first: int, size: int, has_kernel: bool) -> None:
    tensor = torch.zeros(64, dtype=torch.int32)
    start, memory = np.array([tensor.data_ptr() + first]), TensorMemory([tensor], has_kernel=has_kernel)
    with pytest.raises(TransportError, match="none of the registered caches"):
        memory.zero(start, start + size)
    for slots, base in ((tensor.data_ptr(), start), (int(start[0]), np.array([tensor.data_ptr()]))):
        with pytest.raises(TransportError, match="none of the registered caches"):
            memory.move(slots, slots_move(size, base, [0], size))


def test_a_page_or_a_slot_behind_the_last_is_refused(has_kernel: bool) -> None:
    tensor = torch.zeros(256, dtype=torch.uint8)
    base, memory = tensor.data_ptr(), TensorMemory([tensor], has_kernel=has_kernel)
    memory.move(base, slots_move(16, [base + 128], [0, 112], 8, [(2, 8, 8)]))
    with pytest.raises(TransportError, match="none of the registered caches"):
        memory.move(base, slots_move(16, [base + 128], [0, 120], 8, [(2, 8, 8)]))
    with pytest.raises(TransportError, match="none of the registered caches"):
        memory.move(base + 240, slots_move(16, [base], [0, 16], 8, [(2, 8, 8)]))


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 0, 2]], ids=["slots", "any"])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 6, 8, 12, 64, 256])
def test_moves_as_host_memory_does(length: int, shift: int, places: list[int], has_kernel: bool) -> None:
    """Two fields, three pages, from slots of their own or not, two loops; addresses and lengths that elements of every width divide, or do not."""
    slots, caches = np.arange(1 << 14, dtype=np.uint32).view(np.uint8), [np.zeros(1 << 17, np.uint8) for _ in range(2)]
    step = 2 * length + shift
    pages = np.array([5, 0, 2]) * 40 * step
    loops = [(2, step, 3 * step), (3, 2 * step, 7 * step)]
    outcomes = []
    tensors = [torch.from_numpy(array) for array in (slots, *caches)]
    for kind in (HostMemory(), TensorMemory(tensors, has_kernel=has_kernel)):
        for cache in caches:
            cache[:] = 255
        bases = np.array([int(cache.ctypes.data) + shift for cache in caches])
        move = slots_move(8 * step, bases, pages, length, loops, shift, 3 * shift)
        column = np.stack([move.dst_at] * 2, axis=1)[:, 0]  # of a table: bytes of a device are counted by any numbers
        assert not column.flags.c_contiguous
        kind.move(int(slots.ctypes.data) + shift, replace(move, dst_at=column, src_at=move.src_at[places]))
        outcomes.append([cache.copy() for cache in caches])
    assert all(np.array_equal(one, two) for one, two in zip(*outcomes, strict=True))
    assert all((cache != 255).any() for cache in outcomes[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_random_pairs_are_staged_as_the_oracle_says(layer: PairLayer, run_seed: int, has_kernel: bool) -> None:
    staged, num_pairs = 0, NUM_KERNEL_PAIRS if has_kernel else NUM_PAIRS

    class Counting(TensorMemory):
        def move(self, *arguments: object) -> None:
            nonlocal staged
            staged += 1
            super().move(*arguments)

    def make(arrays: Sequence[Bytes]) -> TensorMemory:
        return Counting((torch.from_numpy(array) for array in arrays if len(array)), has_kernel=has_kernel)

    for seed in range(run_seed % 10**9, run_seed % 10**9 + num_pairs):
        pair, rng = make_pair(layer, seed), np.random.default_rng(seed)
        src_memory, dst_memory = random_memory(pair.src, rng), random_memory(pair.dst, rng)
        write_values(pair.src, pair.dst, src_memory, pair.request, seed)
        poison_new_pages(pair.dst, dst_memory, pair.request)
        expected = oracle_transfer(pair.src, pair.dst, src_memory, dst_memory, pair.request)
        got = carry(
            *(pair.src, pair.dst, pair.request, src_memory, dst_memory),
            way="staged",
            staging_bytes=4096,
            make_memory=make,
        )
        assert differing_bytes(expected, got) == {}, pair.name
    assert staged > num_pairs


def test_devices_are_told_apart() -> None:
    memory: LocalMemory = TensorMemory([torch.zeros(4)])
    assert [memory.reaches(device) for device in ("cpu", "cuda:0")] == [True, False]


@pytest.mark.parametrize("unit_bytes", [1, 2])
def test_weighted_sums_are_those_of_host_memory(unit_bytes: int, run_seed: int) -> None:
    """Runs at any address, in any order, that may overlap; sums wrap around."""
    rng = np.random.default_rng(run_seed)
    content = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    host, tensors = HostMemory(), TensorMemory([torch.from_numpy(content)])
    for _ in range(200):
        weights = rng.integers(-(2**63), 2**63, rng.integers(1, 40, 2), dtype=np.int64)
        rows = int(content.ctypes.data) + rng.integers(0, 1 << 14, int(rng.integers(1, 50)))
        runs = rng.integers(0, 1 << 14, len(weights))
        theirs, mine = (memory.weighted_sums(rows, runs, weights, unit_bytes) for memory in (host, tensors))
        assert np.array_equal(theirs, mine)
        units = [
            content[row - content.ctypes.data + run :][: weights.shape[1] * unit_bytes]
            for row in rows[:1]
            for run in runs
        ]
        values = np.concatenate(units).view(f"<i{unit_bytes}").tolist()
        expected = sum(value * weight for value, weight in zip(values, weights.reshape(-1).tolist(), strict=True))
        assert int(mine[0]) % 2**64 == expected % 2**64
    with pytest.raises(TransportError, match="are in none of the registered caches"):
        tensors.weighted_sums(rows + (1 << 16), runs, weights, unit_bytes)


@pytest.mark.parametrize("layer", LAYERS)
def test_digests_are_those_of_host_memory(layer: PairLayer, run_seed: int) -> None:
    num_digests = 0
    for seed in range(run_seed % 10**9, run_seed % 10**9 + NUM_PAIRS // 4):
        pair, rng = make_pair(layer, seed), np.random.default_rng(seed)
        memory = random_memory(pair.src, rng)
        addresses = {
            rank.rank: {r.name: int(memory[rank.rank, r.name].ctypes.data) for r in rank.regions}
            for rank in pair.src.ranks
        }
        src = relocate(pair.src, addresses)
        tensors = TensorMemory(torch.from_numpy(array) for array in memory.values() if len(array))
        for rank in pair.dst.ranks:
            transfers = compile_route(src, pair.dst, rank.rank).transfers
            theirs, mine = (
                digest_transfers(transfers, "src", pair.request, kind, b"key") for kind in (HostMemory(), tensors)
            )
            assert theirs == mine, pair.name
            num_digests += len(mine)
    assert num_digests > NUM_PAIRS // 4


def test_what_was_queued_is_done_when_the_next_cannot_be_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are given back after an error: nothing may be written to them later."""
    memory, waits = TensorMemory([torch.zeros(4)]), list[bool]()
    memory._streams = {torch.device("cpu"): SimpleNamespace(synchronize=lambda: waits.append(True))}
    monkeypatch.setattr(memory, "_on_stream", lambda device: contextlib.nullcontext())
    with pytest.raises(MemoryError), memory._settled():
        raise MemoryError
    assert waits == [True]
