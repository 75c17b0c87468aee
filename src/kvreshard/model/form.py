"""Name and version of a form (a layout, engine metadata, a flight record), which a reader checks before it looks at anything else.

This release reads version 1 of each form and no other. `docs/wire.md` says what a later release owes to this one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvreshard.model.errors import WireError
from kvreshard.model.text import plain

# Both encodings take the same numbers: JSON knows larger ones, which could be read and not be written again.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# A place in a list of the same message.
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
SAME_RELEASE = "run the same release of kvreshard on both sides"


class Head(msgspec.Struct):
    """What is read first of every form."""

    form: str
    version: int

    def check(self, form: str, version: int, remedy: str = SAME_RELEASE) -> None:
        """Raises WireError for another form, or another version than the one that this side reads, naming both."""
        if self.form != form:
            raise WireError(f"message is a '{plain(self.form, 80)}', not a '{form}'")
        if self.version != version:
            what = form.rpartition(".")[2]
            raise WireError(f"{what} of version {self.version}; this side reads version {version}: {remedy}")
