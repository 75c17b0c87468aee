"""Rings: as much is loaded as both sides hold, and a prompt whose ring has gone on is computed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import TOKENS, Decode, blocks, full, groups, prefill, ring

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("theirs", "mine", "first"), [(4, 4, 296), (8, 16, 292), (16, 8, 291), (512, 512, 0)])
def test_of_a_ring_as_much_is_loaded_as_both_hold(theirs: int, mine: int, first: int) -> None:
    params = prefill(groups(full(64), ring(theirs)), TOKENS, [[1, 2, 3, 4, 5], [6]])
    decode = Decode(full(128), ring(mine))
    asked = decode.arrive(params, TOKENS)
    assert decode.side.count_loadable(asked, 0) == 299
    order = decode.load(asked, blocks([1, 2, 3], [9]), 299)
    assert order.transfer.intervals == {"g0": [(0, 299)], "g1": [(first, 299)]}
    assert order.transfer.src_tables["g1"].pages.tolist() == [6]
    assert order.transfer.dst_new_pages["g1"].tolist() == [9]


@pytest.mark.parametrize(
    ("theirs", "count", "interval"),
    [
        (4, 299, (296, 299)), (4, 298, (296, 298)), (4, 297, "lost"), (4, 296, None), (4, 295, "lost"), (4, 288, None),
        (8, 299, (295, 299)), (8, 298, (294, 298)), (8, 296, (292, 296)), (8, 293, "lost"), (8, 292, None), (8, 291, "lost"),
        (64, 299, (295, 299)), (64, 291, "lost"),
    ],
)  # fmt: skip
def test_what_a_ring_no_longer_has_is_only_missed_inside_an_entry(
    theirs: int, count: int, interval: tuple[int, int] | str | None
) -> None:
    """Entries of 4, 2 or 1 tokens, which a ring of 4 may be for: a prefill leaves those of one, however many its ring has room for.

    The source has 300 tokens, this engine computes more than the last one itself.
    """
    some = (full(32), ring(theirs))
    decode = Decode(full(32), ring(4), backoff=300 - count)
    asked = decode.arrive(prefill(groups(*some), TOKENS, [list(range(1, 11)), [11]]), TOKENS)
    assert decode.side.count_loadable(asked, 0) == (count if interval != "lost" else 0)
    assert decode.fallbacks == (["window"] if interval == "lost" else [])
    if interval != "lost":
        order = decode.load(asked, blocks(list(range(1, 11)), [12]), count)
        assert order.transfer.intervals["g1"] == ([] if interval is None else [interval])


def test_a_source_without_a_ring_is_not_loaded_where_one_is_needed() -> None:
    decode = Decode(full(64), ring(8))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["window"])
