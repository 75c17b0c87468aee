"""Which numbers do names have among others, once and for all?"""

import pytest

from kvreshard.model.names import MAX_KEPT, Names


def test_names_have_the_numbers_of_their_places() -> None:
    names = Names(("a", "b", "c"))
    assert names.numbers(("c", "a")).tolist() == [2, 0]
    assert names.numbers(names.all).tolist() == names.numbers(("a", "b", "c")).tolist() == [0, 1, 2]
    assert names.have_all(("b",))
    assert not names.have_all(("b", "d"))
    with pytest.raises(KeyError):
        names.numbers(("d",))


def test_a_name_that_is_there_twice_has_its_later_number() -> None:
    """As a dictionary has it, whether all names are asked for or some; layouts refuse such names."""
    names = Names(("a", "b", "a"))
    assert not names.are_unique
    assert names.numbers(("a", "b", "a")).tolist() == [2, 1, 2]
    assert names.numbers(("b", "a")).tolist() == [1, 2]


def test_what_was_found_is_found_again_by_the_same_object_and_not_by_another() -> None:
    names = Names(tuple("abcdef"))
    asked = [tuple(letter) for letter in "abcdef"] * MAX_KEPT
    for one in asked:
        assert names.numbers(one).tolist() == ["abcdef".index(one[0])]
        assert names.numbers(one) is names.numbers(one)
    for _ in range(10 * MAX_KEPT):  # tuples that die, whose places in memory others get
        for letter in "fb":
            assert names.numbers((letter, "a")).tolist() == ["abcdef".index(letter), 0]
