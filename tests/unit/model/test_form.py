"""Are other forms and versions refused with both, and do texts of a stranger stay in their line?"""

from __future__ import annotations

import pytest

from kvreshard.model import WireError
from kvreshard.model.form import Head
from kvreshard.model.text import plain


def test_a_form_of_its_version_is_read() -> None:
    Head("kvreshard.thing", 3).check("kvreshard.thing", 3)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (Head("kvreshard.other", 3), "message is a 'kvreshard.other', not a 'kvreshard.thing'"),
        (Head("a\nb", 3), r"message is a 'a\?b'"),
        (
            Head("kvreshard.thing", 2),
            "thing of version 2; this side reads version 3: run the same release of kvreshard",
        ),
        (
            Head("kvreshard.thing", 4),
            "thing of version 4; this side reads version 3: run the same release of kvreshard",
        ),
    ],
)
def test_other_forms_and_versions_are_refused(head: Head, told: str) -> None:
    with pytest.raises(WireError, match=told):
        head.check("kvreshard.thing", 3)


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "a\u2028b", "\u202edlrow", "\x00", "\x85", "\ud800"])
def test_a_text_stays_in_its_line(text: str) -> None:
    assert plain(text).isprintable()
    assert len(plain(text)) == len(text)


def test_a_long_text_is_cut_and_says_so() -> None:
    assert plain("x" * 1000, 5) == "xxxxx... (1000 characters)"
