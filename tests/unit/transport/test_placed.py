"""Is what was found of some copies used again, and only for the regions that it was found for?"""

import gc
import weakref

import numpy as np
import pytest

from kvreshard.transport.base import Copies, MemoryRegion, TransportError
from kvreshard.transport.framed import Frame
from kvreshard.transport.frames import FramePlace, PlacedFrame, place_frame
from kvreshard.transport.placed import Placed
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import PlacedCopies


def make_frame() -> Frame:
    return Frame.of(np.array([4096, 8192]), np.array([0, 4096]), [64, 64], 128, 64, 10, 10)


def table(end: int = 1 << 20, device: str = "cpu") -> RegionTable:
    return RegionTable([MemoryRegion(0, end, device)])


def test_what_was_found_is_used_again_for_the_same_regions_only() -> None:
    asked: list[tuple[RegionTable, RegionTable]] = []

    def find(frame: Frame, local: RegionTable, remote: RegionTable, side: str) -> PlacedFrame | None:
        asked.append((local, remote))
        return place_frame(frame, local, remote, side)

    placed, frame, local, remote = Placed(find), make_frame(), table(), table()
    first = placed.get(frame, local, remote, "remote")
    assert first is not None
    assert placed.get(frame, local, remote, "remote") is first
    assert len(asked) == 1
    on_a_gpu = table(device="cuda:1")
    for pair, wanted in (((on_a_gpu, remote), ("cuda", "cpu")), ((on_a_gpu, on_a_gpu), ("cuda", "cuda"))):
        found = placed.get(frame, *pair, "remote")
        assert found is not None
        assert found.place == FramePlace(*wanted, int(wanted[0] == "cuda"), int(wanted[1] == "cuda"))
    assert len(asked) == 3


@pytest.mark.parametrize("is_local", [True, False])
def test_memory_that_was_given_back_is_refused(is_local: bool) -> None:
    placed, frame, whole = Placed(place_frame), make_frame(), table()
    assert placed.get(frame, whole, whole, "remote") is not None
    less = table(end=4097)
    with pytest.raises(
        TransportError, match=f"{'local' if is_local else 'remote'} .* is not inside one registered region"
    ):
        placed.get(frame, *((less, whole) if is_local else (whole, less)), "remote")
    assert placed.get(frame, whole, whole, "remote") is not None


def test_none_is_found_once() -> None:
    asked = []

    def find(frame: Frame, local: RegionTable, remote: RegionTable, side: str) -> None:
        asked.append(side)

    placed, frame, regions = Placed[Frame, PlacedFrame](find), make_frame(), table()
    assert placed.get(frame, regions, regions, "remote") is placed.get(frame, regions, regions, "remote") is None
    assert asked == ["remote"]


def test_nothing_outlives_its_key() -> None:
    frames, wholes, regions = Placed(place_frame), Placed(PlacedCopies.of), table()
    frame, whole = make_frame(), Copies.of([0, 64], [128, 256], [64, 64])
    assert frames.get(frame, regions, regions, "remote") is not None
    assert wholes.get(whole, regions, regions, "remote") is not None
    del frame, whole
    gc.collect()
    assert len(frames) == len(wholes) == 0


def test_what_was_asked_for_last_goes_with_its_key_like_everything_else() -> None:
    class Key:
        pass

    class Value:
        pass

    made: list[weakref.ref[Value]] = []

    def find(*_: object) -> Value:
        value = Value()
        made.append(weakref.ref(value))
        return value

    placed, table = Placed[Key, Value](find), RegionTable()
    first, second = Key(), Key()
    assert placed.get(first, table, table, "") is placed.get(first, table, table, "") is made[0]()
    assert placed.get(second, table, table, "") is made[1]() is not placed.get(first, table, table, "")
    assert placed.get(first, RegionTable(), table, "") is made[2]()
    assert made[0]() is None
    del first
    assert made[2]() is None
    assert placed.get(second, table, table, "") is made[1]()
    del second
    assert made[1]() is None
    assert len(made) == 3
