"""Name and version of a form (a layout, engine metadata, a flight record), which a reader checks first.

This release reads version 1 of each form and no other. `docs/wire.md` states what later releases must read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvreshard.model.errors import WireError
from kvreshard.model.text import plain

# The numbers that msgpack can write. JSON has larger ones, which could be read and not be written again.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# A place in a list of the same message.
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
SAME_RELEASE = "run the same release of kvreshard on both sides"


class Head(msgspec.Struct):
    """The part of every form that is read first."""

    form: str
    version: int

    def check(self, form: str, version: int, remedy: str = SAME_RELEASE) -> None:
        """Raises WireError for another form or version, naming both."""
        if self.form != form:
            raise WireError(f"message is a '{plain(self.form, 80)}', not a '{form}'")
        if self.version != version:
            what = form.rpartition(".")[2]
            raise WireError(f"{what} of version {self.version}; this side reads version {version}: {remedy}")
