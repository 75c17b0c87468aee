"""How does a side read what its former version wrote, and write what that version can read?

A form (a layout, a card) is a map of plain values with its name and version in it. A key that may be left out needs no new
version. Any other change raises the version by one and comes with a `Step`:

1. `up`: what the version before said, in the words of this one, with the defaults that were meant.
2. `down`: what this one says, in the words of the version before.

`Form.rise` and `Form.lower` go as many steps as it takes, so that one decoder and one encoder know the newest version only.
A step down may be dropped one release after it came; a step up stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvreshard.model.errors import WireError
from kvreshard.model.text import plain

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """From one version to the next, and back. Both get a tree that they may change, and return the tree."""

    up: Callable[[Tree], Tree]
    down: Callable[[Tree], Tree]


@dataclass(frozen=True, slots=True)
class Form:
    """A form and how it has changed: `steps[i]` leads from version i + 1 to version i + 2."""

    name: str
    steps: tuple[Step, ...] = ()

    @property
    def version(self) -> int:
        """The newest version, which this side speaks."""
        return len(self.steps) + 1

    def check(self, name: str, version: int) -> None:
        """Raises WireError for another form, or a version that this side cannot read, naming both."""
        if name != self.name:
            raise WireError(f"message is a '{plain(name, 80)}', not a '{self.name}'")
        if not 1 <= version <= self.version:
            raise WireError(
                f"{self.name.rpartition('.')[2]} of version {version}; this side reads versions 1 to {self.version}: "
                "upgrade the older side"
            )

    def rise(self, tree: Tree) -> Tree:
        """The tree in the newest version; its own is checked already. Raises WireError if it lacks what a step needs."""
        for version in range(int(tree["version"]), self.version):
            try:
                tree = {**self.steps[version - 1].up(tree), "version": version + 1}
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise WireError(f"not a {self.name} of version {version}: {plain(repr(error))}") from None
        return tree

    def lower(self, tree: Tree, version: int) -> Tree:
        """The newest version's tree in the words of `version`. Raises WireError for a version that there is not."""
        self.check(self.name, version)
        for now in range(self.version, version, -1):
            tree = {**self.steps[now - 2].down(tree), "version": now - 1}
        return tree
