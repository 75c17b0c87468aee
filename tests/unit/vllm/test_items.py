"""Items in every place: those that must come from the prefill, and those that are this engine's own."""

from __future__ import annotations

import pytest

from kvreshard.vllm.items import Comparison, Item, Positions, compare, digest_grid, digest_with_key, find_unseen

CAT, DOG = Item(20, 64, "cat", "8x8"), Item(150, 64, "dog", "8x8")
OTHER = Item(20, 64, "cow", "8x8")


def compared(
    theirs: list[Item],
    mine: list[Item],
    num_prompt: int = 300,
    first_other: int | None = None,
    positions: Positions = Positions.PLAIN,
) -> Comparison:
    return compare(theirs, mine, num_prompt, first_other, positions)


@pytest.mark.parametrize(
    ("mine", "num_loadable", "num_needed"),
    [
        ([CAT, DOG], None, 0),
        ([], None, 214),
        ([CAT], None, 214),
        ([DOG], None, 84),
        ([OTHER, DOG], None, 84),
        ([OTHER], None, 214),
        ([Item(20, 48, "cat"), DOG], None, 84),  # another engine's processor makes less of it
        ([CAT, DOG, Item(250, 10, "bird")], 250, 0),  # only here: computed here
        ([CAT, Item(250, 10, "bird")], 250, 214),
        ([Item(10, 5, "bird")], 10, 214),
        ([Item(20, 64, "dog"), Item(150, 64, "cat")], None, 214),  # the other way round
    ],
)
def test_what_is_not_here_comes_from_the_prefill(mine: list[Item], num_loadable: int | None, num_needed: int) -> None:
    assert compared([CAT, DOG], mine) == Comparison(num_loadable, num_needed, "")


def test_the_same_item_a_few_tokens_on_is_this_engines_own() -> None:
    assert compared([CAT], [Item(21, 64, "cat")]) == Comparison(20, 0, "")


def test_items_behind_the_common_text_are_another_prompts() -> None:
    assert compared([CAT, DOG], [CAT], first_other=150) == Comparison(None, 0, "")
    assert compared([CAT, DOG], [CAT], first_other=151) == Comparison(None, 214, "")
    assert compared([CAT, DOG], [CAT], num_prompt=150) == Comparison(None, 0, "")


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ([], "none there"),
        ([Item(20, 64, "cow", "4x16")], "8x8 and 4x16"),
        ([Item(20, 64, "cow", "")], "unknown"),
        ([Item(20, 60, "cow", "8x8")], "60 here"),
    ],
)
def test_positions_that_depend_on_a_grid_want_an_equal_one(mine: list[Item], says: str) -> None:
    found = compared([CAT], mine, positions=Positions.GRID)
    assert says in found.refusal
    assert found.num_needed == 84


@pytest.mark.parametrize("mine", [[CAT], [OTHER]])
def test_an_item_of_the_same_grid_stands_for_another(mine: list[Item]) -> None:
    assert compared([CAT], mine, positions=Positions.GRID).refusal == ""


def test_the_same_item_needs_no_grid() -> None:
    """Its data may be in another process on one side."""
    assert compared([CAT], [Item(20, 64, "cat")], positions=Positions.GRID) == Comparison(None, 0, "")
    assert "unknown" in compared([Item(20, 64, "cat")], [Item(20, 64, "cow")], positions=Positions.GRID).refusal


def test_what_the_encoder_leaves_of_a_video_is_known_where_it_ran() -> None:
    assert compared([CAT, DOG], [CAT, DOG], positions=Positions.PRUNED) == Comparison(20, 0, "")
    assert compared([CAT], [OTHER], positions=Positions.PRUNED).num_loadable == 20


def test_tokens_that_stand_for_nothing_here_are_found() -> None:
    ids = [1, 7, 7, 2, 7, 3]
    assert find_unseen(ids, [], frozenset({7, 8})) == 1
    assert find_unseen(ids, [Item(1, 2, "a")], frozenset({7})) == 4
    assert find_unseen(ids, [Item(1, 2, "a"), Item(4, 1, "b")], frozenset({7})) is None
    assert find_unseen(ids, [], frozenset()) is None
    assert find_unseen([1, 2], [], frozenset({7})) is None


def test_no_data_is_no_grid_and_no_salt_no_digest() -> None:
    assert digest_grid(None) == digest_with_key("", bytes(32)) == ""
    assert digest_with_key("a", bytes(32)) != digest_with_key("b", bytes(32))


@pytest.mark.parametrize("num_items", [0, 4000])
def test_many_items_are_compared_at_once(num_items: int) -> None:
    items = [Item(i * 10, 8, str(i)) for i in range(num_items)]
    others = [Item(i * 10, 8, f"other {i}") for i in range(num_items)]
    assert compared(items, others, 50_000).num_needed == (num_items and num_items * 10 - 2)
