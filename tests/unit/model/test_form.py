"""Do versions of a form lead to one another, and do texts of a stranger stay in their line?"""

from __future__ import annotations

import pytest

from kvreshard.model import WireError
from kvreshard.model.form import Form, Step, Tree
from kvreshard.model.text import plain


def renamed(old: str, new: str) -> Step:
    def rename(tree: Tree, a: str, b: str) -> Tree:
        tree[b] = tree.pop(a)
        return tree

    return Step(lambda tree: rename(tree, old, new), lambda tree: rename(tree, new, old))


THIRD = Form("kvreshard.thing", (renamed("a", "b"), renamed("b", "c")))


@pytest.mark.parametrize(("version", "key"), [(1, "a"), (2, "b"), (3, "c")])
def test_each_version_rises_to_the_newest_and_lowers_back(version: int, key: str) -> None:
    old = {"form": "kvreshard.thing", "version": version, key: 7}
    new = {"form": "kvreshard.thing", "version": 3, "c": 7}
    assert THIRD.version == 3
    assert THIRD.rise(dict(old)) == new
    assert THIRD.lower(dict(new), version) == old


def test_what_a_step_needs_and_does_not_find_is_no_form() -> None:
    with pytest.raises(WireError, match=r"not a kvreshard\.thing of version 2: KeyError"):
        THIRD.rise({"form": "kvreshard.thing", "version": 2, "x": 1})


@pytest.mark.parametrize(("name", "version"), [("kvreshard.other", 1), ("kvreshard.thing", 0), ("kvreshard.thing", 4)])
def test_other_forms_and_versions_are_refused(name: str, version: int) -> None:
    with pytest.raises(WireError, match=rf"'{name}'|thing of version {version}; this side reads versions 1 to 3"):
        THIRD.check(name, version)
    with pytest.raises(WireError):
        THIRD.lower({"version": 3}, version if version != 1 else 9)


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "a\u2028b", "\u202edlrow", "\x00", "\x85", "\ud800"])
def test_a_text_stays_in_its_line(text: str) -> None:
    assert plain(text).isprintable()
    assert len(plain(text)) == len(text)


def test_a_long_text_is_cut_and_says_so() -> None:
    assert plain("x" * 1000, 5) == "xxxxx... (1000 characters)"
