"""What can be wrong with a layout, a pair of layouts, a request or a message?

One exception type per question, all below `KvReshardError`, so that a command or a connector catches one name.
Every message names the fact, both sides and the remedy; nothing here carries a traceback to a person.
"""

from __future__ import annotations


class KvReshardError(Exception):
    """Base of every error that a user can cause or must act upon."""


class UsageError(KvReshardError, TypeError):
    """A function was given something of another type than it takes: a tuple in place of a `PageTable`, a dictionary in place of a layout."""


class LayoutError(KvReshardError):
    """One engine's layout contradicts itself: a bad size, a cell outside its page, a page outside its region."""


class LayoutMismatch(KvReshardError):
    """Two valid layouts cannot be routed: a field missing, extents or encodings that differ, a hole in the cover."""


class BindError(KvReshardError):
    """A request cannot be bound to a route: a short block table, the null page, a state at another position."""


class WireError(KvReshardError):
    """Bytes or JSON from elsewhere are not a layout: truncated, oversized, of a later version, of a wrong type."""
