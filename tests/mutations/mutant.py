"""What is a mutant?

Each replaces one text that is found exactly once in one file. A mutant that no test can tell from the original is not a mutant;
replace it by one that matters. Those of a room are in `of_<room>.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, found exactly once in `src/kvreshard/<path>`, becomes `new`."""

    name: str
    path: str
    old: str
    new: str
