"""Texts of peers and users in messages and logs.

A name with a line break writes a log line of its own, and one of a megabyte fills the log. So msgspec's decoders refuse bad
names (`Name`), and every other text from outside is made `plain` or `escaped` before it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

import msgspec

MAX_NAME = 256
MAX_SHOWN = 400

# Control characters, line and paragraph separators, the marks that reverse the direction of writing, and halves of characters, which
# JSON can write ("\ud800") and no message can carry.
_UNSEEN = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_unseen = re.compile(f"[{_UNSEEN}]")

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=rf"^[^{_UNSEEN}]*\Z")]

# A name among thousands: a pattern costs 0.3 us each, so `check_names` checks them together.
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


def is_name(text: str) -> bool:
    """Whether a peer would accept it as a `Name`."""
    return len(text) <= MAX_NAME and not _unseen.search(text)


def check_names(texts: Collection[str]) -> None:
    """Raises ValueError for a `ShortText` that is no `Name`."""
    if not _unseen.search("".join(texts)):
        return
    wrong = next(text for text in texts if _unseen.search(text))
    raise ValueError(f"'{plain(wrong)}' is no name: it has characters that cannot be seen")


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "rank"), counted(0, "rank"), counted(2048, "KV head")
    ('1 rank', '0 ranks', '2,048 KV heads')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def escaped(text: object, limit: int | None = None) -> str:
    """The text in one line of at most `limit` characters and a mark; invisible characters are written as in Python.

    >>> escaped("tp=2,\\x1b[31m"), escaped("x" * 70, 3)
    ('tp=2,\\\\x1b[31m', 'xxx... (70 characters)')
    """
    whole = str(text)
    shown = _unseen.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), whole[:limit])
    return shown if limit is None or len(whole) <= limit else f"{shown}... ({len(whole)} characters)"


def plain(text: object, limit: int = MAX_SHOWN) -> str:
    """The text in one line of at most `limit` characters and a mark; invisible characters become `?`."""
    whole = str(text)
    shown = _unseen.sub("?", whole[:limit])
    return shown if len(whole) <= limit else f"{shown}... ({len(whole)} characters)"
