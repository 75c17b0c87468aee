"""The exceptions for a bad layout, pair of layouts, request or message.

All are below `KvReshardError`, so that a command or a connector catches one name. Every message names the fact, both values and the remedy.
"""

from __future__ import annotations


class KvReshardError(Exception):
    """Base of every error that a user can cause or must act upon."""


class UsageError(KvReshardError, TypeError):
    """An argument of another type than the function takes: a tuple for a `PageTable`, a dictionary for a layout."""


class LayoutError(KvReshardError):
    """One engine's layout contradicts itself: a bad size, a cell outside its page, a page outside its region."""


class LayoutMismatch(KvReshardError):
    """Two valid layouts cannot be routed: a field missing, extents or encodings that differ, a hole in the cover."""


class BindError(KvReshardError):
    """A request cannot be bound to a route: a short block table, the null page, a state at another position."""


class WireError(KvReshardError):
    """Bytes or JSON from a peer or a file cannot be read: truncated, oversized, of another version, of a wrong type."""
