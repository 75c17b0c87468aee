"""Is what is in flight to a peer bounded, whatever is posted, and does the bound never stop anything?"""

from hypothesis import given
from hypothesis import strategies as st

from kvreshard.plan.copies import MAX_COPY_BYTES
from kvreshard.transport.posting import Windows
from kvreshard.transport.slices import DESCRIPTOR_COST_BYTES

LARGEST = MAX_COPY_BYTES + DESCRIPTOR_COST_BYTES
PEERS = st.sampled_from(["bob", "cat"])


@given(
    max_slices=st.integers(1, 6),
    max_bytes=st.integers(1, 8 * LARGEST),
    turns=st.lists(st.tuples(PEERS, st.booleans(), st.floats(0.0, 1.0)), max_size=60),
)
def test_no_order_of_posts_breaks_the_bound(
    max_slices: int, max_bytes: int, turns: list[tuple[str, bool, float]]
) -> None:
    windows = Windows(max_slices, max_bytes)
    flying: dict[str, list[int]] = {"bob": [], "cat": []}
    for peer, settles, part in turns:
        if settles and flying[peer]:
            windows.leave(peer, flying[peer].pop(0))
        elif windows.is_open(peer):
            flying[peer].append(1 + int(part * (max(windows.share_bytes, LARGEST) - 1)))
            windows.enter(peer, flying[peer][-1])
        for name, costs in flying.items():
            assert windows._bytes.get(name, 0) == sum(costs)
            assert len(costs) <= max_slices
            assert sum(costs) <= max_bytes or len(costs) == 1
            assert costs or windows.is_open(name)
        assert windows.num_in_flight == sum(map(len, flying.values()))


def test_a_window_of_usual_size_holds_as_many_slices_as_it_may() -> None:
    windows = Windows(4, 256 << 20)
    for _ in range(4):
        assert windows.is_open("bob")
        windows.enter("bob", windows.share_bytes)
    assert not windows.is_open("bob")
    assert windows.is_open("cat")
    windows.leave("bob", windows.share_bytes)
    assert windows.is_open("bob")
